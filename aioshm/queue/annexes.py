"""Messages that do not fit a chunk: their bodies lie in segments of their own beside the ring, the annexes.

The slot of such a message holds a marker: which annex, and how many bytes. A slot that every reader has released frees
its annex, too, so the ring bounds what is in flight, and an annex is used again and again: touching fresh memory costs
several times the copy. Readers are passed each annex' descriptor over their lifelines, once, before the first marker
that names it, so that a message whose marker can be seen can be read, whatever becomes of the writer.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from mmap import PAGESIZE

from aioshm.codec.frames import HEADER, write_body
from aioshm.config import DEFAULT_BACKING
from aioshm.errors import CorruptSlot, HandleError
from aioshm.ring import RingWriter
from aioshm.ring.layout import round_up
from aioshm.ring.segment import Segment

SECRET_BYTES = 16
MARKER = struct.Struct(f"<{SECRET_BYTES}sIQ")
"""What follows the header's fields in the slot of a message in an annex: secret, number of the annex, bytes."""

MARKER_AT = HEADER.size
SECRET = slice(HEADER.size, HEADER.size + SECRET_BYTES)

IDLE_ANNEXES = 2
"""So many annexes keep their memory although they were not used for `IDLE_USES` messages."""

IDLE_USES = 16


class _Annex:
    """One annex, as its writer sees it.

    Attributes:
        segment: Its memory.
        seq: The message that it was last used for.
        used: When that was, counted in messages with annexes; 0 once its pages were given back.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.seq = 0
        self.used = 0


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
            annex.segment.close()
        self._annexes.clear()

    def _fitting(self, size: int) -> int:
        free = [n for n, annex in enumerate(self._annexes) if not annex.used or self._ring.finished(annex.seq)]
        for number in free:
            if self._annexes[number].segment.size >= size:
                return number
        room = round_up(size, PAGESIZE)
        for number in free:
            if self._annexes[number].segment.grow(room):
                return number
        segment = Segment.create(room, DEFAULT_BACKING, may_grow=True)
        segment.unlink()
        self._annexes.append(_Annex(segment))
        self._hand_over(segment.fd)
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
        self._segments: list[Segment | int] = []  # a descriptor, until it is first needed

    def arrived(self, fd: int) -> None:
        """Take over the next annex' descriptor."""
        self._segments.append(fd)

    def body(self, number: int, size: int, seq: int) -> memoryview | None:
        """Return the first bytes of an annex, which the caller has to release; None if it has not arrived yet.

        Raises:
            CorruptSlot: It is smaller than that.
        """
        if number >= len(self._segments):
            return None
        segment = self._segments[number]
        try:
            if isinstance(segment, int):
                segment = self._segments[number] = _whole(segment)
            elif segment.size < size:  # it has grown since
                grown = _whole(os.dup(segment.fd))
                segment.close()
                segment = self._segments[number] = grown
        except (OSError, HandleError) as error:
            raise CorruptSlot(seq, seq, f"its annex cannot be mapped: {error}") from None
        if segment.size < size:
            raise CorruptSlot(seq, seq, f"its annex has {segment.size} bytes, not {size}")
        return segment.view[:size]

    def close(self) -> None:
        """Unmap and close all of them. Idempotent."""
        for segment in self._segments:
            if isinstance(segment, int):
                os.close(segment)
            else:
                segment.close()
        self._segments.clear()


def _whole(fd: int) -> Segment:
    """Map all that a descriptor, which this takes over, has."""
    try:
        size = os.fstat(fd).st_size
    except OSError:
        os.close(fd)
        raise
    return Segment(fd, size, None)
