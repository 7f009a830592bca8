"""The two ends of a ring. This is the hot path: no allocation, no call that is not needed, no Python loop over readers.

Slices of the segment are cut once, here; what a message costs then is a few byte stores, two comparisons of a slice
with constant bytes (whatever the number of readers), and one fence.
"""

from __future__ import annotations

import threading

from aioshm.ring import layout as at
from aioshm.ring.atomics import memory_fence
from aioshm.ring.layout import Layout


class Slot:
    """Views of one slot.

    Attributes:
        flags: The written flag, then one flag per reader.
        header: The slot's 64-byte header.
        chunk: Room for a message.
        next: The slot that comes after this one, the first after the last.
    """

    __slots__ = ("chunk", "flags", "header", "next", "reader_flags")

    next: Slot

    def __init__(self, layout: Layout, view: memoryview, index: int) -> None:
        start = layout.flags(index)
        self.flags = view[start : start + layout.flag_bytes]
        self.reader_flags = self.flags[1:]
        start = layout.slot(index)
        body = start + at.SLOT_HEADER_BYTES
        self.header = view[start:body]
        self.chunk = view[body : body + layout.max_chunk_bytes]

    def release(self) -> None:
        """Give the views back, so that the segment can be unmapped."""
        for part in (self.flags, self.reader_flags, self.header, self.chunk):
            part.release()


class _Cursor:
    """What both ends keep: where they are, and the words of the header that they share."""

    def __init__(self, layout: Layout, view: memoryview) -> None:
        self.layout = layout
        self.seq = 0  # of the next message
        self._slots = [Slot(layout, view, index) for index in range(layout.max_chunks)]
        for slot, following in zip(self._slots, [*self._slots[1:], self._slots[0]], strict=True):
            slot.next = following
        self._slot = self._slots[0]
        # memory_fence() inline, at half of its cost. Nobody else has this lock; it is not waited for because an
        # exception that a signal handler raises between the two calls leaves it taken, and release() alone is a fence.
        self._fence = threading.Lock()
        self._header = view[: layout.header_bytes]
        self._words = self._header.cast("Q")
        self.readers_parked = view[at.READERS_PARKED : at.READERS_PARKED + layout.n_reader]
        self.writer_parked = view[at.WRITER_PARKED : at.WRITER_PARKED + 1]

    def messages_written(self) -> int:
        """Return how many messages the writer has published."""
        return self._words[(at.WRITER_LINE + at.COUNT) // 8]

    def messages_read(self, reader: int) -> int:
        """Return how many messages a reader has finished with."""
        return self._words[(self.layout.reader_line(reader) + at.COUNT) // 8]

    def close(self) -> None:
        """Give every view back, so that the segment can be unmapped."""
        for slot in self._slots:
            slot.release()
        for part in (self._words, self._header, self.readers_parked, self.writer_parked):
            part.release()


class RingWriter(_Cursor):
    """The writer's end: `claim` a slot, fill its header and chunk, `commit` it.

    Attributes:
        parked: The writer's parked flag, one byte.
    """

    def __init__(self, layout: Layout, view: memoryview) -> None:
        super().__init__(layout, view)
        self.parked = self.writer_parked
        self._read_by_all = bytes([1]) * layout.flag_bytes
        self._nobody = bytes(layout.n_reader)
        self._unread = bytearray(layout.n_reader)
        self._count = self._words[at.WRITER_LINE // 8 :]

    def free(self) -> bool:
        """Return whether the next slot can be written."""
        flags = self._slot.flags
        return flags == self._read_by_all or not flags[0]

    def claim(self) -> Slot | None:
        """Return the next slot for writing, or None while some reader still has it.

        A slot that was claimed and is never committed stays invisible and can be claimed again.
        """
        slot = self._slot
        flags = slot.flags
        if flags != self._read_by_all and flags[0]:
            return None
        flags[0] = 0
        return slot

    def commit(self) -> bool:
        """Publish the claimed slot; return whether a reader is parked and has to be woken."""
        slot = self._slot
        slot.reader_flags[:] = self._unread
        slot.flags[0] = 1  # last: readers may look the moment this is visible
        self.seq = self._count[0] = self.seq + 1
        self._slot = slot.next
        fence = self._fence
        fence.acquire(False)
        fence.release()
        return self.readers_parked != self._nobody

    def laggards(self) -> list[int]:
        """Return the readers that keep the next slot from being written."""
        flags = self._slot.flags
        return [reader for reader, read in enumerate(flags[1:]) if flags[0] and not read]

    def evict(self, reader: int) -> None:
        """Count a reader that is gone as having read everything, now and from now on."""
        self._unread[reader] = 1
        for slot in self._slots:
            slot.reader_flags[reader] = 1
        self.readers_parked[reader] = 0

    def set_reader_state(self, reader: int, state: int, pid: int) -> None:
        """Note in the header what became of a reader, for whoever inspects the ring."""
        line = self.layout.reader_line(reader)
        self._header[line + at.STATE] = state
        self._header[line + at.PID : line + at.PID + 4] = pid.to_bytes(4, "little")

    def set_writer_state(self, closed: bool, pid: int) -> None:
        """Note in the header who writes, and whether that has ended."""
        line = at.WRITER_LINE
        self._header[line + at.PID : line + at.PID + 4] = pid.to_bytes(4, "little")
        self._header[line + at.STATE] = closed

    def close(self) -> None:
        self._count.release()
        self.parked.release()
        super().close()


class RingReader(_Cursor):
    """A reader's end: `peek` at the next message, `release` it when done with its slot.

    Attributes:
        reader: Which of the ring's readers this is.
        parked: Its parked flag, one byte.
    """

    def __init__(self, layout: Layout, view: memoryview, reader: int) -> None:
        super().__init__(layout, view)
        self.parked = self.readers_parked[reader : reader + 1]
        self.reader = reader
        self._flag = 1 + reader
        self._read_by_all = bytes([1]) * layout.flag_bytes
        self._count = self._words[layout.reader_line(reader) // 8 :]

    def ready(self) -> bool:
        """Return whether a message waits."""
        flags = self._slot.flags
        return bool(flags[0] and not flags[self._flag])

    def peek(self) -> Slot | None:
        """Return the slot of the next message, or None."""
        slot = self._slot
        flags = slot.flags
        if flags[0] and not flags[self._flag]:
            return slot
        return None

    def release(self) -> bool:
        """Finish with the slot; return whether the writer is parked and has to be woken."""
        slot = self._slot
        slot.flags[self._flag] = 1
        self.seq = self._count[0] = self.seq + 1
        self._slot = slot.next
        fence = self._fence
        fence.acquire(False)
        fence.release()
        return self.writer_parked[0] != 0

    def writer_can_go_on(self) -> bool:
        """Return whether the writer is parked although the slot that it waits for has been read by all.

        Each reader asks this after its own release, so that the last one to read the slot sees it read by all.
        """
        awaited = self._slots[self.messages_written() % self.layout.max_chunks]
        return self.writer_parked[0] != 0 and awaited.flags == self._read_by_all

    def writer_closed(self) -> bool:
        """Return whether the writer has said that it will write no more."""
        return self._header[at.WRITER_LINE + at.STATE] != 0

    def writer_pid(self) -> int:
        """Return the writer's process id as it saw itself."""
        line = at.WRITER_LINE + at.PID
        return int.from_bytes(self._header[line : line + 4], "little")

    def close(self) -> None:
        self._count.release()
        self.parked.release()
        super().close()


class OrderedWriter(RingWriter):
    """The writer's end where the processor reorders stores: the same steps with fences between them."""

    def claim(self) -> Slot | None:
        slot = super().claim()
        memory_fence()  # the chunk is filled only after every reader's flag was seen
        return slot

    def commit(self) -> bool:
        slot = self._slot
        memory_fence()
        slot.reader_flags[:] = self._unread
        memory_fence()  # the written flag becomes visible after what it announces, the cleared flags included
        slot.flags[0] = 1
        self.seq = self._count[0] = self.seq + 1
        self._slot = slot.next
        memory_fence()
        return self.readers_parked != self._nobody


class OrderedReader(RingReader):
    """A reader's end where the processor reorders loads: the same steps with fences between them."""

    def peek(self) -> Slot | None:
        slot = super().peek()
        memory_fence()  # the chunk is read only after the written flag was seen
        return slot

    def release(self) -> bool:
        memory_fence()  # the slot is given back only after the chunk was read
        return super().release()
