"""Messages as a local reader finds them that the writer does not wait for: copied first, then believed."""

from __future__ import annotations

import functools
from typing import Any

from aioshm.codec import Codec, cannot_decode, loads_of, view_of
from aioshm.codec.base import own_copy
from aioshm.codec.frames import INLINE, OVERFLOW, RAW, body_bytes, placed_end, plain, split, split_body, unpack_header
from aioshm.codec.raw import RawCodec
from aioshm.errors import CodecError, CorruptSlot, MessagesLost, ReaderEvicted
from aioshm.queue.local.overflow import OverflowReader
from aioshm.queue.state import EndState
from aioshm.ring import RingReader
from aioshm.ring.copying import CopyingCore
from aioshm.ring.cores import SLOW_PATH, ReaderCore


class Copied:
    """A message in memory of the reader's own."""

    def __init__(self, kind: int, how: int, n_buffers: int, size: int, body: memoryview) -> None:
        self.kind = kind
        self.how = how
        self.n_buffers = n_buffers
        self.size = size
        self.body = body  # what lay in the slot, the chunk, or the overflow segment


class CopyingSlots:
    """Copies messages out of slots, which the writer may take back at any moment; as `SlotReader`."""

    def __init__(
        self, state: EndState, ring: RingReader, core: CopyingCore, codec: Codec, overflow: OverflowReader
    ) -> None:
        self._state = state
        self._ring = ring
        self._core = core
        self._codec = codec
        self._view = view_of(codec)
        self._overflow = overflow
        self.overflows: int = 0  # how many messages did not fit a chunk
        core.bind(loads_of(codec), plain(codec.code), isinstance(codec, RawCodec), None)

    def take(self) -> Any:
        """Return the next message, as `Source.take`."""
        try:
            obj = self._core.take()
        except Exception as error:
            if not was_damaged(self._core):
                raise
            raise cannot_decode(error, self._codec.name) from error
        if obj is not SLOW_PATH:
            return obj
        copied = self._copy()
        if copied is None:
            return SLOW_PATH
        self.finished()
        if copied.kind == RAW:
            return bytearray(copied.body)
        main, buffers = split(copied.body, copied.how, copied.n_buffers, copied.size)
        return self._codec.decode(main, buffers)

    def take_many(self, most: int) -> list[Any]:
        """Return what is there, as `Source.take_many`."""
        try:
            return self._core.take_many(most)
        except Exception as error:
            if not was_damaged(self._core):
                raise
            raise cannot_decode(error, self._codec.name) from error

    def open_block(self, *, decoded: bool) -> CopiedBlock | None:
        """Return the next message for a block, as `Source.open_block`: a copy of it."""
        copied = self._copy()
        if copied is None:
            return None
        self._core.copied += len(copied.body)
        self._core.note_trace()
        return CopiedBlock(self, copied, decoded=decoded)

    def seen(self, copied: Copied, *, decoded: bool) -> Any:
        """Return what a block sees of a message."""
        if not decoded:
            return (copied.body if copied.n_buffers or copied.how else copied.body[: copied.size]).toreadonly()
        if copied.kind == RAW:
            return copied.body
        main, buffers = split(copied.body, copied.how, copied.n_buffers, copied.size)
        return self._view(main, buffers)

    def finished(self) -> None:
        """Go on to the message behind this one."""
        self._overflow.finished()
        self._state.count_turn()
        self._core.release()

    def settle(self) -> None:
        """Do nothing: copies may live on."""

    def close(self) -> None:
        """Do nothing: copies may live on."""

    # Copying

    def _copy(self) -> Copied | None:
        """Copy the next message, which stays the next one; None if not all of it has arrived.

        Raises:
            MessagesLost: It is lost, and perhaps some behind it; the next call goes on behind those.
            ReaderEvicted: The writer goes on without this reader.
            CorruptSlot, CodecError: It is damaged; the next call goes on behind it.
        """
        copied: Copied | None = None
        failure: CorruptSlot | CodecError | None = None
        if self._core.intact():
            try:
                copied = self._copy_slot()
            except (CorruptSlot, CodecError) as error:  # of damage, or of what is being overwritten
                failure = error
            self._core.stage()
            if self._core.intact():
                if failure is not None:
                    self.finished()
                    raise failure
                if copied is not None:
                    self._core.taken(self._core.published_ns)
                return copied
        if self._ring.evicted():
            refusal = functools.partial(eviction, self._state, self._ring)
            self._state.refuse(refusal)
            raise refusal()
        first, last = self._core.lose()
        raise MessagesLost(first, last, "this reader was too slow, and the writer does not wait for it")

    def _copy_slot(self) -> Copied | None:
        slot, seq = self._core.slot, self._core.seq
        kind, code, how, n_buffers, _, self._core.published_ns, size = unpack_header(bytes(slot.header))
        if kind == OVERFLOW and self._overflow.has(slot.header, seq):
            body = self._overflow.body(slot.header, seq)
            if body is None:
                return None
            self.overflows += 1
            with body:
                return Copied(kind, how, n_buffers, size, memoryview(own_copy(body)))
        if kind not in (INLINE, RAW):
            raise CorruptSlot(seq, seq, f"there is no kind {kind} of message")
        if kind == INLINE and code != self._codec.code:
            raise CodecError(f"message {seq} has codec {code}, the queue has {self._codec.code} ({self._codec.name!r})")
        if how:
            nbytes = placed_end(slot.body, n_buffers, size)
        else:
            _, buffers = split_body(slot.body, n_buffers, size)
            nbytes = body_bytes(size, [len(buffer) for buffer in buffers])
        with slot.body[:nbytes] as body:
            return Copied(kind, how, n_buffers, size, memoryview(own_copy(body)))


def eviction(state: EndState, ring: RingReader) -> ReaderEvicted:
    """Return the error of a reader that the writer goes on without."""
    if not state.dismantled and ring.dismissed():
        return ReaderEvicted(
            f"{state!r}: the writer has dismissed this reader; close it, and make another one for what comes next"
        )
    return ReaderEvicted(
        f"{state!r}: too slow: the writer no longer waits for this reader; more slots (for messages of more than "
        f"{ring.layout.inline_bytes} bytes, more max_chunks) allow longer pauses; slow_reader='skip' loses "
        "messages instead"
    )


class CopiedBlock:
    """A copied message, while a block has it."""

    def __init__(self, slots: CopyingSlots, copied: Copied, *, decoded: bool) -> None:
        self._slots = slots
        self._copied = copied
        self._decoded = decoded

    def open(self) -> Any:
        return self._slots.seen(self._copied, decoded=self._decoded)

    def close(self, *, undo: bool) -> None:
        if not undo:
            self._slots.finished()


def was_damaged(core: ReaderCore | CopyingCore) -> bool:
    """Return, once, whether the core has finished with the message that it has just failed to decode."""
    damaged, core.damaged = core.damaged, False
    return damaged
