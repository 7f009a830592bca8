"""``with`` blocks that hold a slot of a blocking queue end: ``with mq.lease() as obj``."""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Any, Generic, Self

from aioshm.codec import T
from aioshm.codec.frames import body_of
from aioshm.errors import QueueClosed
from aioshm.queue.blocking.end import BlockingEnd, locked, remaining_s
from aioshm.queue.ends.blocks import ReadBlock
from aioshm.queue.local.leases import VIEW_BYTES
from aioshm.ring import RingReader
from aioshm.wait.limits import deadline_after


class Block(AbstractContextManager[Any]):
    """Holds the end's lock until the block is left, or is garbage-collected after an exception of a signal handler.

    The background loop enters and leaves the asynchronous block, so that no signal handler can interrupt halfway.
    """

    def __init__(self, end: BlockingEnd, timeout: float | None) -> None:
        self._end = end
        self._timeout = timeout
        self._cancel: threading.Event | None = None
        self._value: Any = None

    def __enter__(self) -> Any:
        end = self._end
        deadline = deadline_after(self._timeout, in_thread=True)
        block = weakref.ref(self, end.block_dropped)
        end.acquire(deadline, cancel=self._cancel)
        end.block = block  # no call since: from here on, `block_dropped` releases the lock at the latest
        entered = False
        try:
            self._enter(deadline)
            entered = True
        finally:  # no other call until `drop_block` has released the lock: a handler could raise there
            if not entered:
                end.undelivered[:0] = end.taken
                if end.async_block is not None:
                    end.abandoned_blocks += [(end.async_block, self._value, True)]
                    end.async_block = None
                self._value = None
                end.drop_block()
        # Keep no reference to the value: the lease would count it as a user of the message.
        value = self._value
        self._value = None
        if end.taken:
            end.taken[0] = None
        return value

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end = self._end
        if end.block is None or end.block() is not self:
            return

        async def leave() -> None:
            async_block = end.async_block
            end.async_block = None
            await async_block.__aexit__(exc_type, exc, traceback)

        try:
            if end.async_block is not None:
                end.run(leave)
        finally:
            end.drop_block()

    async def _enter_async(self, async_block: AbstractAsyncContextManager[Any]) -> None:
        end = self._end
        value = await async_block.__aenter__()
        if end.block is not None and end.block() is self:
            self._value = value
            end.async_block = async_block
        else:  # a handler's exception has ended the wait for this coroutine
            await end.leave_block(async_block, value, True)

    @abstractmethod
    def _enter(self, deadline: float | None) -> None:
        """Wait for the slot; set ``_value``, and either ``async_block`` or ``taken`` of the end."""


class WriteBlock(Block):
    """A block of `acquire_write`, or a loan; ``make`` creates the asynchronous block, given the remaining seconds."""

    def __init__(
        self, end: BlockingEnd, make: Callable[[float | None], AbstractAsyncContextManager[Any]], timeout: float | None
    ) -> None:
        super().__init__(end, timeout)
        self._make = make

    def _enter(self, deadline: float | None) -> None:
        async def enter() -> None:
            await self._enter_async(self._make(remaining_s(deadline)))

        self._end.run(enter)


class LeaseBlock(Block):
    """A block of `lease` (decoded) or `acquire_read`."""

    def __init__(
        self,
        end: BlockingEnd,
        timeout: float | None,
        cancel: threading.Event | None,
        indefinite: bool,
        *,
        decoded: bool,
    ) -> None:
        super().__init__(end, timeout)
        deadline_after(timeout, cancel, indefinite, in_thread=True)
        self._cancel = cancel
        self._indefinite = indefinite
        self._decoded = decoded

    def _enter(self, deadline: float | None) -> None:
        end = self._end
        while end.async_block is None:
            if end.undelivered:
                end.taken = end.undelivered[:1]
                del end.undelivered[:1]
                break
            if not end.state.ready or end.reader.has_news or end.failure is not None:
                end.raise_failure()
                end.run_cancellable(lambda event: end.reader.wait_until_ready(deadline, event), self._cancel)
            elif end.reader.source.ring is None or not self._wait_for_small(deadline):
                end.run_cancellable(lambda event: self._enter_on_loop(deadline, event), self._cancel)
        if end.taken:
            end.state.lock.calls = 1  # as while an asynchronous block is open
            end.state.core.open = False
            self._value = end.taken[0]
            if not self._decoded:
                if any(self._value is message for message in end.state.raw):
                    self._value = memoryview(self._value).toreadonly()
                else:
                    self._value = body_of(end.reader.encode(self._value))

    def _wait_for_small(self, deadline: float | None) -> bool:
        """Wait for a message; take it as `dequeue` does if it is small. Return False if the loop has to lease it."""
        end = self._end
        if not end.wait_for_message(deadline, self._cancel, self._indefinite):
            return False  # the writer is gone
        core = end.state.core
        ring = end.reader.source.ring
        if not self._decoded or type(core) is not RingReader or ring is None:
            return False
        size = locked(lambda: ring.slots.size(ring.slots.begin(core.seq % len(ring.slots))))
        return size < VIEW_BYTES and end.take(1)

    async def _enter_on_loop(self, deadline: float | None, cancel: Any) -> None:
        async_block = ReadBlock(
            self._end.reader, remaining_s(deadline), cancel, self._indefinite, decoded=self._decoded
        )
        await self._enter_async(async_block)


class Leases(Generic[T]):
    """Messages to iterate over, each leased until the next one is asked for; until the writer closes."""

    def __init__(self, lend: Callable[[], AbstractContextManager[T]]) -> None:
        self._lend = lend
        self._block: AbstractContextManager[T] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        self.close()
        try:
            block = self._lend()
            message = block.__enter__()
            self._block = block
            return message
        except QueueClosed:
            raise StopIteration from None

    def close(self) -> None:
        """End the lease of the latest message."""
        block = self._block
        self._block = None
        if block is not None:
            block.__exit__(None, None, None)
