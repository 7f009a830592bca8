"""Messages that do not fit a chunk: their bodies lie in segments of their own beside the ring, the annexes.

The slot of such a message holds a marker: which annex, and how many bytes. A slot that every reader has released frees
its annex, too, so the ring bounds what is in flight, and an annex is used again and again: touching fresh memory costs
several times the copy. Readers are passed each annex' descriptor over their lifelines, once, before the first marker
that names it, so that a message whose marker can be seen can be read, whatever becomes of the writer. What they are
passed is a read-only descriptor: no reader can change what another one reads.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress

from aioshm.codec.frames import HEADER, write_body
from aioshm.config import DEFAULT_BACKING
from aioshm.errors import CorruptSlot, SharedMemoryError
from aioshm.process.limits import is_out_of_descriptors, out_of_descriptors
from aioshm.ring import RingWriter
from aioshm.ring.layout import round_up
from aioshm.ring.segment import Segment

SECRET_BYTES = 16
_MARKER = struct.Struct(f"<{SECRET_BYTES}sIQ")  # secret, number of the annex, bytes
_CHECKSUM = struct.Struct("<I")
_MARKER_AT = HEADER.size
_CHECKSUM_AT = _MARKER_AT + _MARKER.size

IDLE_ANNEXES = 2
"""So many annexes keep their memory although they were not used for `IDLE_USES` messages."""

IDLE_USES = 16


def pack_marker(header: memoryview, secret: bytes, seq: int, number: int, size: int) -> None:
    """Note behind the fields of a slot's header which annex has the message, and how many bytes.

    The checksum tells a marker of this message from damage, and from an older message's, which stays where it is while
    the slot holds others: nobody waits for an annex that will never come.
    """
    _MARKER.pack_into(header, _MARKER_AT, secret, number, size)
    _CHECKSUM.pack_into(header, _CHECKSUM_AT, _checksum(header, seq))


def unpack_marker(header: memoryview, secret: bytes, seq: int) -> tuple[int, int] | None:
    """Return the annex that has a message, and how many bytes; None where the slot has no marker of that message."""
    theirs, number, size = _MARKER.unpack_from(header, _MARKER_AT)
    if theirs != secret or _CHECKSUM.unpack_from(header, _CHECKSUM_AT) != (_checksum(header, seq),):
        return None
    return number, size


def _checksum(header: memoryview, seq: int) -> int:
    return zlib.crc32(header[_MARKER_AT:_CHECKSUM_AT], seq & 0xFFFFFFFF)


class _Annex:
    """One annex, as its writer sees it.

    Attributes:
        segment: Its memory.
        passed_fd: What readers are passed: a descriptor that only reads.
        seq: The message that it was last used for.
        used: When that was, counted in messages with annexes; 0 once its pages were given back.
    """

    def __init__(self, segment: Segment) -> None:
        self.passed_fd = segment.readonly_fd()
        self.segment = segment
        self.seq = 0
        self.used = 0

    def close(self) -> None:
        os.close(self.passed_fd)
        self.segment.close()


class Annexes:
    """The writer's annexes.

    Args:
        ring: Tells which messages every reader has finished with.
        hand_over: Passes a descriptor to every reader.
    """

    def __init__(self, ring: RingWriter, hand_over: Callable[[int], object]) -> None:
        self._ring = ring
        self._hand_over = hand_over
        self._annexes: list[_Annex] = []
        self._uses = 0

    def put(self, parts: Sequence[bytes | memoryview], buffers: Sequence[memoryview], size: int) -> int:
        """Copy the body of the message that the claimed slot is for.

        Args:
            parts: The main part in pieces.
            buffers: The out-of-band buffers.
            size: Of the body that `write_body` makes of them.

        Returns:
            The number of the annex.

        Raises:
            SharedMemoryError: There is not enough memory.
        """
        number = self._fitting(size)
        annex = self._annexes[number]
        with annex.segment.view[:size] as target:
            write_body(target, parts, buffers)
        self._uses += 1
        annex.seq, annex.used = self._ring.seq, self._uses
        self._tidy()
        return number

    def close(self) -> None:
        """Unmap them; readers still have them. Idempotent."""
        for annex in self._annexes:
            annex.close()
        self._annexes.clear()

    def _fitting(self, size: int) -> int:
        free = [n for n, annex in enumerate(self._annexes) if not annex.used or self._ring.finished(annex.seq)]
        for number in free:
            if self._annexes[number].segment.size >= size:
                return number
        room = round_up(size, mmap.PAGESIZE)
        for number in free:
            if self._annexes[number].segment.grow(room):
                return number
        if free:  # they cannot grow here: few different sizes keep their number down
            room = 1 << (room - 1).bit_length()
        segment = Segment.create(room, DEFAULT_BACKING, may_grow=True)
        try:
            annex = _Annex(segment)
        except BaseException:
            segment.close()
            raise
        segment.unlink()
        self._annexes.append(annex)
        self._hand_over(annex.passed_fd)
        return len(self._annexes) - 1

    def _tidy(self) -> None:
        """Give back the memory of annexes that only a burst has needed."""
        for annex in self._annexes[IDLE_ANNEXES:]:
            if 0 < annex.used <= self._uses - IDLE_USES and self._ring.finished(annex.seq):
                annex.used = 0
                annex.segment.forget()


class AnnexReader:
    """The annexes that a reader has been passed."""

    def __init__(self) -> None:
        self._annexes: list[_Passed | None] = []

    def arrived(self, fd: int | None) -> None:
        """Take over the next annex' descriptor; None: there was none to be had for it."""
        self._annexes.append(None if fd is None else _Passed(fd))

    def body(self, number: int, size: int, seq: int) -> memoryview | None:
        """Return the first bytes of an annex, read-only, which the caller has to release; None if it has yet to arrive.

        Raises:
            CorruptSlot: It is smaller than that, or can never be read here.
            SharedMemoryError, OutOfDescriptors: There is no room for it now; it can be tried again.
        """
        if number >= len(self._annexes):
            return None
        annex = self._annexes[number]
        if annex is None:
            raise CorruptSlot(seq, seq, "this process had too many open files to receive its annex (ulimit -n)")
        try:
            view = annex.view(size)
        except OSError as error:
            if is_out_of_descriptors(error):
                raise out_of_descriptors(f"message {seq} of {size} bytes", error.errno) from None
            raise SharedMemoryError(
                error.errno, f"message {seq} of {size} bytes cannot be mapped: {error.strerror}"
            ) from None
        if view is None:
            raise CorruptSlot(seq, seq, f"its annex has fewer bytes than {size}")
        return view

    def close(self) -> None:
        """Unmap and close all of them. Idempotent."""
        for annex in self._annexes:
            if annex is not None:
                annex.close()
        self._annexes.clear()


class _Passed:
    """One annex, as a reader sees it: mapped when it is first needed, and anew when it has grown."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None

    def view(self, size: int) -> memoryview | None:
        """Return its first bytes, or None if it has not so many."""
        if self._map is None or len(self._map) < size:
            actual = os.fstat(self._fd).st_size
            if actual < max(size, 1):  # mapped beyond its end, a touch would be a SIGBUS
                return None
            grown = mmap.mmap(self._fd, actual, access=mmap.ACCESS_READ)
            self._unmap()
            self._map = grown
        with memoryview(self._map) as whole:
            return whole[:size]

    def close(self) -> None:
        """Unmap it, as soon as no view of it is held any more."""
        self._unmap()
        os.close(self._fd)

    def _unmap(self) -> None:
        if self._map is not None:
            with suppress(BufferError):  # an error's frames may still hold a view; the mapping goes when they do
                self._map.close()
            self._map = None
