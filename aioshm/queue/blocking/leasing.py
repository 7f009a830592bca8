"""Leases of an end that threads use: in the core, without the loop, where that is all there is to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

from aioshm.errors import QueueClosed
from aioshm.queue.blocking.blocks import Block
from aioshm.queue.blocking.lingering import linger, watch
from aioshm.queue.ends.reading import ReadingEnd
from aioshm.ring.atomics import ReaderCore
from aioshm.wait.blocking import WindowBegins

if TYPE_CHECKING:
    from aioshm.queue.blocking.held import Held

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


class Leasing:
    """Does what the core leaves to others of a lease.

    Args:
        held: The end that threads use.
        end: Reads; it is ready.

    Attributes:
        block: What is the block of each lease; None if the core cannot lease.
    """

    def __init__(self, held: Held, end: ReadingEnd) -> None:
        self._held = held
        self._end = end
        self._core = cast(ReaderCore, end.gate.core)
        self.block: Any = end.bind_leases(self._open_slowly, self._close_slowly, self._await_next, None)

    def _await_next(self) -> bool:
        """Wait for the next message as `MessageQueue.dequeue` does; return whether it may be leased at once by now."""
        end, core = self._end, self._core
        if core is not end.gate.core:  # of the writer before this one
            return False
        if end.linger_ns:
            if linger(end, None):
                return True
        else:
            os.sched_yield()
            if core.passes() and core.ready():
                return True
        try:
            self._held.run(lambda _: end.wait_for_message())
        except WindowBegins:
            watch(end, None)
        return not self._held.kept

    def _open_slowly(self) -> Block:
        """Return the block of a lease that the core cannot give."""
        return self._held.new_lease()

    def _close_slowly(self, *_: Any) -> None:
        """End a lease of the core's that is more than giving the slot back, or wake the writer after one."""
        held, core = self._held, self._core
        if core.leased:
            try:
                held.loop.run_now(self._end_lease)
            finally:
                if not core.leased:
                    held.end_turn()
        elif core.owes:
            held.tell()

    def _end_lease(self) -> None:
        self._held.gate.end_lease()
        self._held.tell_now()
