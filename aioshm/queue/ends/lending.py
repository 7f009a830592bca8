"""Loans: memory of the next message, given to a block to fill, and sent by reference when the block ends."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pickle import PickleBuffer
from types import TracebackType
from typing import Any, Generic, TypeAlias, TypeVar

from aioshm.arguments import check_int, check_timeout
from aioshm.codec import Codec, Encoded, MsgpackCodec, PickleCodec, RawCodec
from aioshm.codec.frames import ALIGNMENT
from aioshm.errors import MessageTooLarge, RoleError, SharedMemoryError
from aioshm.queue.ends.sending import Sender
from aioshm.queue.local.loans import IN_PLACE_BYTES, MAIN_BYTES, ArraySpec, Extent, Like, Placed
from aioshm.queue.local.readers import LocalReaders
from aioshm.queue.state import EndState
from aioshm.ring.slot import Slot
from aioshm.wait.limits import deadline_after

T = TypeVar("T")
KNOWN_SPECS = 64

Prepare: TypeAlias = Callable[[float | None], Awaitable[None]]


class Lender:
    """Lends memory, one block at a time."""

    def __init__(
        self,
        state: EndState,
        ring: LocalReaders,
        sender: Sender,
        codec: Codec,
    ) -> None:
        self.state = state
        self._ring = ring
        self._sender = sender
        self.is_local: bool = sender.is_local
        self._pickles = isinstance(codec, PickleCodec)
        self._known: dict[ArraySpec, Placed] = {}  # what is written for arrays, where that depends on nothing else
        self._knows = self.is_local and isinstance(codec, PickleCodec | MsgpackCodec | RawCodec)
        self._largest = ring.ring.layout.max_chunk_bytes
        self._most = state.options.max_message_bytes

    def loan(self, prepare: Prepare, spec: ArraySpec, timeout: float | None) -> Loan[Any]:
        """Lend an array, as `aioshm.MessageQueue.loan`; ``prepare`` runs before any sending."""
        room = self._room_for(spec.nbytes)
        return Loan(self, prepare, room, lambda extent: extent.lend(spec), _itself, timeout, spec)

    def loan_bytes(self, prepare: Prepare, nbytes: int, timeout: float | None) -> Loan[memoryview]:
        """Lend bytes, as `aioshm.MessageQueue.loan_bytes`."""
        room = self._room_for(check_int("nbytes", nbytes, minimum=0))
        as_sent = PickleBuffer if self._pickles else _itself
        return Loan(self, prepare, room, lambda extent: extent.lend_bytes(nbytes), as_sent, timeout)

    def build(self, prepare: Prepare, nbytes: int | None, timeout: float | None) -> Loan[Message]:
        """Lend arrays inside of an object, as `aioshm.MessageQueue.build`."""
        room = self._largest if nbytes is None else self._room_for(check_int("nbytes", nbytes, minimum=0))
        return Loan(self, prepare, room, Message, Message.take, timeout)

    def _room_for(self, nbytes: int) -> int:
        """Return the greatest size of a message with ``nbytes`` of loaned memory."""
        if nbytes > self._most:
            raise MessageTooLarge(f"the message has {nbytes} bytes, options.max_message_bytes allows {self._most}")
        return ALIGNMENT + nbytes + MAIN_BYTES

    def open_now(self, room: int) -> tuple[Slot, Extent] | None:
        """Call `open`, if there is nothing to wait for."""
        if not (self.is_local and self.state.core.passes()):
            return None
        slot = self._sender.claim(room)
        if slot is None:
            return None
        extent = self._extent_for(slot, room)
        self.state.enter_now()
        self.state.hold()
        return slot, extent

    def _extent_for(self, slot: Slot, room: int) -> Extent:
        in_place = room >= IN_PLACE_BYTES and self._ring.ranks
        return self._ring.loans.extent(slot, room) if in_place else Extent()

    async def open(self, room: int, deadline: float | None) -> tuple[Slot, Extent]:
        """Wait for a slot and room, which the caller has until `close`."""
        state, sender = self.state, self._sender
        await state.enter(deadline)
        try:
            while (slot := sender.claim(room)) is None:
                await sender.wait_for_bytes(room, deadline)
            extent = self._extent_for(slot, room)
            state.hold()
        except BaseException:
            state.leave()
            raise
        return slot, extent

    def publish(
        self,
        slot: Slot,
        extent: Extent,
        filled: list[Any],
        as_sent: Callable[[Any], Any],
        spec: ArraySpec | None,
    ) -> Encoded | None:
        """Publish the filled memory; return an encoded message that has to be copied.

        Nothing here keeps a reference to loaned memory: `take_back` would count the reference as the
        lender's.
        """
        sender, knows = self._sender, self._knows and spec is not None and not spec.torch and extent.window is not None
        self.state.check_usable()
        if knows:
            assert spec is not None
            knows = spec.fits(filled[0])
            if knows and (known := self._known.get(spec)) is not None:
                filled.clear()
                sender.put_placed(slot, extent, known, None)
                return None
        message = sender.encode(as_sent(filled.pop()))
        placed = extent.place(message)
        if placed is None:
            message = extent.copied_out(message)
            self._ring.loans.take_back(extent)
            return message
        sender.checked_size(message)
        outgoing = sender.pack(message)
        message = b""
        sender.put_placed(slot, extent, placed, outgoing)
        if knows and spec is not None:
            if len(self._known) >= KNOWN_SPECS:
                self._known.clear()
            self._known[spec] = placed
        return None

    async def publish_copy(self, message: Encoded, deadline: float | None) -> None:
        """Publish an encoded message that lies elsewhere."""
        sender = self._sender
        need = sender.need([message])
        while not sender.has_room([message], need):
            await sender.wait_for_room([message], need, deadline)
            self.state.check_usable()
        sender.put_all([message])

    def close(self, extent: Extent) -> None:
        """Take back loaned memory, and release the call lock."""
        try:
            self._ring.loans.take_back(extent)
        finally:
            self.state.leave()


class Loan(AbstractAsyncContextManager[T], Generic[T]):
    """The block of one loan; the timeout counts again for a copy of the message."""

    def __init__(
        self,
        lender: Lender,
        prepare: Prepare,
        room: int,
        lend: Callable[[Extent], T],
        as_sent: Callable[[T], Any],
        timeout: float | None,
        spec: ArraySpec | None = None,
    ) -> None:
        self._lender = lender
        self._spec = spec
        # Runs before everything that sends, until a deadline.
        self._prepare = prepare
        self._room = room
        self._lend = lend
        # Returns the object to encode.
        self._as_sent = as_sent
        self._timeout = None if timeout is None else check_timeout("timeout", timeout)
        self._slot: Slot | None = None
        self._extent: Extent | None = None
        self._filled: list[T] = []
        self._message: Encoded | None = None

    def enter_now(self) -> bool:
        """Enter the block, if there is nothing to wait for; return whether that was done."""
        opened = self._lender.open_now(self._room)
        if opened is not None:
            self._begin(*opened)
        return opened is not None

    @property
    def is_local(self) -> bool:
        return self._lender.is_local

    @property
    def value(self) -> T:
        """The value for the block."""
        return self._filled[-1]

    def leave_now(self, exc_type: type[BaseException] | None) -> bool:
        """End the block; return False if a message remains for `leave_copy`."""
        lender, slot, extent = self._lender, self._slot, self._extent
        if slot is None or extent is None:
            return True
        self._slot = None
        done = True
        try:
            if exc_type is None:
                self._message = lender.publish(slot, extent, self._filled, self._as_sent, self._spec)
                done = self._message is None
            return done
        finally:
            self._filled.clear()
            if done:
                self._extent = None
                if exc_type is None:
                    lender.close(extent)
                else:
                    with suppress(SharedMemoryError):  # the caller is to see the error of the block
                        lender.close(extent)

    async def leave_copy(self) -> None:
        """Send the message that `leave_now` has left."""
        message, self._message, extent, self._extent = self._message, None, self._extent, None
        assert message is not None
        assert extent is not None
        try:
            await self._lender.publish_copy(message, deadline_after(self._timeout))
        finally:
            self._lender.close(extent)

    def _begin(self, slot: Slot, extent: Extent) -> None:
        try:
            self._filled.append(self._lend(extent))
        except BaseException:
            self._lender.close(extent)
            raise
        self._slot, self._extent = slot, extent

    async def __aenter__(self) -> T:
        if not self.enter_now():
            deadline = deadline_after(self._timeout)
            await self._prepare(deadline)
            self._begin(*await self._lender.open(self._room, deadline))
        return self._filled[-1]

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.leave_now(exc_type):
            await self.leave_copy()

    def __del__(self) -> None:
        if getattr(self, "_extent", None) is None:
            return
        loop = self._lender.state.loop
        try:
            text = f"a block of {self._lender.state!r} that has its slot was never left"
            warnings.warn(text, ResourceWarning, 2, self)
        finally:
            assert self._extent is not None
            self._filled.clear()
            if loop is not None and not loop.is_closed():
                loop.call_soon_threadsafe(self._lender.close, self._extent)


class Message(MutableMapping[str, Any]):
    """A message that is being built; see `aioshm.MessageQueue.build`.

    Attributes:
        value: What is sent: the dict that indexing refers to, unless something else was set.
    """

    def __init__(self, extent: Extent) -> None:
        self._extent: Extent | None = extent
        self.value: Any = {}

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32", like: Like = "numpy") -> Any:
        """Return an array, or a tensor, of whatever bytes are there, to be filled and to be put into the message.

        It lies where readers will see it, as far as the room goes for which `build` was asked. What is not put into the
        message is not sent.

        Args:
            shape: Its shape, or its length.
            dtype: The name of its type, or that of NumPy or torch itself.
            like: ``"numpy"`` or ``"torch"``.

        Raises:
            TypeError, ValueError: An argument is not what it has to be; the text names it.
            RoleError: The block has ended.
        """
        if self._extent is None:
            raise RoleError("the block of this message has ended, and its memory was given back: build another one")
        return self._extent.lend(ArraySpec.of(shape, dtype, like))

    def take(self) -> Any:
        """Return the object to send, and keep nothing; for this package."""
        value, self.value, self._extent = self.value, None, None
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


def _itself(loaned: Any) -> Any:
    return loaned
