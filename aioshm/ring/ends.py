"""The ends of a ring: rare calls in Python, on top of the hot calls of `cores`.

`WriterControl` and `ReaderControl` work with either base, that in C and that of ``reference.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING

from aioshm.ring import layout as at
from aioshm.ring.cores import ReaderBase, WriterBase, memory_fence
from aioshm.ring.layout import Layout, chunk_at
from aioshm.ring.record import NO_MESSAGE, Chunks, ReaderRecord, WriterRecord
from aioshm.ring.slot import Slot, Slots

if TYPE_CHECKING:
    from aioshm.ring.header import ReaderRow

    _ReaderBase = ReaderBase
    _WriterBase = WriterBase
else:
    _ReaderBase = _WriterBase = object


class _RingEnd:
    """The slots, and the words of the header that both ends read."""

    def _map(self, layout: Layout, view: memoryview, *, writes: bool) -> None:
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
        """Return how many messages a reader has received, leased or lost."""
        return self._words[(self.layout.reader_line(reader) + at.COUNT) // 8]

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

    def _set_messages_read(self, reader: int, count: int) -> None:
        self._words[(self.layout.reader_line(reader) + at.COUNT) // 8] = count

    def _flags_of(self, message: int) -> memoryview:
        return self.slots.flags(message % self.layout.slots)

    def _unread_by(self, message: int) -> list[int]:
        """Return the readers that still have the slot of a message."""
        flags = self._flags_of(message)
        return [reader for reader, read in enumerate(flags[1:]) if flags[0] and not read]

    def _unmap(self) -> None:
        self.slots.release()
        for part in (self._words, self._header, self.readers_parked, self.writer_parked):
            part.release()


class WriterControl(_RingEnd, _WriterBase):
    """The rare calls of a writer: room, memory for chunks, readers, and the header's fields."""

    # A writer receives no trace contexts.
    garbled: int = 0
    in_use: int
    awaited: int

    def __init__(self, layout: Layout, view: memoryview, /) -> None:
        self._record = WriterRecord(layout.sizes, layout.pools)
        self._allocate: Callable[[int, int], object] | None = None
        self._passed: dict[int, int] = {}  # by reader: the first message that was not passed over
        super().__init__(layout.sizes, layout.pools, view, self._record.memory)
        self._map(layout, view, writes=True)
        self.parked: memoryview = self.writer_parked

    # Slots and trace contexts

    def claim(self, nbytes: int = 0, /) -> Slot | None:
        """Claim the next slot for ``nbytes``, and a chunk if a slot is too small; return None if there is no room."""
        if not self.claim_slot(nbytes):
            return None
        return self.slots[self.seq % self.layout.slots]

    @property
    def trace(self) -> bytes:
        """The trace context of the next message, where slots have room for one."""
        return bytes(self._record.trace)

    @trace.setter
    def trace(self, trace: bytes) -> None:
        if type(trace) is not bytes:
            raise TypeError("a trace context is bytes")
        if len(trace) != at.TRACE_BYTES:
            raise ValueError(f"a trace context has {at.TRACE_BYTES} bytes")
        self._record.trace[:] = trace

    # Room

    def free(self, slots: int = 1, large: Sequence[int] = (), /) -> bool:
        """Return whether there is room for messages; ``large``: the sizes of those that need a chunk."""
        return self.blocker(slots, large) < 0

    def blocker(self, slots: int = 1, large: Sequence[int] = (), /) -> int:
        """Return the message that all readers must read before `free` is true; -1: there is room, with memory."""
        wanted: dict[Chunks, int] = {}
        for nbytes in large:
            chunks = self._record.chunks_for(nbytes)
            wanted[chunks] = wanted.get(chunks, 0) + 1
        amount = self.layout.slots
        if not 1 <= slots <= amount:
            raise ValueError(f"a ring of {amount} slots cannot have {slots} of them free")
        # The message now in the last of these slots. In the first lap the slot is unused, so free unless damaged.
        last = self.seq + slots - 1
        message = last
        if last >= amount:
            message -= amount
        blocker = message
        if self.finished(message):
            blocker = -1
        for chunks, number in wanted.items():
            blocker = max(blocker, self._chunk_blocker(chunks, number))
        return blocker

    def _chunk_blocker(self, chunks: Chunks, wanted: int) -> int:
        """Return the message that all must read before ``wanted`` chunks are free; -1: they are free and allocated."""
        pool = chunks.pool
        if wanted > pool.chunks:
            size = f"{pool.chunks} chunks of {pool.room} bytes"
            raise ValueError(f"a ring of {size} cannot have {wanted} of them free")
        missing = wanted - chunks.n_free
        if missing > 0 and not all(self.finished(chunks.message(nth)) for nth in range(missing)):
            return chunks.message(missing - 1)
        if chunks.allocated < pool.chunks:
            self._allocate_chunks(chunks, wanted)
        return -1

    def large(self, nbytes: int) -> tuple[int, ...]:
        """Return the ``large`` argument of `free` for one message of ``nbytes``."""
        if nbytes <= self.layout.inline_bytes:
            return ()
        return (nbytes,)

    def laggards(self, slots: int = 1, large: Sequence[int] = ()) -> list[int]:
        """Return the readers that the writer waits for; the arguments are those of `free`."""
        blocker = self.blocker(slots, large)
        if blocker < 0:
            return []
        return self._unread_by(blocker)

    def spin_for(self, slots: int = 1, large: Sequence[int] = (), /) -> int:
        """Make busy-waits end when this much room is free; return the result of `blocker`."""
        blocker = self.blocker(slots, large)
        self.awaited = NO_MESSAGE
        if blocker >= 0:
            self.awaited = blocker
        return blocker

    def want(self, slots: int = 1, large: Sequence[int] = ()) -> None:
        """Note the room that a spinning or parked writer waits for, as in `free`."""
        self._words[at.WRITER_WANTS // 8] = max(0, self.spin_for(slots, large))
        memory_fence()  # before the parked flag is seen

    # Memory for the chunks of a named segment

    def bind_allocate(self, allocate: Callable[[int, int], object], /) -> None:
        """Mark all chunks as unallocated; ``allocate`` gets an offset and a size in bytes, and allocates memory."""
        self._allocate = allocate
        for chunks in self._record.chunks:
            chunks.allocated = 0

    def _allocate_chunks(self, chunks: Chunks, wanted: int) -> None:
        """Allocate memory until ``wanted`` free chunks have memory."""
        if self._record.claimed is not chunks:
            chunks.reclaim(self.finished)
        first = chunks.allocated
        last = first + wanted - chunks.n_usable
        if last <= first:
            return
        assert self._allocate is not None
        pool = chunks.pool
        self.in_use += 1
        try:
            self._allocate(pool.start + first * pool.stride, (last - first) * pool.stride)
        finally:
            self.in_use -= 1
        chunks.allocated = max(chunks.allocated, last)

    # Readers

    def evict(self, reader: int, /) -> None:
        """Evict a reader: it counts as having read every message, past and future."""
        layout = self.layout
        self.check_open()
        self._check_reader(reader)
        memory_fence()  # before any flag is seen: readers then look at their state, which says why
        begin = layout.flags(0)
        row = layout.flag_bytes
        flags = self.slots.view[begin : begin + layout.slots * row]
        flags[1 + reader :: row] = bytes([1]) * layout.slots
        self._record.set_unread(reader, 1)
        self.readers_parked[reader] = 0

    def admit(self, reader: int, history: int = 0, gone: Callable[[int], object] | None = None, /) -> int:
        """Admit a reader; return its first message, at most ``history`` back; ``gone``: whether a body is gone."""
        self.check_unused()
        self._check_reader(reader)
        if history < 0:
            raise ValueError("there are no fewer than 0 messages")
        self.in_use += 1
        try:
            first = self._oldest_of(history, gone)
        finally:
            self.in_use -= 1
        for seq in range(self.seq - 1, first - 1, -1):
            self._keep_again(seq)
            self._flags_of(seq)[1 + reader] = 0
        self._record.set_unread(reader, 0)
        self.readers_parked[reader] = 0
        self._passed[reader] = first
        self._set_messages_read(reader, first)
        return first

    def resume(self, reader: int, *, copies: bool = False) -> int:
        """Release a dead reader's leases; return the first message that the next reader in its place receives.

        ``copies``: the writer may have passed over messages, which the next reader reports as lost.
        """
        seq = self.seq
        oldest = max(0, seq - self.layout.slots)
        flag = 1 + reader
        first = min(self.messages_read(reader), seq)
        if not copies:
            first = max(first, oldest)  # it may have died before it counted a message
        kept = first
        while kept > oldest and not (flags := self._flags_of(kept - 1))[flag]:
            flags[flag] = 1
            kept -= 1
        while not copies and first < seq and self._flags_of(first)[flag]:
            first += 1
        self.readers_parked[reader] = 0
        self._set_messages_read(reader, first)
        return first

    def pass_over(self, reader: int, blocker: int) -> bool:
        """Release a copying reader's messages up to ``blocker``; return whether that loses an unread one."""
        read = self.messages_read(reader)
        begin = max(self._passed.get(reader, 0), self.seq - self.layout.slots)
        end = max(begin, blocker + 1)
        for message in range(begin, end):
            self._flags_of(message)[1 + reader] = 1
        self._passed[reader] = end
        memory_fence()  # before anything that those messages lie in is written to
        return read <= blocker

    def _check_reader(self, reader: int) -> None:
        if not 0 <= reader < self.layout.n_reader:
            raise IndexError(f"there is no reader {reader}")

    def _oldest_of(self, history: int, gone: Callable[[int], object] | None) -> int:
        """Return the oldest of the last ``history`` messages from which on the ring still has every message."""
        first = self.seq
        while first > 0 and self.seq - first < min(history, self.layout.slots) and self._has(first - 1, gone):
            first -= 1
        return first

    def _has(self, seq: int, gone: Callable[[int], object] | None) -> bool:
        """Return whether a message is still complete in its slot and chunk."""
        slot = self.slots[seq % self.layout.slots]
        if slot.flags[0] == 0 or slot.seq != seq:
            return False
        if slot.header[0] == at.OVERFLOW_KIND:  # the body lies in an overflow segment, which ``gone`` knows
            return gone is None or not gone(seq)
        number = slot.chunk
        if number is None:
            return True
        place = chunk_at(self.layout.pools, number)
        return place is not None and int.from_bytes(self.slots.view[place[0] : place[0] + 8], "little") == seq + 1

    def _keep_again(self, seq: int) -> None:
        """Take a message's chunk off the free stack, if the chunk is free."""
        slot = self.slots[seq % self.layout.slots]
        number = slot.chunk
        if slot.header[0] == at.OVERFLOW_KIND or number is None:
            return
        record = self._record
        for chunks in record.chunks:
            chunks.keep_again(number, seq, claimed=record.claimed is chunks)

    # The header, for inspection

    def set_reader_state(self, reader: int, state: int, pid: int) -> None:
        """Write a reader's state; a newly attached reader gets a new histogram."""
        line = self.layout.reader_line(reader)
        if state == at.ATTACHED:
            self._words[(line + at.LATENCY_NS) // 8] = self._words[(line + at.BYTES) // 8] = 0
            histogram = self.layout.histogram(reader)
            self._header[histogram : histogram + 8 * at.LATENCY_BUCKETS] = bytes(8 * at.LATENCY_BUCKETS)
        self._header[line + at.STATE] = state
        self._write_u32(line + at.PID, pid)

    def set_writer_state(self, closed: bool, pid: int) -> None:
        """Write the writer's pid, and whether it has closed."""
        self._write_u32(at.WRITER_LINE + at.PID, pid)
        self._header[at.WRITER_LINE + at.STATE] = closed

    def describe(self, name: str | None, codec: int, ranks: Sequence[int], remote_readers: int) -> None:
        """Write the queue's name, the codec's code, and the ranks."""
        self.write_name(name or "")
        self._write_u32(self.layout.name_at + at.REMOTE_READERS, remote_readers)
        self._header[at.WRITER_LINE + at.CODEC] = codec
        for reader, rank in enumerate(ranks):
            self._write_u32(self.layout.reader_line(reader) + at.RANK, rank)
        self._words[(at.WRITER_LINE + at.CREATED) // 8] = monotonic_ns()

    def write_name(self, name: str) -> None:
        """Write the name that commands show: the first 120 bytes in UTF-8."""
        begin = self.layout.name_at
        encoded = name.encode(errors="replace")[:120]
        self._header[begin + at.NAME : begin + at.NAME + len(encoded)] = encoded
        self._header[begin] = len(encoded)

    def _write_u32(self, begin: int, value: int) -> None:
        self._header[begin : begin + 4] = value.to_bytes(4, "little")

    def close(self) -> None:
        """Release every view, so that the segment can be unmapped. Idempotent."""
        super().close()
        self._unmap()


class RingWriter(WriterControl, WriterBase):
    """The writer's end: `claim` a slot, fill its header and body, `commit` it; or `put` and `send` do all of that."""


class ReaderControl(_RingEnd, _ReaderBase):
    """The rare calls of a reader: retained slots, lost messages, the writer's needs, trace contexts."""

    def __init__(self, layout: Layout, view: memoryview, reader: int, /) -> None:
        if not 0 <= reader < layout.n_reader:
            raise IndexError(f"there is no reader {reader}")
        self.reader = reader
        self._record = ReaderRecord(layout.sizes)
        super().__init__(
            layout.sizes,
            layout.pools,
            view,
            self._record.memory,
            reader,
            layout.reader_line(reader),
            layout.histogram(reader),
        )
        self._map(layout, view, writes=False)
        self.parked: memoryview = self.readers_parked[reader : reader + 1]
        self._state_at = layout.reader_line(reader) + at.STATE
        self._lost_at = -1

    def give_back(self, index: int, /) -> bool:
        """Release a slot that `skip` retained, in order; return whether the writer must be woken."""
        self.check_unused()
        if not 0 <= index < self.layout.slots:
            raise IndexError(f"there is no slot {index}")
        memory_fence()  # the writer may reuse the chunk only after it was read
        self.slots.flags(index)[1 + self.reader] = 1
        self.kept = False
        memory_fence()
        return self.writer_parked[0] != 0

    def traces(self, most: int, /) -> list[bytes]:
        """Return up to ``most`` of the latest trace contexts, the oldest first; zeros: a message without one."""
        if most < 0:
            raise OverflowError("there are no fewer than 0 messages")
        return self._record.latest(most)

    # Messages of a reader that the writer does not wait for

    def intact(self) -> bool:
        """Return whether the next published message, and any copy made before, are whole: not passed over."""
        memory_fence()  # after the copy was made
        slot = self.slots[self.seq % self.layout.slots]
        unread = slot.flags[1 + self.reader] == 0
        memory_fence()  # a later message's number is visible before its cleared flag
        return unread and slot.seq == self.seq

    def lose(self) -> tuple[int, int]:
        """Skip to the oldest whole message, or halfway to the newest if none was read since; return the lost range."""
        flag = 1 + self.reader
        amount = self.layout.slots
        first = self.seq
        written = self.messages_written()
        seq = max(first + 1, written - amount)
        while seq < written and (self._flags_of(seq)[flag] or self.slots[seq % amount].seq != seq):
            seq += 1
        if first == self._lost_at:
            middle = (seq + written) // 2
            while seq < middle:
                self._flags_of(seq)[flag] = 1  # else the slot seems to have the next lap's message
                seq += 1
        self.start_at(seq)
        self._lost_at = seq
        return first, seq - 1

    # The writer

    def writer_can_go_on(self) -> bool:
        """Return whether all have read the message that a parked writer waits for; call this after `release`."""
        if self.writer_parked[0] == 0:
            return False
        memory_fence()
        # Messages are read in order, so the last awaited message stands for all awaited messages.
        flags = self._flags_of(self._words[at.WRITER_WANTS // 8])
        return not flags[0] or 0 not in flags.tobytes()

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
        """Release every view, so that the segment can be unmapped. Idempotent."""
        super().close()
        self.parked.release()
        self._unmap()


class RingReader(ReaderControl, ReaderBase):
    """A reader's end: look at the next message, and `release` its slot; or `take` and `receive` do both."""
