"""The cursors of a ring's two ends: the native or portable core does what each message needs, this module the rest."""

from __future__ import annotations

from aioshm.ring import layout as at
from aioshm.ring.atomics import ReaderCore, WriterCore, memory_fence
from aioshm.ring.layout import Layout
from aioshm.ring.slot import cut_slots


class _Cursor:
    """The words of the header that both ends read, and the slots."""

    def __init__(self, layout: Layout, view: memoryview, *, writes: bool) -> None:
        self.layout = layout
        self.slots = cut_slots(layout, view, writable=writes)
        self._header = view[: layout.header_bytes]
        self._words = self._header.cast("Q")
        self.readers_parked: memoryview = view[at.READERS_PARKED : at.READERS_PARKED + layout.n_reader]
        self.writer_parked: memoryview = view[at.WRITER_PARKED : at.WRITER_PARKED + 1]

    def messages_written(self) -> int:
        """Return how many messages the writer has published."""
        return self._words[(at.WRITER_LINE + at.COUNT) // 8]

    def messages_read(self, reader: int) -> int:
        """Return how many messages a reader has finished with."""
        return self._words[(self.layout.reader_line(reader) + at.COUNT) // 8]

    def _close(self) -> None:
        for slot in self.slots:
            slot.release()
        for part in (self._words, self._header, self.readers_parked, self.writer_parked):
            part.release()


class RingWriter(_Cursor):
    """The writer's end: `claim` a slot, fill its header and chunk, `commit` it.

    Attributes:
        core: Does that, and more; see ``_portable.py``.
        parked: The writer's parked flag, one byte.
    """

    def __init__(self, layout: Layout, view: memoryview, core: type[WriterCore] = WriterCore) -> None:
        super().__init__(layout, view, writes=True)
        self.core = core(layout, view, self.slots)
        self.parked: memoryview = self.writer_parked
        self.free, self.claim, self.commit, self.evict = (
            self.core.free,
            self.core.claim,
            self.core.commit,
            self.core.evict,
        )

    @property
    def seq(self) -> int:
        """Sequence number of the next message."""
        return self.core.seq

    def laggards(self, ahead: int = 1) -> list[int]:
        """Return the readers that keep so many of the next slots from being written."""
        flags = self.slots[(self.seq + ahead - 1) % len(self.slots)].flags
        return [reader for reader, read in enumerate(flags[1:]) if flags[0] and not read]

    def pass_over(self, reader: int, ahead: int) -> bool:
        """Give back, for a reader that copies, what it has read, and as many of the next slots as are needed.

        Returns:
            Whether it had not finished with one of those, whose message it loses.
        """
        seq, slots, flag = self.seq, self.slots, 1 + reader
        oldest, read = max(0, seq - len(slots)), self.messages_read(reader)
        needed = seq - len(slots) + ahead
        for number in range(oldest, min(seq, max(read, needed))):
            slots[number % len(slots)].flags[flag] = 1
        memory_fence()  # before anything that those messages lie in is written to
        return read < needed

    def finished(self, seq: int) -> bool:
        """Return whether every reader has released a message."""
        if seq + len(self.slots) < self.seq:
            return True  # its slot has another message; one that is only claimed again still has its flags
        return 0 not in self.slots[seq % len(self.slots)].reader_flags.tobytes()

    def set_reader_state(self, reader: int, state: int, pid: int) -> None:
        """Write a reader's state to the header, where it can be inspected."""
        line = self.layout.reader_line(reader)
        self._header[line + at.STATE] = state
        self._header[line + at.PID : line + at.PID + 4] = pid.to_bytes(4, "little")

    def want(self, slots: int) -> None:
        """Tell the readers how many free slots a parked writer waits for."""
        self._words[at.WRITER_WANTS // 8] = slots - 1

    def set_writer_state(self, closed: bool, pid: int) -> None:
        """Write the writer's pid and whether it has closed to the header."""
        line = at.WRITER_LINE
        self._header[line + at.PID : line + at.PID + 4] = pid.to_bytes(4, "little")
        self._header[line + at.STATE] = closed

    def close(self) -> None:
        """Release every view, so that the segment can be unmapped."""
        self.core.close()
        self._close()


class RingReader(_Cursor):
    """A reader's end: `peek` at the next message, `release` it when done with its slot.

    Attributes:
        core: Does that, and more; see ``_portable.py``.
        reader: Which of the ring's readers this is.
        copies: Whether the writer does not wait for it; see ``copying.py``.
        parked: Its parked flag, one byte.
    """

    def __init__(self, layout: Layout, view: memoryview, reader: int, core: type[ReaderCore] = ReaderCore) -> None:
        super().__init__(layout, view, writes=False)
        self.core = core(layout, view, self.slots, reader)
        self.copies: bool = getattr(self.core, "copies", False)
        self.parked: memoryview = self.readers_parked[reader : reader + 1]
        self.reader = reader
        self._read_by_all = bytes([1]) * layout.flag_bytes
        self.ready, self.peek, self.release = self.core.ready, self.core.peek, self.core.release

    @property
    def seq(self) -> int:
        """Sequence number of the next message."""
        return self.core.seq

    def writer_can_go_on(self) -> bool:
        """Return whether the writer is parked although the slots that it waits for have been read by all.

        Each reader asks this after its own release, so that the last one to read the slot sees it read by all.
        """
        if self.writer_parked[0] == 0:
            return False
        # Slots become free in order, so the last of a batch's stands for all of them.
        last = self.messages_written() + self._words[at.WRITER_WANTS // 8]
        flags = self.slots[last % self.layout.max_chunks].flags
        return flags == self._read_by_all or not flags[0]

    def laggards(self) -> list[int]:
        """Return the readers that keep the next message from being written."""
        flags = self.slots[self.seq % self.layout.max_chunks].flags
        return [reader for reader, read in enumerate(flags[1:]) if flags[0] and not read]

    def reader_pids(self) -> list[int]:
        """Return the readers' process ids as they saw themselves; 0 for one that was never attached."""
        lines = [self.layout.reader_line(reader) + at.PID for reader in range(self.layout.n_reader)]
        return [int.from_bytes(self._header[line : line + 4], "little") for line in lines]

    def evicted(self) -> bool:
        """Return whether the writer goes on without this reader, because it was too slow."""
        return self._header[self.layout.reader_line(self.reader) + at.STATE] == at.EVICTED

    def writer_closed(self) -> bool:
        """Return whether the writer has closed the ring."""
        return self._header[at.WRITER_LINE + at.STATE] != 0

    def writer_pid(self) -> int:
        """Return the writer's process id as it saw itself."""
        line = at.WRITER_LINE + at.PID
        return int.from_bytes(self._header[line : line + 4], "little")

    def close(self) -> None:
        """Release every view, so that the segment can be unmapped."""
        self.core.close()
        self.parked.release()
        self._close()
