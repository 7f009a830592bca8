"""A local reader's messages: in slots, in chunks, or in the overflow that a slot's marker names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from aioshm.codec import Codec, cannot_decode, loads_of, view_of
from aioshm.codec.base import HUGE_PAGE_BYTES, own_copy
from aioshm.codec.frames import INLINE, OVERFLOW, RAW, plain, split, split_body, split_placed, unpack_header
from aioshm.codec.registry import RawCodec
from aioshm.errors import AioshmError, CodecError, CorruptSlot, SharedMemoryError
from aioshm.queue.local.copying import decoded, refused, wrong_codec
from aioshm.queue.local.leases import VIEW_BYTES, Leases, WriterWaker
from aioshm.queue.local.overflow import OverflowReader
from aioshm.queue.source import OpenedMessage
from aioshm.queue.state import EndState
from aioshm.ring import RingReader, ShmRingBuffer
from aioshm.ring.cores import EMPTY, SLOW_PATH, memory_fence

Header: TypeAlias = tuple[int, int, int, int, int, int, int]
"""Kind, codec, placement, number of buffers, sequence number, time of publishing, bytes: see `unpack_header`."""


class SlotReader:
    """Takes messages out of slots, and releases the slots."""

    def __init__(
        self,
        state: EndState,
        buffer: ShmRingBuffer,
        ring: RingReader,
        codec: Codec,
        overflow: OverflowReader,
        waker: WriterWaker,
    ) -> None:
        self._state = state
        self._buffer = buffer
        self._ring = ring
        self._slots = ring.slots
        self._amount = len(ring.slots)
        self._codec = codec
        self._view = view_of(codec)
        self._overflow = overflow
        self._waker = waker
        self._leases: Leases | None = None
        self.overflows: int = 0  # messages that did not fit a chunk
        on_parked = waker.slot_is_free
        if state.blocks:
            on_parked = state.defer_wakeup
        self._ring.bind(loads_of(codec), plain(codec.code), isinstance(codec, RawCodec), on_parked)
        self._ring.bind_out_of_band(self._decode_out_of_band)

    # Taking messages

    def take(self) -> Any:
        """Return the next message, as `Source.take`."""
        obj = decoded(self._ring, self._codec, self._ring.take)
        if obj is SLOW_PATH:
            return self._checked(self._take_slow)
        if obj is EMPTY:
            self.check_rank()
        return obj

    def take_many(self, most: int) -> list[Any]:
        """Return available messages, as `Source.take_many`."""
        return decoded(self._ring, self._codec, lambda: self._ring.take_many(min(most, sys.maxsize)))

    def check_rank(self) -> None:
        """Raise if the writer continues without this reader: the slot that was read may have another message now."""
        memory_fence()  # after the slot was read
        if self._ring.evicted():
            raise refused(self._state, self._ring) from None

    def _checked(self, decode: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method that decodes; raise its errors as `CodecError`, and discard the result of an evicted reader."""
        try:
            return decode(*arguments)
        except AioshmError:
            raise
        except Exception as error:
            raise cannot_decode(error, self._codec.name) from error
        finally:
            self.check_rank()

    def _decode_out_of_band(self, begin: int) -> Any:
        """Decode a message with buffers for the core; `SLOW_PATH` for every other message."""
        kind, code, how, n_buffers, seq, at, size = unpack_header(self._slots.bodies, begin)
        if kind != INLINE or code != self._codec.code or seq != self._ring.seq:
            return SLOW_PATH
        split_parts = split_body
        if how:
            split_parts = split_placed
        obj = self._codec.decode(*split_parts(self._slots.body(begin), n_buffers, size))
        self._ring.published_ns = at
        return obj

    def _take_slow(self) -> Any:
        begin, header = self._next()
        kind, _, how, n_buffers, _, at, size = header
        if self._overflowed(begin, header):
            return self._take_overflow(begin, header, False)
        try:
            body = self._body(begin, header)
            if kind == RAW:
                return self._state.raw_message(body[:size])
            return self._codec.decode(*split(body, how, n_buffers, size))
        finally:
            self.release(at)

    def _take_overflow(self, begin: int, header: Header, leased: bool) -> Any:
        """Take a message that did not fit a chunk; `SLOW_PATH` if its body has yet to arrive."""
        _, _, how, n_buffers, _, at, size = header
        least = HUGE_PAGE_BYTES
        if leased:
            least = 0
        body = self._overflow.view(self._slots.header(begin), self._ring.seq, least)
        if body is not None:
            self.overflows += 1
        else:
            body = self._overflow_body(begin)
            if body is None:
                return SLOW_PATH
            if leased:
                self._ring.copied += len(body)
                body = memoryview(own_copy(body))
        try:
            if leased:
                return self._decode_in_place(body.toreadonly(), header)
            return self._codec.decode(*split(body, how, n_buffers, size))
        finally:
            body.release()
            if leased:
                self.settle()  # slots go back in order
            self._release_overflow(at)

    # Blocks

    def open_block(self, *, decoded: bool) -> OpenedMessage | None:
        """Return the next message for a block, as `Source.open_block`."""
        begin, header = self._next()
        overflowed = self._overflowed(begin, header)
        if not decoded:
            return self._open_raw(begin, header, overflowed=overflowed)
        if overflowed:
            obj = self._checked(self._take_overflow, begin, header, True)
            if obj is SLOW_PATH:
                return None
            return OpenedMessage(obj)
        nbytes = min(self._slots.size(begin), self._ring.layout.max_chunk_bytes)
        if nbytes >= VIEW_BYTES:
            opened = self._open_lease(begin, header, nbytes)
            if opened is not None:
                return opened
        if self._leases is not None:
            self._leases.settle()
        obj = self.take()
        if obj is EMPTY or obj is SLOW_PATH:
            return None
        self._ring.copied += nbytes
        return OpenedMessage(obj)

    def _open_lease(self, begin: int, header: Header, nbytes: int) -> OpenedMessage | None:
        """Open a message where it lies, in its chunk; None without a chunk, or without a mapping of the chunk."""
        self._ring.note_trace()
        try:
            body = self._body(begin, header)
            chunk = self._slots.chunk(begin)
            if chunk is None or nbytes > len(body):
                return None
            if self._leases is None:
                self._leases = Leases(self._state, self._buffer, self._ring, self._waker)
            obj = self._decode_in_place(self._leases.windows.view(chunk, nbytes), header)
            self._ring.taken(header[5])
            self.check_rank()
        except SharedMemoryError:
            return None
        except Exception as error:
            self.settle()
            self.release()
            self.check_rank()
            if isinstance(error, AioshmError):
                raise
            raise cannot_decode(error, self._codec.name) from error
        return OpenedMessage(obj, partial(self._end_lease, chunk, self._slots.index(begin), nbytes))

    def _end_lease(self, chunk: int, index: int, nbytes: int, undo: bool) -> None:
        """Release a leased slot, or retain it for a while; ``undo`` leaves the message where it is."""
        if undo:
            return
        assert self._leases is not None
        self._state.count_turn()
        self._leases.end(chunk, index, nbytes)

    def settle(self) -> None:
        """Release the slot that the latest lease has retained."""
        if self._leases is not None:
            self._leases.settle()

    def close(self) -> None:
        """Copy all views of leases that are still held."""
        if self._leases is not None:
            self._leases.close()

    def _open_raw(self, begin: int, header: Header, *, overflowed: bool) -> OpenedMessage | None:
        """Open a message's bytes, for `acquire_read`."""
        kind, _, how, n_buffers, seq, at, size = header
        body = None
        if overflowed:
            body = self._overflow_body(begin)
            if body is None:
                return None
        self._ring.note_trace()
        try:
            if seq != self._ring.seq or (kind not in (INLINE, RAW) and not overflowed):
                raise CorruptSlot(seq, self._ring.seq)
            whole = body
            if whole is None:
                whole = self._slots.body(begin)
            if size > len(whole):
                raise CorruptSlot(seq, seq)
        except CorruptSlot:
            self._close_raw(memoryview(b""), body, False)
            raise
        nbytes = size
        if n_buffers or how:
            nbytes = len(whole)
        view = whole[:nbytes].toreadonly()
        self._ring.taken(at)
        return OpenedMessage(view, partial(self._close_raw, view, body))

    def _close_raw(self, view: memoryview, body: memoryview | None, undo: bool) -> None:
        view.release()
        if body is not None:
            body.release()
        if undo:
            return
        if body is not None:
            self._release_overflow()
        else:
            self.release()

    # Slots

    def _next(self) -> tuple[int, Header]:
        """Return the offset of the next message's slot, and the slot's header, which is read once."""
        begin = self._slots.begin(self._ring.seq % self._amount)
        return begin, unpack_header(self._slots.bodies, begin)

    def _overflowed(self, begin: int, header: Header) -> bool:
        """Return whether a slot has the marker of a message that did not fit a chunk."""
        kind, _, _, _, seq, _, _ = header
        return kind == OVERFLOW and seq == self._ring.seq and self._overflow.has(self._slots.header(begin), seq)

    def _overflow_body(self, begin: int) -> memoryview | None:
        """Return the body of a message that did not fit a chunk, as `OverflowReader.body`."""
        try:
            body = self._overflow.body(self._slots.header(begin), self._ring.seq)
        except CorruptSlot:
            self.release()
            raise
        if body is not None:
            self.overflows += 1
        return body

    def _body(self, begin: int, header: Header) -> memoryview:
        """Return the room of a message that is in the ring, after checking its header."""
        kind, code, _, _, seq, _, size = header
        if seq != self._ring.seq:
            raise CorruptSlot(seq, self._ring.seq)
        if kind not in (INLINE, RAW):
            raise CorruptSlot(seq, seq, f"there is no kind {kind} of message")
        if kind == INLINE and code != self._codec.code:
            raise wrong_codec(seq, code, self._codec)
        body = self._slots.body(begin)
        if size > len(body):
            raise CodecError(f"damaged message: {size} bytes announced, {len(body)} there")
        return body

    def _decode_in_place(self, body: memoryview, header: Header) -> Any:
        """Decode a message, and leave its arrays where they are."""
        kind, _, how, n_buffers, _, _, size = header
        try:
            if kind == RAW:
                return body[:size]
            return self._view(*split(body, how, n_buffers, size))
        finally:
            del body  # the frames of an error would count as a holder of the view

    def release(self, published_ns: int = 0) -> None:
        """Release the next message's slot; ``published_ns``: count its latency, too."""
        if published_ns:
            self._ring.taken(published_ns)
        self._state.count_turn()
        if self._ring.release():
            self._waker.slot_is_free()

    def _release_overflow(self, published_ns: int = 0) -> None:
        self._overflow.finished()
        self.release(published_ns)
