"""Blocks that hold a reader's next message, and loans: blocks that fill the writer's next message."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from aioshm.arguments import check_timeout
from aioshm.codec.frames import ALIGNMENT
from aioshm.errors import MessageTooLarge, QueueClosed, RoleError, SharedMemoryError
from aioshm.queue.local.loans import IN_PLACE_BYTES, MAIN_BYTES, ArraySpec, Extent, Like
from aioshm.queue.source import OpenedMessage
from aioshm.ring.slot import Slot
from aioshm.wait.limits import deadline_after

if TYPE_CHECKING:
    from aioshm.queue.ends.reader import Reader
    from aioshm.queue.ends.writer import Writer

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
        self._value = block.pop()
        self.taken = block.taken
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


# Loans


def itself(loaned: Any) -> Any:
    """Return the argument: the loaned object itself is encoded."""
    return loaned


def room_for(nbytes: int, most: int) -> int:
    """Return the greatest size of a message with ``nbytes`` of loaned memory."""
    if nbytes > most:
        raise MessageTooLarge(f"the message has {nbytes} bytes, options.max_message_bytes allows {most}")
    return ALIGNMENT + nbytes + MAIN_BYTES


class Loan(AbstractAsyncContextManager[T], Generic[T]):
    """The block of one loan; keeps no reference to the memory, which would count as the lender's."""

    def __init__(
        self,
        end: Writer,
        room: int,
        lend: Callable[[Extent], T],  # returns the object to fill
        as_sent: Callable[[T], Any],  # returns the object to encode
        timeout: float | None,
    ) -> None:
        self._end = end
        self._room = room
        self._lend = lend
        self._as_sent = as_sent
        self._timeout = check_timeout("timeout", timeout)
        self._slot: Slot | None = None
        self._extent: Extent | None = None
        self._filled: list[T] = []

    async def __aenter__(self) -> T:
        end = self._end
        state = end.state
        deadline = deadline_after(self._timeout)
        await end.prepare(deadline)
        await state.enter(deadline)
        try:
            slot = await end.sender.claim(self._room, deadline)
            extent = Extent()
            if self._room >= IN_PLACE_BYTES and end.ring.ranks:
                extent = end.ring.loans.extent(slot, self._room)
            state.hold()
        except BaseException:
            state.leave()
            raise
        try:
            self._filled.append(self._lend(extent))
        except BaseException:
            self._close(extent)
            raise
        self._slot = slot
        self._extent = extent
        return self._filled[-1]

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        slot = self._slot
        extent = self._extent
        if slot is None or extent is None:
            return
        self._slot = None
        try:
            if exc_type is None:
                await self._publish(slot, extent)
        finally:
            self._filled.clear()
            self._extent = None
            if exc_type is None:
                self._close(extent)
            else:
                with suppress(SharedMemoryError):  # the caller gets the error of the block
                    self._close(extent)

    async def _publish(self, slot: Slot, extent: Extent) -> None:
        """Publish the filled memory in place, or a copy where a copy costs less."""
        sender = self._end.sender
        self._end.state.check_usable()
        message = sender.encode(self._as_sent(self._filled.pop()))
        placed = extent.place(message)
        if placed is not None:
            sender.checked_size(message)
            outgoing = sender.pack(message)
            message = b""
            sender.put_placed(slot, extent, placed, outgoing)
            return
        message = extent.copied_out(message)
        self._end.ring.loans.take_back(extent)
        await sender.put_waiting([message], deadline_after(self._timeout))

    def _close(self, extent: Extent) -> None:
        """Take the memory back from the lender, and release the call lock."""
        try:
            self._end.ring.loans.take_back(extent)
        finally:
            self._end.state.leave()

    def __del__(self) -> None:
        if getattr(self, "_extent", None) is None:
            return
        state = self._end.state
        try:
            text = f"a block of {state!r} that has its slot was never left"
            warnings.warn(text, ResourceWarning, 2, self)
        finally:
            assert self._extent is not None
            self._filled.clear()
            if state.loop is not None and not state.loop.is_closed():
                state.loop.call_soon_threadsafe(self._close, self._extent)


class Message(MutableMapping[str, Any]):
    """A message that is being built; see `aioshm.MessageQueue.build`.

    Attributes:
        value: The object to send: a dict, to which indexing refers, unless the block sets another object.
    """

    def __init__(self, extent: Extent) -> None:
        self._extent: Extent | None = extent
        self.value: Any = {}

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32", like: Like = "numpy") -> Any:
        """Return an uninitialized array or tensor, to be filled and put into the message.

        The array lies in shared memory while the room lasts that `build` was called with, and in private memory after
        that. An array that the block does not put into the message is not sent.

        Args:
            shape: The shape, or the length of a one-dimensional array.
            dtype: The name of a dtype, or the dtype itself.
            like: ``"numpy"`` or ``"torch"``.

        Raises:
            TypeError, ValueError: An argument is invalid; the text names it.
            RoleError: The block has ended.
        """
        if self._extent is None:
            raise RoleError("the block of this message has ended, and its memory was given back: build another one")
        return self._extent.lend(ArraySpec(shape, dtype, like))

    def take(self) -> Any:
        """Return the object to send, and keep no reference; internal."""
        value = self.value
        self.value = None
        self._extent = None
        return value

    def __getitem__(self, key: str) -> Any:
        return self.value[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.value[key] = value

    def __delitem__(self, key: str) -> None:
        del self.value[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.value)

    def __len__(self) -> int:
        return len(self.value)
