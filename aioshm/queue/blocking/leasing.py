"""Iterating over messages that are leased, where calls block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from aioshm.errors import QueueClosed
from aioshm.queue.blocking.blocks import Block

if TYPE_CHECKING:
    pass

T_co = TypeVar("T_co", covariant=True)


class Leases(Protocol[T_co]):
    """Messages to iterate over, each leased until the next one is asked for."""

    def __iter__(self) -> Self: ...

    def __next__(self) -> T_co: ...

    def close(self) -> None:
        """End the lease of the latest message."""


class EachLeased:
    """Leases messages one after the other, until the writer closes; as `LeasedMessages`.

    Args:
        lend: Returns the block of the next lease.
    """

    def __init__(self, lend: Callable[[], AbstractContextManager[Any]]) -> None:
        self._lend = lend
        self._block: AbstractContextManager[Any] | None = None
        self._leasing = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        self._begin()
        try:
            self._leave()
            block = self._lend()
            message = block.__enter__()
            self._block = block
            if isinstance(block, Block):
                block.frame = None  # this call's, which refers to this iterator: a loop that is left has to drop it
            return message
        except QueueClosed:
            raise StopIteration from None
        finally:
            self._leasing = False

    def close(self) -> None:
        """End the lease of the latest message."""
        self._begin()
        try:
            self._leave()
        finally:
            self._leasing = False

    def _begin(self) -> None:
        if self._leasing:
            raise RuntimeError("the next message is being leased already")
        self._leasing = True

    def _leave(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(None, None, None)

    def __del__(self) -> None:
        self._leave()
