"""Messages of a local reader that the writer does not wait for: copied first, then verified."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from aioshm.codec import Codec, cannot_decode, loads_of, view_of
from aioshm.codec.base import own_copy
from aioshm.codec.frames import INLINE, OVERFLOW, RAW, body_bytes, placed_end, plain, split, split_body, unpack_header
from aioshm.codec.registry import RawCodec
from aioshm.errors import AioshmError, CodecError, CorruptSlot, MessagesLost, ReaderEvicted
from aioshm.queue.local.overflow import OverflowReader
from aioshm.queue.source import OpenedMessage
from aioshm.queue.state import EndState
from aioshm.ring import RingReader
from aioshm.ring.cores import EMPTY, SLOW_PATH

if TYPE_CHECKING:
    from aioshm.queue.local.slots import Header

T = TypeVar("T")


class CopyingSlots:
    """Copies messages out of slots, which the writer may reuse at any moment; has the methods of `SlotReader`.

    The writer sets the reader's flag of a slot that it needs: it *passes over* the message. The ring's own calls return
    nothing for such a message.
    """

    def __init__(self, state: EndState, ring: RingReader, codec: Codec, overflow: OverflowReader) -> None:
        self._state = state
        self._ring = ring
        self._codec = codec
        self._view = view_of(codec)
        self._overflow = overflow
        self.overflows: int = 0  # messages that did not fit a chunk
        ring.bind(loads_of(codec), plain(codec.code), isinstance(codec, RawCodec), None)

    def ready(self) -> bool:
        """Return whether there is a message, or one that was passed over."""
        return self._ring.messages_written() > self._ring.seq

    def receive(self) -> Any:
        """Return the next message, `EMPTY`, or `SLOW_PATH` if it was passed over or is no plain one."""
        obj = self._ring.receive()
        if obj is EMPTY and self._ring.open and self.ready():  # a ring that was closed is shut
            return SLOW_PATH
        return obj

    def take(self) -> Any:
        """Return the next message, as `Source.take`."""
        obj = decoded(self._ring, self._codec, self._ring.take)
        if obj is not SLOW_PATH and (obj is not EMPTY or not self.ready()):
            return obj
        copied = self._copy()
        if copied is None:
            return SLOW_PATH
        self._finish()
        header, body = copied
        if header[0] == RAW:
            return self._state.raw_message(body)
        return self._decoded(self._codec.decode, header, body)

    def take_many(self, most: int) -> list[Any]:
        """Return available messages, as `Source.take_many`."""
        return decoded(self._ring, self._codec, lambda: self._ring.take_many(min(most, sys.maxsize)))

    def open_block(self, *, decoded: bool) -> OpenedMessage | None:
        """Return a copy of the next message for a block, as `Source.open_block`."""
        copied = self._copy()
        if copied is None:
            return None
        header, body = copied
        kind, _, how, n_buffers, _, _, size = header
        self._ring.copied += len(body)
        self._ring.note_trace()
        body = body.toreadonly()
        value: Any = body
        if not decoded:
            if not (n_buffers or how):
                value = body[:size]
        elif kind != RAW:
            try:
                value = self._decoded(self._view, header, body)
            except BaseException:
                self._finish()
                raise
        return OpenedMessage(value, self._end_block)

    def _decoded(self, decode: Callable[..., Any], header: Header, body: memoryview) -> Any:
        """Decode a copied message; raise errors of the codec as `CodecError`."""
        _, _, how, n_buffers, _, _, size = header
        try:
            return decode(*split(body, how, n_buffers, size))
        except AioshmError:
            raise
        except Exception as error:
            raise cannot_decode(error, self._codec.name) from error

    def settle(self) -> None:
        """Do nothing: the program owns the copies."""

    def close(self) -> None:
        """Do nothing: the program owns the copies."""

    def _end_block(self, undo: bool) -> None:
        if not undo:
            self._finish()

    def _finish(self) -> None:
        """Continue with the next message."""
        self._overflow.finished()
        self._state.count_turn()
        if self._ring.intact():
            self._ring.release()
        else:  # the slot has another message by now
            self._ring.start_at(self._ring.seq + 1)

    def _copy(self) -> tuple[Header, memoryview] | None:
        """Copy the next message, which stays the next one; None if its body has yet to arrive."""
        ring = self._ring
        copied: tuple[Header, memoryview] | None = None
        failure: CorruptSlot | CodecError | None = None
        if ring.intact():
            try:
                copied = self._copy_slot()
            except (CorruptSlot, CodecError) as error:  # damaged, or being overwritten
                failure = error
            if ring.intact():
                if failure is not None:
                    self._finish()
                    raise failure
                if copied is not None:
                    ring.taken(copied[0][5])
                return copied
        if ring.evicted():
            raise refused(self._state, ring)
        first, last = ring.lose()
        raise MessagesLost(first, last, "this reader was too slow, and the writer does not wait for it")

    def _copy_slot(self) -> tuple[Header, memoryview] | None:
        seq = self._ring.seq
        slot = self._ring.slots[seq % self._ring.layout.slots]
        header: Header = unpack_header(bytes(slot.header))
        kind, code, how, n_buffers, _, _, size = header
        if kind == OVERFLOW and self._overflow.has(slot.header, seq):
            body = self._overflow.body(slot.header, seq)
            if body is None:
                return None
            self.overflows += 1
            with body:
                return header, memoryview(own_copy(body))
        if kind not in (INLINE, RAW):
            raise CorruptSlot(seq, seq, f"there is no kind {kind} of message")
        if kind == INLINE and code != self._codec.code:
            raise wrong_codec(seq, code, self._codec)
        if how:
            nbytes = placed_end(slot.body, n_buffers, size)
        else:
            _, buffers = split_body(slot.body, n_buffers, size)
            nbytes = body_bytes(size, [len(buffer) for buffer in buffers])
        with slot.body[:nbytes] as body:
            return header, memoryview(own_copy(body))


def wrong_codec(seq: int, code: int, codec: Codec) -> CodecError:
    """Return the error for a message of another codec than the queue's."""
    return CodecError(f"message {seq} has codec {code}, the queue has {codec.code} ({codec.name!r})")


def refused(state: EndState, ring: RingReader) -> ReaderEvicted:
    """Make every call of a reader that the writer continues without raise the error, from now on; return the error."""
    refusal = functools.partial(eviction, state, ring)
    state.refuse(refusal)
    return refusal()


def eviction(state: EndState, ring: RingReader) -> ReaderEvicted:
    """Return the error of a reader that the writer continues without."""
    if not state.dismantled and ring.dismissed():
        return ReaderEvicted(
            f"{state!r}: the writer has dismissed this reader; close it, and create another reader to continue"
        )
    return ReaderEvicted(
        f"{state!r}: too slow: the writer no longer waits for this reader; more slots (for messages of more than "
        f"{ring.layout.inline_bytes} bytes, more max_chunks) allow longer pauses; slow_reader='skip' loses "
        "messages instead"
    )


def decoded(ring: RingReader, codec: Codec, call: Callable[[], T]) -> T:
    """Call the core; raise `CodecError` if the core has finished with a message that it could not decode."""
    try:
        return call()
    except CodecError:
        raise
    except Exception as error:
        if not ring.damaged:
            raise
        ring.damaged = False
        raise cannot_decode(error, codec.name) from error
