"""Messages as a local reader finds them: what is in a slot, or in what its marker names, be it a segment or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

from aioshm.codec import Codec, cannot_decode, loads_of, view_of
from aioshm.codec.base import HUGE_PAGE_BYTES, own_copy
from aioshm.codec.frames import (
    INLINE,
    OVERFLOW,
    RAW,
    plain,
    split,
    split_body,
    split_placed,
    unpack_header,
)
from aioshm.codec.raw import RawCodec
from aioshm.errors import AioshmError, CodecError, CorruptSlot, SharedMemoryError
from aioshm.queue.local.attachment import WriterWaker
from aioshm.queue.local.copying import eviction, was_damaged
from aioshm.queue.local.leases import VIEW_BYTES, Leases
from aioshm.queue.local.overflow import OverflowReader
from aioshm.queue.source import SourceBlock, TakenMessage
from aioshm.queue.state import EndState
from aioshm.ring import RingReader
from aioshm.ring.cores import EMPTY, SLOW_PATH, memory_fence

Header: TypeAlias = tuple[int, int, int, int, int, int, int]
"""Kind, codec, way of placing, number of buffers, sequence number, time of publishing, bytes: see `unpack_header`."""


class SlotReader:
    """Takes messages out of slots, and gives the slots back."""

    def __init__(
        self,
        state: EndState,
        ring: RingReader,
        codec: Codec,
        overflow: OverflowReader,
        waker: WriterWaker,
        make_leases: Callable[[], Leases],
    ) -> None:
        self._state = state
        self._ring = ring
        self._core = ring.core
        self._slots = ring.slots
        self._amount = len(ring.slots)
        self._code = codec.code
        self._codec = codec
        self._view = view_of(codec)
        self._overflow = overflow
        self._waker = waker
        self._make_leases = make_leases
        self._leases: Leases | None = None
        self._mapped: tuple[int, int, int] | None = None  # chunk, slot and bytes of a message that is leased in place
        self.overflows: int = 0  # how many messages did not fit a chunk
        on_parked = state.defer_wakeup if state.blocks else waker.slot_is_free
        self._core.bind(loads_of(codec), plain(codec.code), isinstance(codec, RawCodec), on_parked)
        self._core.bind_out_of_band(self._decode_out_of_band)

    def take(self) -> Any:
        """Return the next message, as `Source.take`."""
        try:
            obj = self._core.take()
        except CodecError:
            raise
        except Exception as error:
            if not was_damaged(self._core):
                raise
            raise cannot_decode(error, self._codec.name) from error
        if obj is not EMPTY and obj is not SLOW_PATH:
            return obj
        try:
            obj = obj if obj is EMPTY else self._take_unusual()
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
            raise eviction(self._state, self._ring) from None

    def take_many(self, most: int) -> list[Any]:
        """Return what is there, as `Source.take_many`."""
        try:
            return self._core.take_many(min(most, sys.maxsize))
        except Exception as error:
            if not was_damaged(self._core):
                raise
            raise cannot_decode(error, self._codec.name) from error

    def _decode_out_of_band(self, begin: int) -> Any:
        """Decode a message with buffers for the core; `SLOW_PATH` if there is anything else about it."""
        kind, code, how, n_buffers, seq, at, size = unpack_header(self._slots.bodies, begin)
        if kind != INLINE or code != self._code or seq != self._core.seq:
            return SLOW_PATH
        main, buffers = (split_placed if how else split_body)(self._slots.body(begin), n_buffers, size)
        obj = self._codec.decode(main, buffers)
        self._core.published_ns = at
        return obj

    def _take_unusual(self) -> Any:
        begin, header = self._next()
        kind, _, how, n_buffers, _, at, size = header
        if self._is_elsewhere(begin, header):
            return self._take_elsewhere(begin, header, leased=False)
        try:
            room = self._inline_body(begin, header)
            return bytearray(room[:size]) if kind == RAW else self._decoded(room, how, n_buffers, size)
        finally:
            self.release(at)

    def _take_elsewhere(self, begin: int, header: Header, *, leased: bool) -> Any:
        """Take a message that did not fit its chunk; `SLOW_PATH` where its body has yet to arrive."""
        _, _, how, n_buffers, _, at, size = header
        body = self._overflow.view(self._slots.header(begin), self.seq, 0 if leased else HUGE_PAGE_BYTES)
        if body is None:
            try:
                body = self._elsewhere_body(begin)
            except CorruptSlot:
                self.release()
                raise
            if body is None:
                return SLOW_PATH
            if leased:
                self._core.copied += len(body)
                body = memoryview(own_copy(body))
        else:
            self.overflows += 1
        try:
            if leased:
                return self.decode_in_place(body.toreadonly(), header)
            return self._decoded(body, how, n_buffers, size)
        finally:
            body.release()
            if leased:
                self.settle()  # slots go back in order
            self.release_overflow(at)

    def open_block(self, *, decoded: bool) -> SourceBlock | None:
        """Return the next message for a block, as `Source.open_block`."""
        begin, header = self._next()
        if self._is_elsewhere(begin, header):
            return self._open_elsewhere(begin, header, decoded=decoded)
        if decoded and header[0] != OVERFLOW and not self._core.kept:  # slots go back in order
            nbytes = self._slots.size(begin)
            if nbytes < VIEW_BYTES:
                obj = self.take()
                if obj is EMPTY or obj is SLOW_PATH:
                    return None
                self._core.copied += nbytes
                return TakenMessage(obj)
        self._core.note_trace()
        return LeasedSlot(self, begin, header) if decoded else RawBlock(self, begin, header, None)

    def _open_elsewhere(self, begin: int, header: Header, *, decoded: bool) -> SourceBlock | None:
        if decoded:
            try:
                obj = self._take_elsewhere(begin, header, leased=True)
            except AioshmError:
                raise
            except Exception as error:
                raise cannot_decode(error, self._codec.name) from error
            self.check_place()
            return None if obj is SLOW_PATH else TakenMessage(obj)
        try:
            body = self._elsewhere_body(begin)
        except CorruptSlot:
            self.release()
            raise
        if body is None:
            return None
        self._core.note_trace()
        return RawBlock(self, begin, header, body)

    # Looking into slots

    @property
    def seq(self) -> int:
        """Sequence number of the next message."""
        return self._core.seq

    def _next(self) -> tuple[int, Header]:
        """Return where the next message's slot begins, and what its header says, which is read once."""
        begin = self._slots.begin(self._core.seq % self._amount)
        return begin, unpack_header(self._slots.bodies, begin)

    def _is_elsewhere(self, begin: int, header: Header) -> bool:
        """Return whether a slot has a message that did not fit its chunk."""
        kind, _, _, _, seq, _, _ = header
        return kind == OVERFLOW and seq == self.seq and self._overflow.has(self._slots.header(begin), seq)

    def _elsewhere_body(self, begin: int) -> memoryview | None:
        """Return what did not fit a slot's chunk, as `OverflowReader.body`."""
        body = self._overflow.body(self._slots.header(begin), self.seq)
        if body is not None:
            self.overflows += 1
        return body

    def _inline_body(self, begin: int, header: Header) -> memoryview:
        """Return the body of a message that is in the ring, and what room is behind it.

        Raises:
            CorruptSlot, CodecError: The slot holds no whole message of this queue's codec, nor one without.
        """
        kind, code, _, _, seq, _, size = header
        if seq != self.seq:
            raise CorruptSlot(seq, self.seq)
        if kind not in (INLINE, RAW):
            raise CorruptSlot(seq, seq, f"there is no kind {kind} of message")
        if kind == INLINE and code != self._code:
            raise CodecError(f"message {seq} has codec {code}, the queue has {self._code} ({self._codec.name!r})")
        body = self._slots.body(begin)
        if size > len(body):
            raise CodecError(f"damaged message: {size} bytes announced, {len(body)} there")
        return body

    def room(self, begin: int) -> memoryview:
        """Return the room of a message that is in the ring."""
        return self._slots.body(begin)

    def _decoded(self, body: memoryview, how: int, n_buffers: int, size: int) -> Any:
        return self._codec.decode(*split(body, how, n_buffers, size))

    def decode_in_place(self, body: memoryview, header: Header) -> Any:
        """Decode a message whose arrays stay where they are."""
        kind, _, how, n_buffers, _, _, size = header
        try:
            return body[:size] if kind == RAW else self._view(*split(body, how, n_buffers, size))
        finally:
            del body  # an error's frames would be taken for a holder

    # Leases

    def lease(self, begin: int, header: Header) -> Any:
        """Decode a leased message: in its chunk, if that pays, or else as `take` does.

        Raises:
            CorruptSlot, CodecError: It is no whole message of this queue.
        """
        body = self._inline_body(begin, header)
        kind, _, how, n_buffers, _, at, size = header
        nbytes = min(self._slots.size(begin), len(body))
        chunk = self._slots.chunk(begin) if nbytes >= VIEW_BYTES else None
        try:
            if chunk is not None:
                try:
                    if self._leases is None:
                        self._leases = self._make_leases()
                    obj = self.decode_in_place(self._leases.windows.view(chunk, nbytes), header)
                    self._mapped = chunk, self._slots.index(begin), nbytes
                    self._core.taken(at)
                    return obj
                except SharedMemoryError:  # no mapping is left
                    pass
            self._core.copied += nbytes
            obj = bytearray(body[:size]) if kind == RAW else self._decoded(body, how, n_buffers, size)
        except AioshmError:
            raise
        except Exception as error:
            raise cannot_decode(error, self._codec.name) from error
        self._core.taken(at)
        return obj

    def end_lease(self, *, undo: bool) -> None:
        """Give a leased slot back, or soon; ``undo`` leaves the message where it is.

        Raises:
            SharedMemoryError: Arrays are still held, and there is no memory for a copy; the slot is kept.
        """
        mapped, self._mapped = self._mapped, None
        if undo:
            return
        if mapped is None:
            self.settle()
            self.release()
        else:
            assert self._leases is not None
            self._state.count_turn()
            self._leases.end(*mapped)

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
        self._state.count_turn()
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

    def __init__(self, slots: SlotReader, begin: int, header: Header, body: memoryview | None) -> None:
        self._slots = slots
        self._begin = begin
        self._header = header
        self._body = body
        self._view = memoryview(b"")

    def open(self) -> memoryview:
        kind, _, how, n_buffers, seq, at, size = self._header
        if (self._body is None and kind not in (INLINE, RAW)) or seq != self._slots.seq:
            raise CorruptSlot(seq, self._slots.seq)
        body = self._slots.room(self._begin) if self._body is None else self._body
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


class LeasedSlot:
    """A leased message in the ring: seen in its chunk, or, where that costs more than a copy, in memory of its own."""

    def __init__(self, slots: SlotReader, begin: int, header: Header) -> None:
        self._slots = slots
        self._begin = begin
        self._header = header

    def open(self) -> Any:
        try:
            return self._slots.lease(self._begin, self._header)
        finally:
            self._slots.check_place()

    def close(self, *, undo: bool) -> None:
        self._slots.end_lease(undo=undo)
