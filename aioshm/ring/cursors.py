"""The cursors of a ring's ends: the core does the steps of each message, this module does everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING

from aioshm.ring import layout as at
from aioshm.ring.cores import ReaderCore, WriterCore, memory_fence
from aioshm.ring.layout import Layout
from aioshm.ring.slot import Slot, Slots

if TYPE_CHECKING:
    from aioshm.ring.header import ReaderRow

GIVE_WAY_NS = 5_000_000
"""For how long ends yield their CPUs to a new reader: about twice the time to its first message."""


class _Cursor:
    """The words of the header that both ends read, and the slots."""

    def __init__(self, layout: Layout, view: memoryview, *, writes: bool) -> None:
        self.layout = layout
        self.slots: Slots = Slots(layout, view, writable=writes)
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

    def gives_way(self) -> bool:
        """Return whether a newly admitted reader may need the CPU of this end."""
        until = self._words[at.GIVE_WAY_UNTIL // 8]
        return until != 0 and monotonic_ns() < until

    def reader_row(self, reader: int) -> ReaderRow:
        """Return one reader's part of the header for inspection."""
        from aioshm.ring.header import read_reader  # imported when needed: few programs inspect

        return read_reader(self._header, self.layout, reader, self.messages_written())

    def bytes_written(self) -> int:
        """Return the bytes in the bodies of all published messages."""
        return self._words[(at.WRITER_LINE + at.BYTES) // 8]

    def overflows_written(self) -> int:
        """Return how many published messages did not fit a chunk."""
        return self._words[(at.WRITER_LINE + at.OVERFLOWS) // 8]

    def bytes_read(self, reader: int) -> int:
        """Return the bytes in the bodies of the messages that a reader has finished with."""
        return self._words[(self.layout.reader_line(reader) + at.BYTES) // 8]

    def _unread_by(self, message: int) -> list[int]:
        """Return the readers that still have the slot of a message."""
        flags = self.slots[message % self.layout.slots].flags
        return [reader for reader, read in enumerate(flags[1:]) if flags[0] and not read]

    def _close(self) -> None:
        self.slots.release()
        for part in (self._words, self._header, self.readers_parked, self.writer_parked):
            part.release()


class RingWriter(_Cursor):
    """The writer's end: `claim` a slot, fill its header and body, `commit` it."""

    def __init__(self, layout: Layout, view: memoryview, core: type[WriterCore] = WriterCore) -> None:
        super().__init__(layout, view, writes=True)
        self.core: WriterCore = core(layout, view, self.slots)
        self.parked: memoryview = self.writer_parked
        self._passed: dict[int, int] = {}  # by reader that copies: the first message whose flag is not set yet
        self.free: Callable[..., bool] = self.core.free
        self.claim: Callable[..., Slot | None] = self.core.claim
        self.commit: Callable[[], bool] = self.core.commit
        self.evict: Callable[[int], None] = self.core.evict

    @property
    def seq(self) -> int:
        """Sequence number of the next message."""
        return self.core.seq

    def laggards(self, slots: int = 1, large: Sequence[int] = ()) -> list[int]:
        """Return the readers that the writer waits for; the arguments are those of `free`."""
        blocker = self.core.blocker(slots, large)
        if blocker < 0:
            return []
        return self._unread_by(blocker)

    def large(self, nbytes: int) -> tuple[int, ...]:
        """Return the ``large`` argument of `free` for one message of ``nbytes``."""
        if nbytes <= self.layout.inline_bytes:
            return ()
        return (nbytes,)

    def pass_over(self, reader: int, blocker: int) -> bool:
        """Release a copying reader's messages up to ``blocker``; return whether it loses one that it had not read."""
        seq = self.seq
        amount = self.layout.slots
        read = self.messages_read(reader)
        begin = max(self._passed.get(reader, 0), seq - amount)
        end = min(seq, max(read, blocker + 1))
        for number in range(begin, end):
            self.slots[number % amount].flags[1 + reader] = 1
        self._passed[reader] = max(begin, end)
        memory_fence()  # before anything that those messages lie in is written to
        return read <= blocker

    def admit(self, reader: int, history: int = 0, gone: Callable[[int], object] | None = None) -> int:
        """Admit a reader to a vacant place; see `WriterControl.admit`."""
        first = self.core.admit(reader, history, gone)
        self._passed[reader] = first
        self._words[(self.layout.reader_line(reader) + at.COUNT) // 8] = first
        return first

    def resume(self, reader: int, *, copies: bool = False) -> int:
        """Admit a reader to a dead reader's place; return the first message not taken.

        The dead reader's leases are released. ``copies``: the flags are the writer's, and the new
        reader reports lost messages.
        """
        seq = self.seq
        amount = self.layout.slots
        flag = 1 + reader
        first = min(max(self.messages_read(reader), seq - amount, 0), seq)
        kept = first
        while kept > max(0, seq - amount) and not (flags := self.slots[(kept - 1) % amount].flags)[flag]:
            flags[flag] = 1
            kept -= 1
        while not copies and first < seq and self.slots[first % amount].flags[flag]:
            first += 1
        self.readers_parked[reader] = 0
        self._words[(self.layout.reader_line(reader) + at.COUNT) // 8] = first
        return first

    def give_way(self) -> None:
        """Make every end yield its CPU for a while to a reader that is being admitted."""
        self._words[at.GIVE_WAY_UNTIL // 8] = monotonic_ns() + GIVE_WAY_NS

    def finished(self, seq: int) -> bool:
        """Return whether every reader has released a message."""
        if seq + len(self.slots) < self.seq:
            return True  # its slot has another message; a slot that is only claimed again still has its flags
        return 0 not in self.slots[seq % len(self.slots)].flags[1:].tobytes()

    def set_reader_state(self, reader: int, state: int, pid: int) -> None:
        """Write a reader's state to the header, for inspection; a newly attached reader gets a new histogram."""
        line = self.layout.reader_line(reader)
        if state == at.ATTACHED:
            self._words[(line + at.LATENCY_NS) // 8] = self._words[(line + at.BYTES) // 8] = 0
            histogram = self.layout.histogram(reader)
            self._header[histogram : histogram + 8 * at.LATENCY_BUCKETS] = bytes(8 * at.LATENCY_BUCKETS)
        self._header[line + at.STATE] = state
        self._header[line + at.PID : line + at.PID + 4] = pid.to_bytes(4, "little")

    def want(self, slots: int = 1, large: Sequence[int] = ()) -> None:
        """Set the room that spins, and the readers of a parked writer, wait for; see `WriterControl.free`."""
        self._words[at.WRITER_WANTS // 8] = max(0, self.core.spin_for(slots, large))
        memory_fence()  # before the parked flag is seen

    def want_nothing(self) -> None:
        """Reset: spins wait for the next slot."""
        self.core.spin_for()

    def set_writer_state(self, closed: bool, pid: int) -> None:
        """Write the writer's pid and whether it has closed to the header."""
        line = at.WRITER_LINE
        self._header[line + at.PID : line + at.PID + 4] = pid.to_bytes(4, "little")
        self._header[line + at.STATE] = closed

    def describe(self, name: str | None, codec: int, ranks: Sequence[int], remote_readers: int) -> None:
        """Write the header's fields for inspection; ``name``: at most 120 bytes in UTF-8, ``codec``: its code."""
        begin = self.layout.name_at
        encoded = (name or "").encode()
        self._header[begin + at.NAME : begin + at.NAME + len(encoded)] = encoded
        self._header[begin] = len(encoded)
        self._header[begin + at.REMOTE_READERS : begin + at.REMOTE_READERS + 4] = remote_readers.to_bytes(4, "little")
        self._header[at.WRITER_LINE + at.CODEC] = codec
        for reader, rank in enumerate(ranks):
            line = self.layout.reader_line(reader)
            self._header[line + at.RANK : line + at.RANK + 4] = rank.to_bytes(4, "little")
        self._words[(at.WRITER_LINE + at.CREATED) // 8] = monotonic_ns()

    def close(self) -> None:
        """Release every view, so that the segment can be unmapped."""
        self.core.close()
        self._close()


class RingReader(_Cursor):
    """A reader's end: `peek` at the next message, `release` its slot when done."""

    def __init__(self, layout: Layout, view: memoryview, reader: int, core: type[ReaderCore] = ReaderCore) -> None:
        super().__init__(layout, view, writes=False)
        self.core: ReaderCore = core(layout, view, self.slots, reader)
        self.copies: bool = getattr(self.core, "copies", False)  # whether the writer does not wait for this reader
        self.parked: memoryview = self.readers_parked[reader : reader + 1]
        self.reader = reader
        self._state_at = layout.reader_line(reader) + at.STATE
        self._read_by_all = bytes([1]) * layout.flag_bytes
        self.ready: Callable[[], bool] = self.core.ready
        self.peek: Callable[[], Slot | None] = self.core.peek
        self.release: Callable[[], bool] = self.core.release

    @property
    def seq(self) -> int:
        """Sequence number of the next message."""
        return self.core.seq

    def writer_can_go_on(self) -> bool:
        """Return whether a parked writer's message was read by all; call this after `release`."""
        if self.writer_parked[0] == 0:
            return False
        memory_fence()
        # Messages are read in order, so the last awaited message stands for all awaited messages.
        flags = self.slots[self._words[at.WRITER_WANTS // 8] % self.layout.slots].flags
        return flags == self._read_by_all or not flags[0]

    def messages_wanted(self) -> int:
        """Return how many messages there are from the message that a parked writer waits for to the latest."""
        return max(0, self.messages_written() - self._words[at.WRITER_WANTS // 8])

    def laggards(self) -> list[int]:
        """Return the readers that keep a parked writer from going on."""
        return self._unread_by(self._words[at.WRITER_WANTS // 8])

    def reader_pids(self) -> list[int]:
        """Return the readers' process ids as they saw themselves; 0: never attached."""
        lines = [self.layout.reader_line(reader) + at.PID for reader in range(self.layout.n_reader)]
        return [int.from_bytes(self._header[line : line + 4], "little") for line in lines]

    def evicted(self) -> bool:
        """Return whether the writer continues without this reader, which was too slow, or dismissed."""
        return self._header[self._state_at] in (at.EVICTED, at.DISMISSED)

    def dismissed(self) -> bool:
        """Return whether this reader was dismissed."""
        return self._header[self._state_at] == at.DISMISSED

    def writer_closed(self) -> bool:
        """Return whether the writer has closed the ring."""
        return self._header[at.WRITER_LINE + at.STATE] != 0

    def close(self) -> None:
        """Release every view, so that the segment can be unmapped."""
        self.core.close()
        self.parked.release()
        self._close()
