"""Blocks that hold a reader's next message, and the iterator of leased messages."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from aioshm.errors import QueueClosed
from aioshm.queue.source import OpenedMessage
from aioshm.wait.limits import deadline_after

if TYPE_CHECKING:
    from aioshm.queue.ends.reader import Reader

T = TypeVar("T")


class ReadBlock(AbstractAsyncContextManager[Any]):
    """The block of a lease or `acquire_read`: other calls wait, calls of the same task raise."""

    def __init__(
        self,
        end: Reader,
        timeout: float | None,
        cancel: asyncio.Event | None,
        indefinite: bool,
        *,
        decoded: bool = True,
    ) -> None:
        self._end = end
        self._asked = timeout, cancel, indefinite
        self._decoded = decoded
        self._block: OpenedMessage | None = None
        self._value: Any = None
        # Whether the message has left the ring already; then leaving the block releases nothing.
        self.taken: bool = False

    def pop_value(self) -> Any:
        """Return the block's value, once: `Leases` would count a second reference as a holder."""
        value = self._value
        self._value = None
        return value

    def enter_now(self) -> bool:
        """Enter the block if the message is there and no call waits; return whether the block was entered."""
        end = self._end
        if not end.enter_now(settles=not self._decoded):
            return False
        entered = False
        try:
            if end.source.poll():
                end.state.hold()
                entered = self._open()
        finally:
            if not entered:
                end.state.leave()
        return entered

    async def _enter(self) -> None:
        end = self._end
        timeout, cancel, indefinite = self._asked
        deadline = deadline_after(timeout, cancel, indefinite)
        await end.enter(deadline, cancel, settles=not self._decoded)
        entered = False
        try:
            while not entered:
                await end.wait_for_message(deadline, cancel, indefinite)
                end.state.hold()
                entered = self._open()
                if not entered:
                    await end.wait_for_body(deadline, cancel, indefinite)
        finally:
            if not entered:
                end.state.leave()

    def _open(self) -> bool:
        """Open the next message; return False if its body has yet to arrive."""
        block = self._end.source.open_block(decoded=self._decoded)
        if block is None:
            return False
        try:
            self._value = block.open()
        except BaseException:
            block.close(undo=False)
            raise
        self.taken = isinstance(block, OpenedMessage) and block.taken
        self._block = block
        return True

    def leave_now(self, *, undo: bool = False) -> None:
        """End the block; ``undo`` leaves an untaken message in place. Idempotent."""
        block = self._block
        self._block = None
        if block is None:
            return
        self._value = None
        state = self._end.state
        try:
            if not state.dismantled:
                block.close(undo=undo)
        finally:
            state.leave()

    async def __aenter__(self) -> Any:
        if not self.enter_now():
            await self._enter()
        return self.pop_value()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave_now()


class AwaitedReadBlock(ReadBlock):
    """A block of the async API, which ends when it is dropped; a blocking block would lose a signal handler's error."""

    def __del__(self) -> None:
        if getattr(self, "_block", None) is None:
            return
        state = self._end.state
        if state.on_its_thread:
            self.leave_now()
        elif state.loop is not None and not state.loop.is_closed():
            state.loop.call_soon_threadsafe(self.leave_now)


class Leases(Generic[T]):
    """Leases messages until the writer closes; dropping the iterator ends the last lease."""

    def __init__(self, end: Reader) -> None:
        self._end = end
        self._block: ReadBlock | None = None
        self._leasing = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        self._leave()
        self._leasing = True
        try:
            block = self._end.lease(None, None, False)
            message: T = await block.__aenter__()
            self._block = block
            return message
        except QueueClosed:
            raise StopAsyncIteration from None
        finally:
            self._leasing = False

    async def aclose(self) -> None:
        """End the lease of the latest message."""
        self._leave()

    def _leave(self) -> None:
        if self._leasing:
            raise RuntimeError("the next message is being leased already")
        block = self._block
        self._block = None
        if block is not None:
            block.leave_now()
