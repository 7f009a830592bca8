"""Messages that do not fit a chunk: their bodies lie in overflow segments, beside the ring.

The slot of such a message holds a marker: the number of the segment, and the size of the body. The writer sends the
segment's descriptor over the lifelines before it publishes the first marker that names the segment. So a reader that
sees a marker can read the message, even if the writer has died. The descriptor is read-only: no reader can change a
message of another reader. The writer uses a segment again once every reader has released its slot and no array lies in
the segment: writing to fresh memory costs several times the copy.

With ``Options(overflow="zmq")``, and for every message for which no segment can be had, the body goes over ZeroMQ
instead (``overflow_sockets.py``); a bit of the marker's number tells the two apart.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import ENOTSUP
from typing import TYPE_CHECKING, Final, Protocol

from aioshm.codec.buffers import HUGE_PAGE_BYTES, OwnMemory
from aioshm.codec.frames import HEADER, write_body
from aioshm.config import DEFAULT_BACKING
from aioshm.errors import AioshmError, CorruptSlot, OutOfDescriptors, SharedMemoryError
from aioshm.lifeline.connection import Peer
from aioshm.process.limits import is_out_of_descriptors, out_of_descriptors, shortage
from aioshm.ring import RingReader, RingWriter
from aioshm.ring.cores import FULL_FENCE
from aioshm.ring.layout import round_up
from aioshm.ring.mapping import Pagemap
from aioshm.ring.segment import OVERFLOW_LABEL, Segment
from aioshm.ring.window import COPY_ON_WRITE, Mapped, make_private, map_private

if TYPE_CHECKING:  # who has segments needs no ZeroMQ
    from aioshm.queue.local.overflow_sockets import OverflowSubscriber
    from aioshm.queue.local.readers import LocalReaders

SECRET_BYTES = 16
_MARKER = struct.Struct(f"<{SECRET_BYTES}sIQ")  # secret, number of the segment, bytes
_CHECKSUM = struct.Struct("<I")
_MARKER_AT = HEADER.size
_CHECKSUM_AT = _MARKER_AT + _MARKER.size

IDLE_SEGMENTS = 2
"""This many segments keep their memory even if the last `IDLE_USES` messages did not use them."""

IDLE_USES = 16

CAN_PASS_DESCRIPTORS = hasattr(socket, "send_fds")

CAN_VIEW: Final = COPY_ON_WRITE and FULL_FENCE
"""Whether arrays may lie in segments: the writer must see that they do before it sees their slot released."""

MAX_VIEWED = 4
"""A reader lets arrays lie in at most this many segments; it copies further arrays out."""

VIEWED_BITS = 64
"""Arrays lie only in segments with lower numbers: each has a bit in `layout.VIEWED`."""

BY_ZEROMQ = 1 << 31
"""Flag in a marker's number: the body comes over ZeroMQ, not in a segment."""


class Overflow(Protocol):
    """The writer's way to send what does not fit a chunk."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to serve readers on the loop."""

    def put(
        self, header: memoryview, parts: Sequence[bytes | memoryview], buffers: Sequence[memoryview], size: int
    ) -> None:
        """Send the body of the message that the claimed slot is for, and mark the slot.

        Raises:
            SharedMemoryError: There is not enough memory; nothing was sent.
        """

    def expect_reader(self, peer: Peer) -> None:
        """Send a newly admitted reader what it needs to receive later bodies."""

    def is_gone(self, seq: int) -> bool:
        """Return whether the body of a message that all readers have read was discarded."""

    def close(self) -> None:
        """Release all resources, or start to. Readers can still read everything that was sent. Idempotent."""

    def finished(self) -> bool:
        """Return whether every body was delivered, so that `close` loses nothing."""


def pack_marker(header: memoryview, secret: bytes, seq: int, number: int, size: int) -> None:
    """Write a marker (segment number, body size) behind the fields of the slot's header.

    The checksum covers ``seq``. An old marker stays in the slot when the slot is used again; without the checksum a
    reader could take it for a new one, and wait for a segment that never comes.
    """
    _MARKER.pack_into(header, _MARKER_AT, secret, number, size)
    _CHECKSUM.pack_into(header, _CHECKSUM_AT, _checksum(header, seq))


def unpack_marker(header: memoryview, secret: bytes, seq: int) -> tuple[int, int] | None:
    """Return the number of the segment and the size of the body; None if the slot has no marker of this message."""
    theirs, number, size = _MARKER.unpack_from(header, _MARKER_AT)
    if theirs != secret or _CHECKSUM.unpack_from(header, _CHECKSUM_AT) != (_checksum(header, seq),):
        return None
    return number, size


def _checksum(header: memoryview, seq: int) -> int:
    return zlib.crc32(header[_MARKER_AT:_CHECKSUM_AT], seq & 0xFFFFFFFF)


class WrittenSegment:
    """One overflow segment, as its writer sees it."""

    def __init__(self, segment: Segment) -> None:
        self.passed_fd: int = segment.readonly_fd()  # the descriptor that readers are passed
        self.segment = segment
        self.seq = 0  # the message that it was last used for
        # The number of overflow messages by then; 0 once its pages were given back.
        self.used = 0
        self.retired = False  # never written again, as arrays of a reader that has left may lie in it

    def close(self) -> None:
        """Unmap the segment and close its descriptors."""
        if self.passed_fd >= 0:
            os.close(self.passed_fd)
            self.passed_fd = -1
        self.segment.close()


class OverflowSegments:
    """The writer's overflow segments."""

    def __init__(
        self,
        ring: RingWriter,
        queue_id: bytes,
        secret: bytes,
        readers: LocalReaders,
    ) -> None:
        self._ring = ring
        self._label = OVERFLOW_LABEL + queue_id.hex()[:8]
        self._secret = secret
        self._readers = readers
        self._second_way: Overflow | None = None
        self.segments: list[WrittenSegment] = []  # by number; a retired one has two numbers
        self._nothing_fd = -1  # of an empty file, which newcomers are passed for each number that is retired
        self._uses = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do nothing: segments need no loop."""

    def put(
        self, header: memoryview, parts: Sequence[bytes | memoryview], buffers: Sequence[memoryview], size: int
    ) -> None:
        """Copy the body of a message, as `Overflow.put`."""
        try:
            number = self.reserve(size)
        except (SharedMemoryError, OutOfDescriptors) as error:
            self._put_second_way(header, parts, buffers, size, error)
            return
        with self.segments[number].segment.view[:size] as target:
            write_body(target, parts, buffers)
        self.mark(header, number, size)

    def mark(self, header: memoryview, number: int, size: int) -> None:
        """Note in the claimed slot's header that a segment has the body of its message, and how many bytes."""
        written = self.segments[number]
        self._uses += 1
        written.seq, written.used = self._ring.seq, self._uses
        self._tidy()
        pack_marker(header, self._secret, self._ring.seq, number, size)

    def hand_over(self, fd: int) -> None:
        """Pass a descriptor to every reader."""
        for peer in self._readers.peers():
            peer.hand_over(fd)

    def expect_reader(self, peer: Peer) -> None:
        """Pass on the segments that there are, in the order of their numbers; some bodies may go over ZeroMQ."""
        for written in self.segments:
            peer.hand_over(written.passed_fd if written.passed_fd >= 0 else self._nothing_fd)
        if self._second_way is not None:
            self._second_way.expect_reader(peer)
            peer.call_to_subscribe()

    def retire(self, viewed: int) -> None:
        """Never write again to the segments that a reader which has left still views."""
        for number, written in enumerate(self.segments[:VIEWED_BITS]):
            if viewed >> number & 1:
                written.retired = True

    def is_gone(self, seq: int) -> bool:
        """Return whether the segment of a message has another one by now, or nothing."""
        if any(written.used and written.seq == seq for written in self.segments):
            return False
        return self._second_way is None or self._second_way.is_gone(seq)

    def close(self) -> None:
        """Unmap the segments. Readers keep their mappings. Idempotent."""
        for written in self.segments:
            written.close()
        self.segments.clear()
        if self._nothing_fd >= 0:
            os.close(self._nothing_fd)
            self._nothing_fd = -1
        if self._second_way is not None:
            self._second_way.close()

    def finished(self) -> bool:
        """Return whether nothing is left to be delivered before this is closed."""
        return self._second_way is None or self._second_way.finished()

    def _put_second_way(
        self,
        header: memoryview,
        parts: Sequence[bytes | memoryview],
        buffers: Sequence[memoryview],
        size: int,
        error: SharedMemoryError | OutOfDescriptors,
    ) -> None:
        """Send a message over ZeroMQ because no segment is available; later messages try a segment again."""
        try:
            if self._second_way is None:
                self._second_way = self._readers.second_way(error)
            self._second_way.put(header, parts, buffers, size)
        except AioshmError as also:
            error.add_note(f"It could not be sent over ZeroMQ instead: {also}")
            raise error from None

    def reserve(self, size: int) -> int:
        """Return the number of a segment with room for the next message; see `mark`.

        Raises:
            SharedMemoryError, OutOfDescriptors: There is none to be had.
        """
        if not CAN_PASS_DESCRIPTORS:
            raise SharedMemoryError(
                ENOTSUP, "this platform cannot pass the descriptors of overflow segments to readers"
            )
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
            if not each.retired and (not each.used or self._ring.finished(each.seq))
        ]
        viewed = self._ring.viewed_segments()  # last: a reader sets its bit, then releases the slot
        return [number for number in finished if number >= VIEWED_BITS or not viewed >> number & 1]

    def _tidy(self) -> None:
        """Give back the memory of segments that only a burst has needed, and of retired ones."""
        for number in self._free()[IDLE_SEGMENTS:]:
            written = self.segments[number]
            if 0 < written.used <= self._uses - IDLE_USES:
                written.used = 0
                written.segment.forget()
        for written in list(self.segments):
            if not written.retired or written.passed_fd < 0 or not self._ring.finished(written.seq):
                continue
            if written.used:
                written.used = 0
                # Passed once more, so that readers close it. That takes a number, too: a reader that lacks room for the
                # descriptor still counts on.
                self.segments.append(written)
                self.hand_over(written.passed_fd)
            if self._nothing_fd < 0:
                with suppress(OSError):  # without room for it, the memory stays for now
                    self._nothing_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            if self._nothing_fd >= 0 and not any(peer.is_handing_over for peer in self._readers.peers()):
                written.close()


class SegmentMemory(mmap.mmap, OwnMemory):
    """A reader's private mapping of an overflow segment: arrays may lie in it for as long as the program keeps them."""

    def may_keep(self, nbytes: int, size: int) -> bool:
        return nbytes >= HUGE_PAGE_BYTES  # a smaller buffer would keep the segment from being used again


class PassedSegments:
    """The overflow segments that a reader has been passed, and its subscription to what comes over ZeroMQ instead.

    Large arrays are not copied out: they lie in a private mapping of their segment, and `layout.VIEWED` keeps the
    writer from using the segment again until the program has dropped them. If the program keeps several arrays, or
    writes to them, which copies page by page, later arrays are copied out immediately.
    """

    def __init__(
        self,
        ring: RingReader,
        secret: bytes,
        look: Callable[[], object],
        holds_back: Callable[[], bool],
        subscriber: Callable[[], OverflowSubscriber],
    ) -> None:
        self._ring = ring
        self._secret = secret
        self._look = look
        self._holds_back = holds_back
        self._subscriber = subscriber
        # Segments by number. None: the descriptor was lost, or the segment is never used again.
        self.segments: list[PassedSegment | None] = []
        self.subscription: OverflowSubscriber | None = None
        self.viewed: set[int] = set()  # segments that arrays lie in
        self._inherited = 0  # bits that stay set, because arrays of forked children may lie there
        self._viewing = -1  # the segment that `view` was asked for last
        self._copies_out = False  # whether the program has written to an array
        self._pagemap = Pagemap()
        _with_views.add(self)

    def subscribe(self) -> OverflowSubscriber:
        """Return the subscription, made now if there was none.

        Raises:
            LimitReached, EndpointError: It cannot be had; it can be tried again.
        """
        if self.subscription is None:
            self.subscription = self._subscriber()
        return self.subscription

    def after_last(self, callback: Callable[[], None]) -> None:
        """Call back once the writer is gone and everything that it had sent has arrived."""
        if self.subscription is None:
            callback()
        else:
            self.subscription.after_last(callback)

    def arrived(self, fd: int | None) -> None:
        """Add the next segment by its descriptor; None: this process had no room for the descriptor.

        A descriptor that comes a second time, under its own number, is that of a segment which is never used again.
        """
        if fd is None:
            self.segments.append(None)
            return
        for number, passed in enumerate(self.segments):
            if passed is not None and os.path.sameopenfile(passed.fd, fd):
                os.close(fd)
                passed.close()
                self.segments[number] = None
                self.segments.append(None)
                return
        self.segments.append(PassedSegment(fd))

    def has(self, header: memoryview, seq: int) -> bool:
        """Return whether a slot has the marker of a message."""
        return unpack_marker(header, self._secret, seq) is not None

    def body(self, header: memoryview, seq: int) -> memoryview | None:
        """Return a message's body, read-only, which the caller has to release; None if it has yet to arrive.

        Raises:
            CorruptSlot: The slot is damaged, or the body can never be read here.
            SharedMemoryError, LimitReached: There is not enough room now; try again later.
        """
        marker = unpack_marker(header, self._secret, seq)
        if marker is None:  # damaged while a call waited for it
            raise CorruptSlot(seq, seq)
        number, size = marker
        if number & BY_ZEROMQ:
            return self.subscribe().body(number, size, seq)
        passed = self._passed(number)
        if passed is None:
            if number < len(self.segments):
                text = "this process had too many open files for its overflow segment (ulimit -n), or it was given up"
                raise CorruptSlot(seq, seq, text)
            if self._holds_back():
                what = f"message {seq} of {size} bytes"
                raise shortage(what) or out_of_descriptors(what)
            return None
        try:
            body = passed.body(size)
        except OSError as error:
            if is_out_of_descriptors(error):
                raise out_of_descriptors(f"message {seq} of {size} bytes", error.errno) from None
            raise SharedMemoryError(
                error.errno, f"message {seq} of {size} bytes cannot be mapped: {error.strerror}"
            ) from None
        if body is None:
            raise CorruptSlot(seq, seq, f"its overflow segment has fewer bytes than {size}")
        return body

    def view(self, header: memoryview, seq: int, least: int) -> memoryview | None:
        """Return a private, writable view of a message's body that may outlive the slot; None: copy the `body`.

        With ``least`` bytes, also return None for smaller messages, and for a program that writes to received arrays.
        """
        self._reap()
        marker = unpack_marker(header, self._secret, seq)
        if marker is None or not CAN_VIEW or len(self.viewed) >= MAX_VIEWED:
            return None
        number, size = marker
        if number >= VIEWED_BITS or size < least or self._bits() >> number & 1:
            return None
        if least and self._copies_out:
            return None
        passed = self._passed(number)
        with suppress(OSError):  # no mapping is left
            view = None if passed is None else passed.view(size)
            if view is not None:
                self._viewing = number
            return view
        return None

    def finished(self) -> None:
        """Finish with the latest body. Call it before the slot is released: the writer must see the bits first."""
        number, self._viewing = self._viewing, -1
        if number >= 0:
            self.viewed.add(number)
            self._reap()
            if number in self.viewed:
                self._ring.set_viewed_segments(self._bits())
        if self.subscription is not None:
            self.subscription.finished()

    def keep_for_children(self) -> None:
        """Copy the arrays out before a fork: the child uses them, too, and cannot tell the writer."""
        self._make_private()
        self._inherited |= self._bits()
        self.viewed.clear()
        self._ring.set_viewed_segments(self._bits())

    def close(self) -> None:
        """Copy the arrays out; unmap and close all segments. Idempotent."""
        if self.viewed:
            self._make_private()
            self._ring.set_viewed_segments(self._bits())
        if self.subscription is not None:
            self.subscription.close()
        for passed in self.segments:
            if passed is not None:
                passed.close()
        self.segments.clear()
        self.viewed.clear()
        self._pagemap.close()
        _with_views.discard(self)

    def _passed(self, number: int) -> PassedSegment | None:
        if number >= len(self.segments):
            self._look()  # it was passed before the message was published
        return self.segments[number] if number < len(self.segments) else None

    def _make_private(self) -> None:
        """Exchange the memory below the arrays for private copies. What there is no memory for stays viewed."""
        self._reap()
        for number in list(self.viewed):
            passed = self.segments[number]
            with suppress(SharedMemoryError):
                if passed is not None:
                    passed.make_private()
                self.viewed.discard(number)

    def _bits(self) -> int:
        return sum(1 << number for number in self.viewed) | self._inherited

    def _reap(self) -> None:
        """Let the writer use segments again in which no array lies any more."""
        before = len(self.viewed)
        for number in list(self.viewed):
            passed = self.segments[number]
            if passed is None:
                self.viewed.discard(number)
            elif not passed.is_viewed():
                self.viewed.discard(number)
                if passed.discard_changes(self._pagemap):
                    self._copies_out = True
        if len(self.viewed) < before:
            self._ring.set_viewed_segments(self._bits())


class PassedSegment:
    """One overflow segment, as a reader sees it: mapped when it is first needed, and anew when it has grown."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.mapping: mmap.mmap | None = None  # read-only
        self.window: Mapped | None = None  # copy-on-write

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
        """Return the first ``size`` bytes, copy-on-write; None if the segment is shorter."""
        if self.window is None or len(self.window.memory) < size:
            actual = self._size_for(size)
            if actual is None:
                return None
            self.window = None
            self.window = Mapped(map_private(SegmentMemory, self.fd, actual))
        # A new slice each time: a cached one would count as a reference of the program.
        return memoryview(self.window.memory)[:size]

    def is_viewed(self) -> bool:
        """Return whether arrays lie in it."""
        return self.window is not None and self.window.is_held()

    def discard_changes(self, pagemap: Pagemap) -> bool:
        """Unmap the copy-on-write mapping if the program has written to it; return whether that was so."""
        if self.window is None or not pagemap.written(self.window.address, len(self.window.memory)):
            return False
        self.window = None
        return True

    def make_private(self) -> None:
        """Exchange the memory below the arrays for a private copy, which is theirs alone.

        Raises:
            SharedMemoryError: There is not enough memory.
        """
        window, self.window = self.window, None
        if window is not None:
            make_private(window, 0, len(window.memory))

    def close(self) -> None:
        """Unmap the segment once no view of it is left."""
        self._unmap()
        self.window = None
        os.close(self.fd)

    def _size_for(self, size: int) -> int | None:
        actual = os.fstat(self.fd).st_size
        return actual if actual >= max(size, 1) else None  # mapped beyond its end, a touch would be a SIGBUS

    def _unmap(self) -> None:
        if self.mapping is not None:
            with suppress(BufferError):  # an error's frames may still hold a view; the mapping goes when they do
                self.mapping.close()
            self.mapping = None


_with_views: weakref.WeakSet[PassedSegments] = weakref.WeakSet()


def _keep_for_children() -> None:
    for passed in list(_with_views):
        passed.keep_for_children()


os.register_at_fork(before=_keep_for_children)
