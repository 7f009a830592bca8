"""Iterating over messages, each leased until the next one is asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from aioshm.errors import QueueClosed

if TYPE_CHECKING:
    from aioshm.queue.ends.reading import ReadingEnd

T_co = TypeVar("T_co", covariant=True)


class Leases(Protocol[T_co]):
    """Messages to iterate over with ``async for``, each leased until the next one is asked for."""

    def __aiter__(self) -> Self: ...

    def __anext__(self) -> Awaitable[T_co]: ...

    def aclose(self) -> Coroutine[Any, Any, None]:
        """End the lease of the latest message."""


class LeasedMessages:
    """Leases an end's messages one after the other, until the writer closes.

    A loop that is left, by ``break`` or by an exception, drops this iterator, which ends the lease of its last message.

    Args:
        end: The reading end.
    """

    def __init__(self, end: ReadingEnd) -> None:
        self._end = end
        self._thread = get_ident()
        self._block: AbstractAsyncContextManager[Any] | None = None
        self._leasing = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        self._begin()
        try:
            await self._leave()
            block = self._end.lease(None, None, False)
            message = await block.__aenter__()
            self._block = block
            return message
        except QueueClosed:
            raise StopAsyncIteration from None
        finally:
            self._leasing = False

    async def aclose(self) -> None:
        """End the lease of the latest message."""
        self._begin()
        try:
            await self._leave()
        finally:
            self._leasing = False

    def _begin(self) -> None:
        if self._leasing:
            raise RuntimeError("the next message is being leased already")
        self._leasing = True

    async def _leave(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            await block.__aexit__(None, None, None)

    def __del__(self) -> None:
        if self._block is None:
            return
        ending = _leave(self._block)
        loop = self._end.gate.loop
        if get_ident() == self._thread:
            _run(ending)
        elif loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(_run, ending)


async def _leave(block: AbstractAsyncContextManager[Any]) -> None:
    await block.__aexit__(None, None, None)


def _run(ending: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine that has nothing to wait for."""
    with suppress(StopIteration):
        ending.send(None)
    ending.close()
