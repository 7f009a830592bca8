"""Messages as a local reader finds them: what is in a slot, or in what its marker names, be it a segment or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aioshm.codec import Codec, cannot_decode, loads_of, view_of
from aioshm.codec.buffers import own_copy
from aioshm.codec.frames import (
    INLINE,
    OVERFLOW,
    RAW,
    body_bytes,
    placed_end,
    plain,
    split,
    split_body,
    split_placed,
    unpack_header,
)
from aioshm.codec.raw import RawCodec
from aioshm.errors import AioshmError, CodecError, CorruptSlot, SharedMemoryError
from aioshm.queue.ends.gate import Gate
from aioshm.queue.ends.source import SourceBlock
from aioshm.queue.local.arrays import MOST_MAIN_BYTES, ReceivedArrays, writes_arrays_alike
from aioshm.queue.local.copying import eviction
from aioshm.queue.local.leases import PLACED_VIEW_BYTES, VIEW_BYTES, Leases, Show
from aioshm.queue.local.overflow import OverflowReader
from aioshm.queue.local.waker import WriterWaker
from aioshm.ring import RingReader
from aioshm.ring.atomics import ELSEWHERE, NOTHING, ReaderCore, memory_fence
from aioshm.ring.layout import SLOT_HEADER_BYTES
from aioshm.ring.slot import Slot


class SlotReader:
    """Takes messages out of slots, and gives the slots back.

    Args:
        gate: The end's.
        ring: The reader's cursor.
        codec: Makes objects of bytes.
        overflow: Where messages are that did not fit a chunk.
        waker: Told when a slot went back and the writer is parked.
        make_leases: Makes what leased messages are seen through, which takes a descriptor, given what decodes
            them there.

    """

    def __init__(
        self,
        gate: Gate,
        ring: RingReader,
        codec: Codec,
        overflow: OverflowReader,
        waker: WriterWaker,
        make_leases: Callable[[Show], Leases],
    ) -> None:
        self._gate = gate
        self._ring = ring
        self._core = ring.core
        self._slots = ring.slots
        self._code = codec.code
        self._codec = codec
        self._view = view_of(codec)
        self._overflow = overflow
        self._waker = waker
        self._make_leases = make_leases
        self._leases: Leases | None = None
        self._shown: tuple[int, int, int] | None = None  # chunk, slot and bytes of what a lease sees where it lies
        self._core.bind(loads_of(codec), plain(codec.code), isinstance(codec, RawCodec), waker.slot_is_free)
        self._core.bind_beside(self._decode_beside)
        self._arrays = ReceivedArrays(codec)
        self._core.bind_arrays(self._arrays.by_main, writes_arrays_alike(codec))

    def take(self) -> Any:
        """Return the next message, as `Source.take`."""
        try:
            obj = self._core.take()
        except CodecError:
            raise
        except Exception as error:
            raise cannot_decode(error, self._codec.name) from error
        if obj is not NOTHING and obj is not ELSEWHERE:
            return obj
        try:
            obj = obj if obj is NOTHING else self._take_unusual()
        except AioshmError:
            self.check_place()
            raise
        except Exception as error:
            self.check_place()
            raise cannot_decode(error, self._codec.name) from error
        self.check_place()
        return obj

    def check_place(self) -> None:
        """Raise if the writer goes on without this reader: what was read of a slot may be another message by then."""
        memory_fence()  # after what was read
        if self._ring.evicted():
            raise eviction(self._gate, self._ring) from None

    def take_many(self, most: int) -> list[Any]:
        """Return what is there, as `Source.take_many`."""
        try:
            return self._core.take_many(min(most, sys.maxsize))
        except Exception as error:
            raise cannot_decode(error, self._codec.name) from error

    def _decode_beside(self, begin: int) -> Any:
        """Decode a message with buffers for the core; `ELSEWHERE` if there is anything else about it."""
        kind, code, how, n_buffers, seq, at, size = unpack_header(self._slots.bodies, begin)
        if kind != INLINE or code != self._code or seq != self._core.seq:
            return ELSEWHERE
        main, buffers = (split_placed if how else split_body)(self._slots.body(begin), n_buffers, size)
        obj = self._codec.decode(main, buffers)
        if self._core.unknown:
            self._arrays.learn(bytes(main), obj)
        self._core.published_ns = at
        return obj

    def _take_unusual(self) -> Any:
        slot = self.next_slot()
        kind, _, how, n_buffers, _, at, size = unpack_header(slot.header)
        elsewhere = self.overflowed(slot)
        body: memoryview | None = None
        try:
            if elsewhere:
                body = self.overflow_body(slot)
                return ELSEWHERE if body is None else self._decoded(body, how, n_buffers, size)
            room = self.inline_body(slot)
            return bytearray(room[:size]) if kind == RAW else self._decoded(room, how, n_buffers, size)
        except CorruptSlot:
            elsewhere = False
            raise
        finally:
            if body is not None:
                body.release()
                self.release_overflow(at)
            elif not elsewhere:
                self.release(at)

    def open_block(self, *, decoded: bool) -> SourceBlock | None:
        """Return the next message for a block, as `Source.open_block`."""
        slot = self.next_slot()
        if not self.overflowed(slot) or (decoded and self._overflow.where(slot.header, self.seq) is not None):
            self._core.note_trace()
            return LeasedSlot(self, slot) if decoded else RawBlock(self, slot, None)
        try:
            body = self.overflow_body(slot)
        except CorruptSlot:
            self.release()
            raise
        if body is None:
            return None
        self._core.note_trace()
        return OverflowBlock(self, slot, body) if decoded else RawBlock(self, slot, body)

    # Looking into slots

    @property
    def overflows(self) -> int:
        """How many messages did not fit a chunk."""
        return self._core.overflows

    @property
    def seq(self) -> int:
        """Sequence number of the next message."""
        return self._core.seq

    def next_slot(self) -> Slot:
        """Return the next message's slot, which is there."""
        slot = self._ring.peek()
        assert slot is not None
        return slot

    def overflowed(self, slot: Slot) -> bool:
        """Return whether a slot has a message that did not fit its chunk."""
        kind, _, _, _, seq, _, _ = unpack_header(slot.header)
        return kind == OVERFLOW and seq == self.seq and self._overflow.has(slot.header, seq)

    def overflow_body(self, slot: Slot) -> memoryview | None:
        """Return what did not fit a slot's chunk, as `OverflowReader.body`."""
        body = self._overflow.body(slot.header, self.seq)
        if body is not None:
            self._core.overflows += 1
        return body

    def inline_body(self, slot: Slot) -> memoryview:
        """Return the body of a message that is in the ring, and what room is behind it.

        Raises:
            CorruptSlot, CodecError: The slot holds no whole message of this queue's codec, nor one without.
        """
        kind, code, _, _, seq, _, size = unpack_header(slot.header)
        if seq != self.seq:
            raise CorruptSlot(seq, self.seq)
        if kind not in (INLINE, RAW):
            raise CorruptSlot(seq, seq, f"there is no kind {kind} of message")
        if kind == INLINE and code != self._codec.code:
            raise CodecError(f"message {seq} has codec {code}, the queue has {self._codec.code} ({self._codec.name!r})")
        body = slot.body
        if size > len(body):
            raise CodecError(f"damaged message: {size} bytes announced, {len(body)} there")
        return body

    def _decoded(self, body: memoryview, how: int, n_buffers: int, size: int) -> Any:
        return self._codec.decode(*split(body, how, n_buffers, size))

    def seen(self, body: memoryview, kind: int, how: int, n_buffers: int, size: int) -> Any:
        """Decode a message where it lies."""
        return body[:size] if kind == RAW else self._view(*split(body, how, n_buffers, size))

    # Leases

    def bind_leases(
        self,
        open_slowly: Callable[[], Any],
        close_slowly: Callable[..., Any],
        await_next: Callable[[], object] | None,
        whose: Any,
        fail: Callable[[Any], object],
    ) -> ReaderCore:
        """Let the core lease, and return it; the arguments are those of `ReaderCore.bind_leases`."""
        self._core.bind_leases(self._show_beside, self.end_shown, open_slowly, close_slowly, await_next, whose, fail)
        return self._core

    def _show_beside(self, begin: int) -> Any:
        """Decode a message with buffers for the core's lease; `ELSEWHERE` if there is anything else about it."""
        kind, code, how, n_buffers, seq, at, size = unpack_header(self._slots.bodies, begin)
        if code != self._code or seq != self._core.seq:
            return ELSEWHERE
        if kind == OVERFLOW:
            obj = self._show_overflow(begin, how, n_buffers, size)
        elif kind == INLINE:
            obj = self._show(begin, self._slots.body(begin), kind, how, n_buffers, size)
        else:
            return ELSEWHERE
        if obj is not ELSEWHERE:
            self._core.published_ns = at
        return obj

    def show(self, slot: Slot) -> Any:
        """Decode a leased message: where it lies, if that pays, or else as `take` does.

        Raises:
            CorruptSlot, CodecError: It is no whole message of this queue.
        """
        kind, _, how, n_buffers, _, at, size = unpack_header(slot.header)
        try:
            if kind == OVERFLOW and self.overflowed(slot):
                obj = self._show_overflow(slot.begin, how, n_buffers, size)
                if obj is ELSEWHERE and (body := self.overflow_body(slot)) is not None:  # no mapping is left
                    with body:
                        obj = self._decoded(body, how, n_buffers, size)
            else:
                obj = self._show(slot.begin, self.inline_body(slot), kind, how, n_buffers, size)
        except AioshmError:
            raise
        except Exception as error:
            raise cannot_decode(error, self._codec.name) from error
        self._core.taken(at)
        return obj

    def _show(self, begin: int, body: memoryview, kind: int, how: int, n_buffers: int, size: int) -> Any:
        if how:
            nbytes = placed_end(body, n_buffers, size)
            if nbytes >= PLACED_VIEW_BYTES and (chunk := self._slots.chunk(begin)) is not None:
                with suppress(SharedMemoryError):  # no mapping is left
                    main, buffers = split_placed(self._window().view(chunk, nbytes).toreadonly(), n_buffers, size)
                    obj = self._view(main, buffers)
                    if n_buffers == 1 and size <= MOST_MAIN_BYTES:
                        self._arrays.learn(bytes(main), obj)
                    self._note_shown(chunk, begin, nbytes)
                    return obj
            self._core.copied += nbytes
            return self._codec.decode(*split_placed(body, n_buffers, size))
        main, buffers = split_body(body, n_buffers, size)
        whole = size + len(buffers[0]) if n_buffers == 1 else size + sum(map(len, buffers))
        if whole >= VIEW_BYTES and (chunk := self._slots.chunk(begin)) is not None:
            nbytes = body_bytes(size, [len(part) for part in buffers])
            with suppress(SharedMemoryError):
                view = self._window().view
                obj = self.seen(view(chunk, nbytes).toreadonly(), kind, how, n_buffers, size)
                self._note_shown(chunk, begin, nbytes)
                return obj
        self._core.copied += whole
        return bytearray(main) if kind == RAW else self._codec.decode(main, buffers)

    def _show_overflow(self, begin: int, how: int, n_buffers: int, size: int) -> Any:
        """Decode a leased message where it lies in its overflow segment; `ELSEWHERE` if it cannot be seen there."""
        found = self._overflow.where(self._slots.bodies[begin : begin + SLOT_HEADER_BYTES], self._core.seq)
        if found is None:
            return ELSEWHERE
        number, fd, room, nbytes = found
        with suppress(SharedMemoryError):
            body = self._window().view_file(-1 - number, fd, room, nbytes).toreadonly()
            main, buffers = (split_placed if how else split_body)(body, n_buffers, size)
            del body  # as the others: what an error's frames kept would be taken for a holder
            obj = self._view(main, buffers)
            if how and n_buffers == 1 and size <= MOST_MAIN_BYTES:
                self._arrays.learn(bytes(main), obj)
            self._note_shown(-1 - number, begin, nbytes)
            self._core.overflows += 1
            return obj
        return ELSEWHERE

    def _show_window(self, main: memoryview, buffers: list[memoryview]) -> Any:
        """Decode a message in a window for the core."""
        try:
            obj = self._view(main, buffers)
            if self._core.unknown:
                self._arrays.learn(bytes(main), obj)
            return obj
        finally:
            del main, buffers  # what an error's frames kept would be taken for a holder

    def _window(self) -> Leases:
        if self._leases is None:
            self._leases = self._make_leases(self._show_window)
        return self._leases

    def _note_shown(self, chunk: int, begin: int, nbytes: int) -> None:
        self._shown = chunk, self._slots.index(begin), nbytes
        self._core.shown = True

    def end_shown(self) -> None:
        """Give a leased slot back, or soon.

        Raises:
            SharedMemoryError: It is still seen, and there is no memory for a copy; it is kept.
        """
        shown = self._shown if self._core.shown else None
        seen = self._core.tell_shown() if shown is None else None
        self.forget_shown()
        if seen is not None:
            assert self._leases is not None
            self._core.turn -= 1
            self._leases.end_of(seen)
        elif shown is None:
            self.settle()
            self.release()
        else:
            assert self._leases is not None
            self._core.turn -= 1
            self._leases.end(*shown)

    def forget_shown(self) -> None:
        """Leave a leased message where it is."""
        self._shown = None
        self._core.shown = False

    def settle(self) -> None:
        """Give back what a lease has kept."""
        if self._leases is not None:
            self._leases.settle()

    def close(self) -> None:
        """Leave a copy behind under every view of a lease that is still held."""
        if self._leases is not None:
            self._leases.close()

    # Giving slots back

    def release(self, published_ns: int = 0) -> None:
        """Give the next message's slot back."""
        if published_ns:
            self._core.taken(published_ns)
        self._gate.count_turn()
        if self._core.release():
            self._waker.slot_is_free()

    def taken(self, published_ns: int) -> None:
        """Note when the message was published that a block has now."""
        self._core.taken(published_ns)

    def release_overflow(self, published_ns: int = 0) -> None:
        """Give the next message's slot back, and with it the body that did not fit a chunk."""
        self._overflow.finished()
        self.release(published_ns)


class RawBlock:
    """A message's bytes, for `acquire_read`."""

    def __init__(self, slots: SlotReader, slot: Slot, body: memoryview | None) -> None:
        self._slots = slots
        self._slot = slot
        self._body = body
        self._view = memoryview(b"")

    def open(self) -> memoryview:
        kind, _, how, n_buffers, seq, at, size = unpack_header(self._slot.header)
        if (self._body is None and kind not in (INLINE, RAW)) or seq != self._slots.seq:
            raise CorruptSlot(seq, self._slots.seq)
        body = self._slot.body if self._body is None else self._body
        if size > len(body):
            raise CorruptSlot(seq, seq)
        self._view = body[: len(body) if n_buffers or how else size].toreadonly()
        self._slots.taken(at)
        return self._view

    def close(self, *, undo: bool) -> None:
        self._view.release()
        if self._body is not None:
            self._body.release()
        if undo:
            return
        if self._body is not None:
            self._slots.release_overflow()
        else:
            self._slots.release()


class OverflowBlock:
    """A leased message whose body came over ZeroMQ: in memory of its own, as there is no window into that."""

    def __init__(self, slots: SlotReader, slot: Slot, body: memoryview) -> None:
        self._slots = slots
        self._slot = slot
        self._body = body

    def open(self) -> Any:
        kind, _, how, n_buffers, _, at, size = unpack_header(self._slot.header)
        obj = self._slots.seen(memoryview(own_copy(self._body)).toreadonly(), kind, how, n_buffers, size)
        self._slots.taken(at)
        return obj

    def close(self, *, undo: bool) -> None:
        self._body.release()
        if not undo:
            self._slots.settle()
            self._slots.release_overflow()


class LeasedSlot:
    """A leased message in the ring: seen in its chunk, or, where that costs more than a copy, in memory of its own."""

    def __init__(self, slots: SlotReader, slot: Slot) -> None:
        self._slots = slots
        self._slot = slot

    def open(self) -> Any:
        try:
            obj = self._slots.show(self._slot)
        except Exception:
            self._slots.check_place()
            raise
        self._slots.check_place()
        return obj

    def close(self, *, undo: bool) -> None:
        if not undo:
            self._slots.end_shown()
        else:
            self._slots.forget_shown()
