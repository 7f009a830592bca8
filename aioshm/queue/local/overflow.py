"""Messages that do not fit a chunk: their bodies lie in overflow segments, and their slots hold markers.

The writer passes a segment's read-only descriptor over the lifelines before it publishes a marker
of it. A segment is used again when its slot is released and no reader's lock (flock) is on it.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from aioshm.codec.base import HUGE_PAGE_BYTES, OwnMemory
from aioshm.codec.frames import HEADER, write_body
from aioshm.config import DEFAULT_BACKING
from aioshm.errors import CorruptSlot, OutOfDescriptors, SharedMemoryError
from aioshm.lifeline.dialer import Lifeline
from aioshm.lifeline.listener import Peer
from aioshm.process.limits import is_out_of_descriptors, out_of_descriptors, shortage
from aioshm.ring import RingWriter
from aioshm.ring.layout import round_up
from aioshm.ring.mapping import Pagemap
from aioshm.ring.segment import OVERFLOW_LABEL, Segment
from aioshm.ring.window import COPY_ON_WRITE, Mapped, make_private, map_private

if TYPE_CHECKING:
    from aioshm.queue.local.readers import LocalReaders

SECRET_BYTES = 16
_MARKER = struct.Struct(f"<{SECRET_BYTES}sIQ")  # secret, number of the segment, bytes
_CHECKSUM = struct.Struct("<I")
_MARKER_AT = HEADER.size
_CHECKSUM_AT = _MARKER_AT + _MARKER.size

IDLE_SEGMENTS = 2
"""This many segments keep their memory even if the last `IDLE_USES` messages did not use them."""

IDLE_USES = 16

NO_MESSAGE = -1
"""In place of a message's number: the segment has no whole message."""

CAN_VIEW: Final = COPY_ON_WRITE
"""Whether arrays may lie in segments."""

MAX_VIEWED = 4
"""A reader lets arrays lie in at most this many segments; it copies further arrays out."""


def pack_marker(header: memoryview, secret: bytes, seq: int, number: int, size: int) -> None:
    """Write a marker behind the slot's header; the checksum tells it from an older marker."""
    _MARKER.pack_into(header, _MARKER_AT, secret, number, size)
    _CHECKSUM.pack_into(header, _CHECKSUM_AT, _checksum(header, seq))


def unpack_marker(header: memoryview, secret: bytes, seq: int) -> tuple[int, int] | None:
    """Return the number of the segment and the size of the body; None if the slot has no marker of this message."""
    found, number, size = _MARKER.unpack_from(header, _MARKER_AT)
    if found != secret or _CHECKSUM.unpack_from(header, _CHECKSUM_AT) != (_checksum(header, seq),):
        return None
    return number, size


def _checksum(header: memoryview, seq: int) -> int:
    return zlib.crc32(header[_MARKER_AT:_CHECKSUM_AT], seq & 0xFFFFFFFF)


# The writer's side


class WrittenSegment:
    """One overflow segment, as its writer sees it."""

    def __init__(self, segment: Segment) -> None:
        self.passed_fd: int = segment.readonly_fd()  # the descriptor that readers are passed
        self.segment = segment
        self.seq = NO_MESSAGE  # the message in the segment
        self.used = 0  # the number of overflow messages by then; 0 once its pages were given back

    def is_viewed(self) -> bool:
        """Return whether a reader's lock says that an array lies in the segment."""
        if not CAN_VIEW:
            return False
        try:
            fcntl.flock(self.segment.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(self.segment.fd, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Unmap the segment and close its descriptors."""
        os.close(self.passed_fd)
        self.segment.close()


class OverflowSegments:
    """The writer's overflow segments."""

    def __init__(self, ring: RingWriter, queue_id: bytes, secret: bytes, readers: LocalReaders) -> None:
        self._ring = ring
        self._label = OVERFLOW_LABEL + queue_id.hex()[:8]
        self._secret = secret
        self._readers = readers
        self.segments: list[WrittenSegment] = []  # by number
        self._uses = 0

    def start(self, _loop: asyncio.AbstractEventLoop) -> None:
        """Do nothing: segments need no loop."""

    def finished(self) -> bool:
        """Return True: closing loses nothing."""
        return True

    def put(
        self, header: memoryview, parts: Sequence[bytes | memoryview], buffers: Sequence[memoryview], size: int
    ) -> None:
        """Write the body of the claimed slot's message to a segment, and mark the slot."""
        number = self.reserve(size)
        with self.segments[number].segment.view[:size] as target:
            write_body(target, parts, buffers)
        self.mark(header, number, size)

    def mark(self, header: memoryview, number: int, size: int) -> None:
        """Write to the claimed slot's header that a segment has the body of its message, and how many bytes."""
        written = self.segments[number]
        self._uses += 1
        written.seq = self._ring.seq
        written.used = self._uses
        self._tidy()
        pack_marker(header, self._secret, self._ring.seq, number, size)

    def hand_over(self, fd: int) -> None:
        """Pass a descriptor to every reader."""
        for peer in self._readers.peers():
            peer.hand_over(fd)

    def expect_reader(self, peer: Peer) -> None:
        """Pass all segments on, in the order of their numbers."""
        for written in self.segments:
            peer.hand_over(written.passed_fd)

    def is_gone(self, seq: int) -> bool:
        """Return whether the segment of a message has another message by now, or nothing."""
        return not any(written.seq == seq for written in self.segments)

    def close(self) -> None:
        """Unmap the segments. Readers keep their mappings. Idempotent."""
        for written in self.segments:
            written.close()
        self.segments.clear()

    def reserve(self, size: int) -> int:
        """Return the number of a segment with room for the next message, to `mark` later."""
        number = self._find(size)
        self.segments[number].seq = NO_MESSAGE  # a lender may write to the segment while a reader asks for history
        return number

    def _find(self, size: int) -> int:
        free = self._free()
        for number in free:
            if self.segments[number].segment.size >= size:
                return number
        room = round_up(size, mmap.PAGESIZE)
        for number in free:
            if self.segments[number].segment.grow(room):
                return number
        if free:  # they cannot grow here: few different sizes keep their number down
            room = 1 << (room - 1).bit_length()
        try:
            return self._create(room)
        except (SharedMemoryError, OutOfDescriptors) as error:
            raise type(error)(
                error.errno,
                f"a message of {size} bytes needs an overflow segment: {error.strerror}; or set max_chunk_bytes so "
                "that it fits a chunk, or Options(overflow='zmq')",
            ) from None

    def _create(self, room: int) -> int:
        segment = Segment.create(room, DEFAULT_BACKING, may_grow=True, label=self._label)
        try:
            written = WrittenSegment(segment)
        except BaseException:
            segment.close()
            raise
        segment.unlink()
        self.segments.append(written)
        self.hand_over(written.passed_fd)
        return len(self.segments) - 1

    def _free(self) -> list[int]:
        """Return the segments that may be written: read by all, and viewed by none."""
        finished = [
            number
            for number, each in enumerate(self.segments)
            if each.seq == NO_MESSAGE or self._ring.finished(each.seq)
        ]
        # The locks last: a reader locks the segment, then releases the slot.
        return [number for number in finished if not self.segments[number].is_viewed()]

    def _tidy(self) -> None:
        """Give back the memory of segments that only a burst has needed."""
        for number in self._free()[IDLE_SEGMENTS:]:
            written = self.segments[number]
            if 0 < written.used <= self._uses - IDLE_USES:
                written.used = 0
                written.seq = NO_MESSAGE
                written.segment.forget()


# A reader's side


class OverflowReader(ABC):
    """A reader's way to receive bodies that do not fit a chunk."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def has(self, header: memoryview, seq: int) -> bool:
        """Return whether a slot has the marker of a message."""
        return unpack_marker(header, self._secret, seq) is not None

    def marker(self, header: memoryview, seq: int) -> tuple[int, int]:
        """Return the number and the size in a slot's marker."""
        marker = unpack_marker(header, self._secret, seq)
        if marker is None:  # damaged while a call waited for the body
            raise CorruptSlot(seq, seq)
        return marker

    @abstractmethod
    def body(self, header: memoryview, seq: int) -> memoryview | None:
        """Return a message's body, read-only, which the caller has to release; None if it has yet to arrive."""

    def view(self, _header: memoryview, _seq: int, _least: int, /) -> memoryview | None:
        """Return a private view, of ``least`` bytes or more, that may outlive the slot; None: copy."""
        return None

    @abstractmethod
    def arrived(self, fd: int | None) -> None:
        """Take the next segment's descriptor; None: this process had no room for the descriptor."""

    @abstractmethod
    def finished(self) -> None:
        """Finish with the latest body, before its slot is released."""

    def after_last(self, callback: Callable[[], None]) -> None:
        """Call back once the writer is gone and everything that it had sent has arrived."""
        callback()

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Idempotent."""


class SegmentMemory(mmap.mmap, OwnMemory):
    """A private mapping of an overflow segment: arrays may lie in it for as long as the program keeps them."""

    def may_keep(self, nbytes: int, size: int) -> bool:
        return nbytes >= HUGE_PAGE_BYTES  # a smaller buffer would keep the segment from being used again


class PassedSegments(OverflowReader):
    """The overflow segments that a reader was passed; large arrays lie in private mappings of them."""

    def __init__(self, secret: bytes, lifeline: Lifeline) -> None:
        super().__init__(secret)
        self._lifeline = lifeline
        self.segments: list[PassedSegment | None] = []  # by number; None: the descriptor was lost
        self._copies_out = False  # whether the program has written to an array
        self._pagemap = Pagemap()

    def arrived(self, fd: int | None) -> None:
        passed = None
        if fd is not None:
            passed = PassedSegment(fd)
        self.segments.append(passed)

    def body(self, header: memoryview, seq: int) -> memoryview | None:
        number, size = self.marker(header, seq)
        passed = self._passed(number)
        message = f"message {seq} of {size} bytes"
        if passed is None:
            if number < len(self.segments):
                raise CorruptSlot(seq, seq, "this process had too many open files for its overflow segment (ulimit -n)")
            if self._lifeline.holds_back:
                raise shortage(message) or out_of_descriptors(message)
            return None
        try:
            body = passed.body(size)
        except OSError as error:
            if is_out_of_descriptors(error):
                raise out_of_descriptors(message, error.errno) from None
            raise SharedMemoryError(error.errno, f"{message} cannot be mapped: {error.strerror}") from None
        if body is None:
            raise CorruptSlot(seq, seq, f"its overflow segment has fewer bytes than {size}")
        return body

    def view(self, header: memoryview, seq: int, least: int, /) -> memoryview | None:
        self.finished()
        marker = unpack_marker(header, self._secret, seq)
        if marker is None or not CAN_VIEW or (least and self._copies_out):
            return None
        number, size = marker
        passed = self._passed(number)
        if passed is None or passed.is_locked or size < least:
            return None
        if sum(1 for each in self.segments if each is not None and each.is_locked) >= MAX_VIEWED:
            return None
        with suppress(OSError):  # no mapping or descriptor is left
            return passed.view(size)
        return None

    def finished(self) -> None:
        """Unlock the segments of arrays that the program has dropped."""
        for passed in self.segments:
            if passed is not None and passed.is_locked and not passed.is_viewed():
                if passed.discard_changes(self._pagemap):
                    self._copies_out = True
                passed.unlock()

    def close(self) -> None:
        """Copy the arrays out; unmap and close all segments. Idempotent."""
        for passed in self.segments:
            if passed is not None:
                passed.close()
        self.segments.clear()
        self._pagemap.close()

    def _passed(self, number: int) -> PassedSegment | None:
        if number >= len(self.segments):
            self._lifeline.look()  # it was passed before the message was published
        if number >= len(self.segments):
            return None
        return self.segments[number]


class PassedSegment:
    """One overflow segment, as a reader sees it: mapped when it is first needed, and anew when it has grown."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.mapping: mmap.mmap | None = None  # read-only
        self.window: Mapped | None = None  # copy-on-write
        self._locked_fd = -1

    def body(self, size: int) -> memoryview | None:
        """Return the first ``size`` bytes, read-only; None if the segment is shorter."""
        if self.mapping is None or len(self.mapping) < size:
            actual = self._size_for(size)
            if actual is None:
                return None
            grown = mmap.mmap(self.fd, actual, access=mmap.ACCESS_READ)
            self._unmap()
            self.mapping = grown
        with memoryview(self.mapping) as whole:
            return whole[:size]

    def view(self, size: int) -> memoryview | None:
        """Lock the segment and return the first ``size`` bytes, copy-on-write; None if the segment is shorter."""
        if self.window is None or len(self.window.memory) < size:
            actual = self._size_for(size)
            if actual is None:
                return None
            self.window = None
            self.window = Mapped(map_private(SegmentMemory, self.fd, actual))
        # Opened anew: all readers share the descriptor that was passed, and would share its lock.
        self._locked_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._locked_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # A new slice each time: a cached one would count as a reference of the program.
        return memoryview(self.window.memory)[:size]

    @property
    def is_locked(self) -> bool:
        """Whether the writer must not use the segment."""
        return self._locked_fd >= 0

    def is_viewed(self) -> bool:
        """Return whether arrays lie in the segment."""
        return self.window is not None and self.window.is_held()

    def discard_changes(self, pagemap: Pagemap) -> bool:
        """Unmap the copy-on-write mapping if the program has written to it; return whether that was so."""
        if self.window is None or not pagemap.written(self.window.address, len(self.window.memory)):
            return False
        self.window = None
        return True

    def unlock(self) -> None:
        """Allow the writer to use the segment again, unless a forked child still has the locked descriptor."""
        os.close(self._locked_fd)
        self._locked_fd = -1

    def close(self) -> None:
        """Copy the arrays out, and close the segment; without memory for a copy, it stays locked."""
        if self.is_locked:
            with suppress(SharedMemoryError):
                if self.window is not None and self.is_viewed():
                    make_private(self.window, 0, len(self.window.memory))
                self.unlock()
        self._unmap()
        self.window = None
        os.close(self.fd)

    def _size_for(self, size: int) -> int | None:
        actual = os.fstat(self.fd).st_size
        if actual < max(size, 1):  # mapped beyond its end, a touch would be a SIGBUS
            return None
        return actual

    def _unmap(self) -> None:
        if self.mapping is not None:
            with suppress(BufferError):  # an error's frames may still hold a view; the mapping goes when they do
                self.mapping.close()
            self.mapping = None
