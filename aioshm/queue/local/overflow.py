"""Messages that do not fit a chunk: their bodies lie in overflow segments, beside the ring.

The slot of such a message holds a marker: which segment, and how many bytes. A slot that every reader has released
frees its segment, too, so the ring bounds what is in flight, and a segment is used again and again: touching fresh
memory costs several times the copy. Readers are passed each segment's descriptor over their lifelines, once, before the
first marker that names it, so that a message whose marker can be seen can be read, whatever becomes of the writer. What
they are passed is a read-only descriptor: no reader can change what another one reads.

The rest of the queue knows of it as much as `Overflow` and `OverflowReader` say. There is a second way, over ZeroMQ
(``overflow_sockets.py``), which is taken where ``options.overflow`` says so, and for every message for which no segment
can be had; a bit of the marker's number tells the two apart.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import ENOTSUP
from typing import TYPE_CHECKING, Protocol

from aioshm.codec.frames import HEADER, write_body
from aioshm.config import DEFAULT_BACKING
from aioshm.errors import AioshmError, CorruptSlot, OutOfDescriptors, SharedMemoryError
from aioshm.lifeline.peer import Peer
from aioshm.process.limits import is_out_of_descriptors, out_of_descriptors, shortage
from aioshm.ring import RingWriter
from aioshm.ring.layout import round_up
from aioshm.ring.segment import OVERFLOW_LABEL, Segment

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


class OverflowReader(Protocol):
    """A reader's way to receive what did not fit a chunk."""

    def has(self, header: memoryview, seq: int) -> bool:
        """Return whether a slot has the marker of a message."""

    def body(self, header: memoryview, seq: int) -> memoryview | None:
        """Return a message's body, read-only, which the caller has to release; None if it has yet to arrive.

        Raises:
            CorruptSlot: The slot is damaged, or the body can never be read here.
            SharedMemoryError, LimitReached: There is no room for it now; it can be tried again.
        """

    def where(self, header: memoryview, seq: int) -> tuple[int, int, int, int] | None:
        """Return which segment has a message's body, its descriptor and size, and how many bytes of it the body has.

        None: there is none, or not here, or not yet; `body` says which.
        """

    def finished(self) -> None:
        """Note that the body that was asked for last is not needed any more."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


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

    def is_gone(self, seq: int) -> bool:
        """Return whether the segment of a message has another one by now, or nothing."""
        if any(written.used and written.seq == seq for written in self.segments):
            return False
        return self._second_way is None or self._second_way.is_gone(seq)

    def close(self) -> None:
        """Unmap them; readers still have them. Idempotent."""
        for written in self.segments:
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
        free = [n for n, each in enumerate(self.segments) if not each.used or self._ring.finished(each.seq)]
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

    def _tidy(self) -> None:
        """Give back the memory of segments that only a burst has needed."""
        for written in self.segments[IDLE_SEGMENTS:]:
            if 0 < written.used <= self._uses - IDLE_USES and self._ring.finished(written.seq):
                written.used = 0
                written.segment.forget()


class PassedSegments:
    """The overflow segments that a reader has been passed, and its subscription to what comes over ZeroMQ instead."""

    def __init__(
        self,
        secret: bytes,
        look: Callable[[], object],
        holds_back: Callable[[], bool],
        subscriber: Callable[[], OverflowSubscriber],
    ) -> None:
        self._secret = secret
        self._look = look
        self._holds_back = holds_back
        self._subscriber = subscriber
        # What there is, by number; None: one that could not be taken over.
        self.segments: list[PassedSegment | None] = []
        self.subscription: OverflowSubscriber | None = None

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
        """Take over the next segment's descriptor; None: there was none to be had for it."""
        self.segments.append(None if fd is None else PassedSegment(fd))

    def has(self, header: memoryview, seq: int) -> bool:
        """Return whether a slot has the marker of a message."""
        return unpack_marker(header, self._secret, seq) is not None

    def body(self, header: memoryview, seq: int) -> memoryview | None:
        """Return a message's body, as `OverflowReader.body`."""
        marker = unpack_marker(header, self._secret, seq)
        if marker is None:  # damaged while a call waited for it
            raise CorruptSlot(seq, seq)
        number, size = marker
        if number & BY_ZEROMQ:
            return self.subscribe().body(number, size, seq)
        body = self.view(number, size, seq)
        if body is None:
            self._look()  # it was passed before the message was published
            body = self.view(number, size, seq)
            if body is None and self._holds_back():
                what = f"message {seq} of {size} bytes"
                raise shortage(what) or out_of_descriptors(what)
        return body

    def view(self, number: int, size: int, seq: int) -> memoryview | None:
        """Return the first bytes of a segment, read-only, which the caller has to release; None if it is not here.

        Raises:
            CorruptSlot: It is smaller than that, or can never be read here.
            SharedMemoryError, OutOfDescriptors: There is no room for it now; it can be tried again.
        """
        if number >= len(self.segments):
            return None
        passed = self.segments[number]
        if passed is None:
            raise CorruptSlot(seq, seq, "this process had too many open files for its overflow segment (ulimit -n)")
        try:
            view = passed.view(size)
        except OSError as error:
            if is_out_of_descriptors(error):
                raise out_of_descriptors(f"message {seq} of {size} bytes", error.errno) from None
            raise SharedMemoryError(
                error.errno, f"message {seq} of {size} bytes cannot be mapped: {error.strerror}"
            ) from None
        if view is None:
            raise CorruptSlot(seq, seq, f"its overflow segment has fewer bytes than {size}")
        return view

    def where(self, header: memoryview, seq: int) -> tuple[int, int, int, int] | None:
        """Return which segment has a message's body, as `OverflowReader.where`."""
        marker = unpack_marker(header, self._secret, seq)
        if marker is None or marker[0] & BY_ZEROMQ:
            return None
        number, size = marker
        if number >= len(self.segments):
            self._look()
        passed = self.segments[number] if number < len(self.segments) else None
        if passed is None or not passed.has(size):
            return None
        return number, passed.fd, passed.size, size

    def finished(self) -> None:
        """Note that the body that was asked for last is not needed any more."""
        if self.subscription is not None:
            self.subscription.finished()

    def close(self) -> None:
        """Unmap and close all of them. Idempotent."""
        if self.subscription is not None:
            self.subscription.close()
        for passed in self.segments:
            if passed is not None:
                passed.close()
        self.segments.clear()


class PassedSegment:
    """One overflow segment, as a reader sees it: mapped when it is first needed, and anew when it has grown."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size: int = 0  # how large it was when this was last found out
        self.mapping: mmap.mmap | None = None

    def has(self, size: int) -> bool:
        """Return whether it has so many bytes."""
        if self.size < size:
            self.size = os.fstat(self.fd).st_size
        return size <= self.size

    def view(self, size: int) -> memoryview | None:
        """Return its first bytes, or None if it has not so many."""
        if self.mapping is None or len(self.mapping) < size:
            actual = os.fstat(self.fd).st_size
            if actual < max(size, 1):  # mapped beyond its end, a touch would be a SIGBUS
                return None
            grown = mmap.mmap(self.fd, actual, access=mmap.ACCESS_READ)
            self._unmap()
            self.mapping = grown
        with memoryview(self.mapping) as whole:
            return whole[:size]

    def close(self) -> None:
        """Unmap it, as soon as no view of it is held any more."""
        self._unmap()
        os.close(self.fd)

    def _unmap(self) -> None:
        if self.mapping is not None:
            with suppress(BufferError):  # an error's frames may still hold a view; the mapping goes when they do
                self.mapping.close()
            self.mapping = None
