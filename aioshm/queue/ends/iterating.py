"""Messages that are leased while they are iterated over: what the core leaves to others of that."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from aioshm.errors import QueueClosed
from aioshm.ring.atomics import LeasedMessages

if TYPE_CHECKING:
    from aioshm.queue.ends.reading import ReadingEnd

T_co = TypeVar("T_co", covariant=True)


class Leases(Protocol[T_co]):
    """Messages to iterate over with ``async for``, each leased until the next one is asked for."""

    def __aiter__(self) -> Self: ...

    def __anext__(self) -> Awaitable[T_co]: ...

    def aclose(self) -> Coroutine[Any, Any, None]:
        """End the lease of the latest message."""


def lease_each(end: ReadingEnd) -> Leases[Any]:
    """Return what iterates over an end's messages until the writer closes, and has the latest of them."""
    loop = _LeaseLoop(end)
    return LeasedMessages(end.calls, loop.open, loop.close, loop.abandon)


class _LeaseLoop:
    """Opens and ends the leases of one iteration that the core cannot; see `LeasedMessages`."""

    def __init__(self, end: ReadingEnd) -> None:
        self._end = end
        self._thread = get_ident()
        self._block: AbstractAsyncContextManager[Any] | None = None

    async def open(self, by_core: bool) -> Any:
        """Lease the next message: for the core, whose block then ends it, or with a block of this one's own."""
        try:
            if by_core:
                return await self._end.open_lease()
            block = self._end.lease(None, None, False)
            value = [await block.__aenter__()]  # and no name keeps it here: a lease would take that for a holder
        except QueueClosed:
            raise StopAsyncIteration from None
        self._block = block
        return value.pop()

    async def close(self) -> None:
        """End the lease whose block is this one's own, if there is any."""
        block, self._block = self._block, None
        if block is not None:
            await block.__aexit__(None, None, None)

    def abandon(self, by_core: bool) -> None:
        """End a lease of which nobody will ask for the next message; may be called from a destructor, anywhere."""
        ending = self._end.close_lease(None, None, None) if by_core else self.close()
        if get_ident() == self._thread:
            _run(ending)
        elif (loop := self._end.gate.loop) is not None and not loop.is_closed():
            loop.call_soon_threadsafe(_run, ending)


def _run(ending: Coroutine[Any, Any, object]) -> None:
    """Have a coroutine end that has nothing to wait for."""
    with suppress(StopIteration):
        ending.send(None)
    ending.close()
