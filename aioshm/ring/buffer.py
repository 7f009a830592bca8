"""The ring: one writer, n readers, fixed numbers of slots and chunks; no waiting, no event loop.

The writer claims and commits a slot; each reader peeks at the slot and releases it. ``layout.py`` draws the flags. The
order of the stores is the whole protocol:

* The writer clears the written flag, fills the slot and its chunk, clears the reader flags, then sets the written flag.
* A reader sets its flag after it has finished with both.
* Then the end fences and checks whether its peer is parked (`RingWriter.commit`, `RingReader.release`). An end that
  parks sets its parked flag, fences and checks the slot once more. Of two ends that do so at the same time, at least
  one sees the peer's store, so no wake-up is lost.
"""

from __future__ import annotations

import secrets
from typing import Self

from aioshm.arguments import check_int, shown
from aioshm.config import DEFAULT_BACKING, Backing
from aioshm.errors import HandleError, RoleError, SharedMemoryError
from aioshm.ring import layout as at
from aioshm.ring.cores import memory_fence
from aioshm.ring.ends import RingReader, RingWriter
from aioshm.ring.layout import Layout
from aioshm.ring.segment import CAN_ALLOCATE, Segment

__all__ = ["RingReader", "RingWriter", "ShmRingBuffer", "memory_fence"]


class ShmRingBuffer:
    """A ring in shared memory. Another process maps it with `from_fd` or `from_name`.

    Args:
        n_reader: Readers; each reads every message. With no readers, a slot is free again as soon as it is written.
        max_chunk_bytes: Room for one message, in bytes.
        max_chunks: How many messages of ``max_chunk_bytes`` can be in the ring at a time; more of smaller messages.
        backing: ``"memfd"`` or ``"named"``; None: the platform's best.
        slots: Messages that can be in the ring at a time, of any size; None: thousands.
        inline_bytes: Room for a message in a slot; larger messages take a chunk. None: suits small objects.
        traced: Whether each message carries a trace context.

    Raises:
        SharedMemoryError: There is not enough memory.
    """

    def __init__(
        self,
        n_reader: int,
        max_chunk_bytes: int,
        max_chunks: int,
        *,
        backing: Backing | None = None,
        slots: int | None = None,
        inline_bytes: int | None = None,
        traced: bool = False,
    ) -> None:
        check_int("n_reader", n_reader, minimum=0)
        check_int("max_chunk_bytes", max_chunk_bytes, minimum=1)
        check_int("max_chunks", max_chunks, minimum=1)
        if slots is not None:
            check_int("slots", slots, minimum=1)
        if inline_bytes is not None:
            check_int("inline_bytes", inline_bytes, minimum=0, maximum=at.MAX_INLINE_BYTES)
        if backing is None:
            backing = DEFAULT_BACKING
        if backing not in ("memfd", "named"):
            raise ValueError(f"backing must be 'memfd', 'named' or None, not {shown(backing)}")
        sizes = Layout.of(n_reader, max_chunk_bytes, max_chunks, slots, inline_bytes, traced)
        chunks = sizes.pools[0].start, sizes.pools[-1].end
        segment = Segment.create(sizes.total_bytes, backing, sparse=chunks)
        queue_id = secrets.token_bytes(at.QUEUE_ID_BYTES)
        preamble = sizes.preamble(queue_id)
        segment.view[: len(preamble)] = preamble
        self._adopt(sizes, segment, queue_id)

    @classmethod
    def from_fd(cls, sizes: Layout, fd: int, queue_id: bytes, *, reads: bool = False) -> ShmRingBuffer:
        """Map a ring from a descriptor, which this takes over; ``reads``: with read-only slots."""
        return cls.__new__(cls)._adopt(sizes, Segment(fd, sizes.total_bytes, None), queue_id, reads=reads)

    @classmethod
    def from_name(cls, sizes: Layout, name: str, queue_id: bytes, *, reads: bool = False) -> ShmRingBuffer:
        """Map a ring in a named segment; see `from_fd`."""
        return cls.__new__(cls)._adopt(sizes, Segment.open(name, sizes.total_bytes), queue_id, reads=reads)

    def _adopt(self, sizes: Layout, segment: Segment, queue_id: bytes, *, reads: bool = False) -> Self:
        try:
            found = bytes(segment.view[: at.PREAMBLE.size])
            expected = sizes.preamble(queue_id)
            if found != expected:
                raise HandleError(_difference(found, expected))
            if reads:
                segment.protect(sizes.header_bytes, sizes.metadata_offset - sizes.header_bytes)
        except BaseException:
            segment.close()
            raise
        self._reads = reads
        self.layout = sizes
        self.queue_id: bytes = queue_id
        self._segment: Segment | None = segment
        return self

    # Ends and views

    @property
    def view(self) -> memoryview:
        """The whole segment, writable, but for the slots where this process only reads: writing to them is a SIGSEGV.

        Raises:
            SharedMemoryError: The ring was closed.
        """
        return self._mapped().view

    def writer(self) -> RingWriter:
        """Return the writer's end; a ring has one writer.

        Raises:
            RoleError: The ring was mapped for reading.
        """
        view = self.view
        if self._reads:
            raise RoleError("this ring was mapped for reading: its slots cannot be written to")
        writer = RingWriter(self.layout, view)
        segment = self._mapped()
        if segment.name is not None and CAN_ALLOCATE:
            writer.bind_allocate(segment.allocate)
        return writer

    def reader(self, reader: int) -> RingReader:
        """Return the end of a reader (0 to n_reader - 1)."""
        check_int("reader", reader, minimum=0, maximum=self.layout.n_reader - 1)
        return RingReader(self.layout, self.view, reader)

    def prefault(self, total: int, *, write: bool) -> None:
        """Fault in the header, the flags, and ``total`` bytes of the slots and chunks that are used first."""
        segment = self._mapped()
        sizes = self.layout
        if total <= 0:
            return
        segment.prefault(0, sizes.header_bytes, write=write)
        segment.prefault(sizes.metadata_offset, sizes.slots * sizes.flag_bytes, write=write)
        # Half for the slots: a chunk's first page fault costs as much as a slot's, and large messages have many.
        share = min(total // 2, sizes.slots * sizes.slot_bytes)
        segment.prefault(sizes.slot(0), share, write=write)
        if segment.name is None:  # a named segment's chunks have no memory yet: a SIGBUS on a full /dev/shm
            largest = sizes.pools[0]
            segment.prefault(largest.start, min(total - share, largest.chunks * largest.stride), write=write)

    @property
    def fd(self) -> int:
        """The segment's descriptor, to be passed to another process."""
        return self._mapped().fd

    @property
    def name(self) -> str | None:
        """The segment's POSIX name, or None for a memfd."""
        return self._mapped().name

    # Closing

    def unlink(self) -> None:
        """Remove the segment's name, if it has one and this process made it; mappings live on."""
        if self._segment is not None:
            self._segment.unlink()

    def close(self) -> None:
        """Unmap. Ends and views of this ring must not be used any more. Idempotent."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _mapped(self) -> Segment:
        if self._segment is None:
            raise SharedMemoryError("the ring was closed")
        return self._segment


def _difference(found: bytes, expected: bytes) -> str:
    sizes = ["n_reader", "max_chunk_bytes", "max_chunks", "slots", "inline_bytes"]
    names = ["magic", "layout version", *sizes, "traced", "queue id"]
    for name, is_, should in zip(names, at.PREAMBLE.unpack(found), at.PREAMBLE.unpack(expected), strict=True):
        if is_ != should:
            return f"the segment is not this ring: {name} is {is_!r}, not {should!r}"
    return "the segment is not this ring"
