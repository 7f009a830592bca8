"""Messages that do not fit a chunk: their bodies lie in overflow segments, beside the ring.

The slot of such a message holds a marker: which segment, and how many bytes. A slot that every reader has released
frees its segment, too, unless arrays still lie in the segment, so the ring bounds the messages in flight, and the
writer uses a segment again and again: touching fresh memory costs several times the copy. The writer passes each
segment's descriptor over the lifelines before the first marker that names the segment, so that a reader which sees a
marker can read the message, whatever becomes of the writer. The descriptor is read-only: no reader can change what
another one reads.

With ``Options(overflow="zmq")``, and for every message for which no segment can be had, the body goes over ZeroMQ
instead (``overflow_sockets.py``); a bit of the marker's number tells the two apart.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import ENOTSUP
from sys import getrefcount
from typing import TYPE_CHECKING, Final, Protocol

from aioshm.codec.buffers import HUGE_PAGE_BYTES, OwnMemory
from aioshm.codec.frames import HEADER, write_body
from aioshm.config import DEFAULT_BACKING
from aioshm.errors import AioshmError, CorruptSlot, OutOfDescriptors, SharedMemoryError
from aioshm.lifeline.peer import Peer
from aioshm.process.limits import is_out_of_descriptors, out_of_descriptors, shortage
from aioshm.ring import RingReader, RingWriter
from aioshm.ring.cores import FULL_FENCE
from aioshm.ring.layout import round_up
from aioshm.ring.mapping import Pagemap, address_of
from aioshm.ring.segment import OVERFLOW_LABEL, Segment
from aioshm.ring.window import COPY_ON_WRITE, map_private

if TYPE_CHECKING:  # who has segments needs no ZeroMQ
    from aioshm.queue.local.overflow_sockets import OverflowSubscriber
    from aioshm.queue.local.readers import LocalReaders

SECRET_BYTES = 16
_MARKER = struct.Struct(f"<{SECRET_BYTES}sIQ")  # secret, number of the segment, bytes
_CHECKSUM = struct.Struct("<I")
_MARKER_AT = HEADER.size
_CHECKSUM_AT = _MARKER_AT + _MARKER.size

IDLE_SEGMENTS = 2
"""So many segments keep their memory although they were not used for `IDLE_USES` messages."""

IDLE_USES = 16

CAN_PASS_DESCRIPTORS = hasattr(socket, "send_fds")

CAN_VIEW: Final = COPY_ON_WRITE and FULL_FENCE
"""Whether arrays may lie in segments: the writer must see that they do before it sees their slot released."""

MAX_VIEWED = 4
"""So many segments a reader keeps from being used again; what else the program keeps is copied out."""

VIEWED_BITS = 64

BY_ZEROMQ = 1 << 31
"""In a marker's number: it is not a segment's, but that of a body which comes over ZeroMQ."""


class Overflow(Protocol):
    """The writer's way to send what does not fit a chunk."""

    def put(
        self, header: memoryview, parts: Sequence[bytes | memoryview], buffers: Sequence[memoryview], size: int
    ) -> None:
        """Send the body of the message that the claimed slot is for, and mark the slot.

        Raises:
            SharedMemoryError: There is not enough memory; nothing was sent.
        """

    def expect_reader(self, peer: Peer) -> None:
        """Let a reader that has just been admitted have what it needs for the bodies to come."""

    def is_gone(self, seq: int) -> bool:
        """Return whether the body of a message that was published, and read by all, is not kept any more."""

    def close(self) -> None:
        """Give everything back, or begin to; what was sent stays readable, or is delivered. Idempotent."""

    def finished(self) -> bool:
        """Return whether nothing is left to be delivered before this is closed."""


def pack_marker(header: memoryview, secret: bytes, seq: int, number: int, size: int) -> None:
    """Note behind the fields of a slot's header which segment has the message, and how many bytes.

    The checksum tells a marker of this message from damage, and from an older message's, which stays where it is while
    the slot holds others: nobody waits for a segment that will never come.
    """
    _MARKER.pack_into(header, _MARKER_AT, secret, number, size)
    _CHECKSUM.pack_into(header, _CHECKSUM_AT, _checksum(header, seq))


def unpack_marker(header: memoryview, secret: bytes, seq: int) -> tuple[int, int] | None:
    """Return the segment that has a message, and how many bytes; None where the slot has no marker of that message."""
    theirs, number, size = _MARKER.unpack_from(header, _MARKER_AT)
    if theirs != secret or _CHECKSUM.unpack_from(header, _CHECKSUM_AT) != (_checksum(header, seq),):
        return None
    return number, size


def _checksum(header: memoryview, seq: int) -> int:
    return zlib.crc32(header[_MARKER_AT:_CHECKSUM_AT], seq & 0xFFFFFFFF)


class WrittenSegment:
    """One overflow segment, as its writer sees it."""

    def __init__(self, segment: Segment) -> None:
        self.passed_fd: int = segment.readonly_fd()  # what readers are passed: a descriptor that only reads
        self.segment = segment
        self.seq = 0  # the message that it was last used for
        # When that was, counted in messages that overflowed; 0 once its pages were given back.
        self.used = 0
        self.retired = False  # whether it is never written again: a reader that has left still views it

    def empty(self) -> None:
        """Give the memory back; newcomers are passed an empty file in its place, as numbers are counted."""
        self.segment.close()
        with suppress(OSError), open(os.devnull, "rb") as nothing:  # without room for it, the memory stays
            os.dup2(nothing.fileno(), self.passed_fd, inheritable=False)

    def close(self) -> None:
        """Unmap it and close its descriptors."""
        os.close(self.passed_fd)
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
        self.segments: list[WrittenSegment] = []  # what there is, by number
        self._uses = 0

    def put(
        self, header: memoryview, parts: Sequence[bytes | memoryview], buffers: Sequence[memoryview], size: int
    ) -> None:
        """Copy the body of a message, as `Overflow.put`."""
        try:
            number = self._fitting(size)
        except (SharedMemoryError, OutOfDescriptors) as error:
            self._put_second_way(header, parts, buffers, size, error)
            return
        with self.segments[number].segment.view[:size] as target:
            write_body(target, parts, buffers)
        self.mark(header, number, size)

    def reserve(self, size: int) -> int:
        """Return the number of a segment for the next message, which is written there by other means; see `mark`.

        Raises:
            SharedMemoryError, OutOfDescriptors: There is none to be had.
        """
        return self._fitting(size)

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
            peer.hand_over(written.passed_fd)
        if self._second_way is not None:
            self._second_way.expect_reader(peer)
            peer.call_to_subscribe()

    def retire(self, viewed: int) -> None:
        """Never write again to the segments that a reader which has left still views."""
        for number, written in enumerate(self.segments):
            if viewed >> number % VIEWED_BITS & 1:
                written.retired = True

    def is_gone(self, seq: int) -> bool:
        """Return whether the segment of a message has another one by now, or nothing."""
        if any(written.used and written.seq == seq for written in self.segments):
            return False
        return self._second_way is None or self._second_way.is_gone(seq)

    def close(self) -> None:
        """Unmap them; readers still have them. Idempotent."""
        for written in set(self.segments):  # a retired one has two numbers
            written.close()
        self.segments.clear()
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
        """Send over ZeroMQ a message for which no segment can be had; the next one may find one again."""
        try:
            if self._second_way is None:
                self._second_way = self._readers.second_way(error)
            self._second_way.put(header, parts, buffers, size)
        except AioshmError as also:
            error.add_note(f"It could not be sent over ZeroMQ instead: {also}")
            raise error from None

    def _fitting(self, size: int) -> int:
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
        return [number for number in finished if not viewed >> number % VIEWED_BITS & 1]

    def _tidy(self) -> None:
        """Give back the memory of segments that only a burst has needed, and of retired ones."""
        for number in self._free()[IDLE_SEGMENTS:]:
            written = self.segments[number]
            if 0 < written.used <= self._uses - IDLE_USES:
                written.used = 0
                written.segment.forget()
        for written in list(self.segments):
            if written.retired and written.used and self._ring.finished(written.seq):
                written.used = 0
                # Passed once more, so that readers close it. That takes a number, too: a reader that lacks room for the
                # descriptor still counts on.
                self.hand_over(written.passed_fd)
                self.segments.append(written)
                written.empty()


class SegmentMemory(mmap.mmap, OwnMemory):
    """A reader's private mapping of an overflow segment: arrays may lie in it for as long as the program keeps them."""

    def may_keep(self, nbytes: int, size: int) -> bool:
        return nbytes >= HUGE_PAGE_BYTES  # a smaller buffer would keep the segment from being used again


class PassedSegments:
    """The overflow segments that a reader has been passed, and its subscription to what comes over ZeroMQ instead.

    Large arrays are not copied out: they lie in a private mapping of their segment, and `layout.VIEWED` keeps the
    writer from using the segment again until the program has dropped them. Where the program keeps several, or writes
    to them, which copies page by page, the next ones are copied out at once.
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
        # What there is, by number; None: one that could not be taken over, or that is never used again.
        self.segments: list[PassedSegment | None] = []
        self.subscription: OverflowSubscriber | None = None
        self.viewed: set[int] = set()  # segments that arrays lie in
        self._inherited = 0  # bits of those that forked children may have, too
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
        """Call back when nothing more will come: the writer is gone, but what it sent last may be on its way."""
        if self.subscription is None:
            callback()
        else:
            self.subscription.after_last(callback)

    def arrived(self, fd: int | None) -> None:
        """Take over the next segment's descriptor; None: there was none to be had for it.

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
            SharedMemoryError, LimitReached: There is no room for it now; it can be tried again.
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
                text = "this process had too many open files for its overflow segment (ulimit -n)"
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
        if number & BY_ZEROMQ or size < least or self._bits() >> number % VIEWED_BITS & 1:
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
        """Finish with the latest body, before its slot is released."""
        number, self._viewing = self._viewing, -1
        if number >= 0:
            self.viewed.add(number)
            self._reap()
            if number in self.viewed:
                self._ring.set_viewed_segments(self._bits())
        if self.subscription is not None:
            self.subscription.finished()

    def keep_for_children(self) -> None:
        """Never give back what the program views now: a child that is about to be forked goes on viewing it."""
        self._reap()
        self._inherited |= self._bits()
        for number in self.viewed:
            passed = self.segments[number]
            if passed is not None:
                passed.window = None
        self.viewed.clear()

    def close(self) -> None:
        """Unmap and close all of them; arrays keep their memory. Idempotent."""
        self._reap()
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

    def _bits(self) -> int:
        return sum(1 << number % VIEWED_BITS for number in self.viewed) | self._inherited

    def _reap(self) -> None:
        """Let the writer use the segments again that no array lies in any more."""
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
        self.window: SegmentMemory | None = None  # copy-on-write

    def body(self, size: int) -> memoryview | None:
        """Return its first bytes, read-only, or None if it has not so many."""
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
        """Return its first bytes, copy-on-write, or None if it has not so many."""
        if self.window is None or len(self.window) < size:
            actual = self._size_for(size)
            if actual is None:
                return None
            self.window = None
            self.window = map_private(SegmentMemory, self.fd, actual)
        # From the mapping anew each time: a view that was kept would count as a user of the message.
        return memoryview(self.window)[:size]

    def is_viewed(self) -> bool:
        """Return whether arrays lie in it."""
        return self.window is not None and getrefcount(self.window) > _UNVIEWED

    def discard_changes(self, pagemap: Pagemap) -> bool:
        """Unmap the copy-on-write mapping if the program has written to it; return whether that was so."""
        if self.window is None or not pagemap.written(address_of(self.window), len(self.window)):
            return False
        self.window = None
        return True

    def close(self) -> None:
        """Unmap it, as soon as no view of it is held any more."""
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


def _count_unviewed() -> int:
    """Return `getrefcount` of the mapping of a segment that no array lies in, called as above."""
    passed = PassedSegment(-1)
    passed.window = SegmentMemory(-1, 1)
    return getrefcount(passed.window)


_UNVIEWED: Final = _count_unviewed()

_with_views: weakref.WeakSet[PassedSegments] = weakref.WeakSet()


def _keep_for_children() -> None:
    for passed in list(_with_views):
        passed.keep_for_children()


os.register_at_fork(before=_keep_for_children)
