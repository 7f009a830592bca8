"""The core of a ring's writer: the rare calls. Its base class has the hot calls, in C or in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aioshm.ring import layout as at
from aioshm.ring.atomics import WriterBase
from aioshm.ring.book import NO_MESSAGE, Chunks, WriterBook
from aioshm.ring.layout import Layout, chunk_at
from aioshm.ring.slot import Slot, Slots

if TYPE_CHECKING:
    from aioshm.ring.reference import WriterBase as _Base
else:
    _Base = object

_WORD = 8  # bytes
_SEQ = 1  # the index of the sequence number in a slot's header, in words


class WriterControl(_Base):
    """The rare calls of a writer's core: room, memory for chunks, eviction and admission."""

    # A writer receives no trace contexts.
    garbled: int = 0
    in_use: int
    awaited: int

    def __init__(self, layout: Layout, view: memoryview, slots: Slots, /) -> None:
        if len(slots) != layout.slots:
            raise TypeError("slots must be all slots, by index")
        self._slots = slots
        self._layout = layout
        self._notes = WriterBook(layout.sizes, layout.pools)
        self._allocate: Callable[[int, int], object] | None = None
        super().__init__(layout.sizes, layout.pools, view, self._notes.memory)

    # Slots and trace contexts

    def claim(self, nbytes: int = 0, /) -> Slot | None:
        """Claim the next slot for ``nbytes``, and a chunk if a slot is too small; return None if there is no room."""
        return self._slots[self.seq % self._layout.slots] if self.claim_slot(nbytes) else None

    @property
    def trace(self) -> bytes:
        """The trace context of the next message, where slots have room for one."""
        return bytes(self._notes.trace)

    @trace.setter
    def trace(self, trace: bytes) -> None:
        if type(trace) is not bytes:
            raise TypeError("a trace context is bytes")
        if len(trace) != at.TRACE_BYTES:
            raise ValueError(f"a trace context has {at.TRACE_BYTES} bytes")
        self._notes.trace[:] = trace

    # Room

    def free(self, slots: int = 1, large: Sequence[int] = (), /) -> bool:
        """Return whether there is room for messages; ``large``: the sizes of those that need a chunk."""
        return self.blocker(slots, large) < 0

    def blocker(self, slots: int = 1, large: Sequence[int] = (), /) -> int:
        """Return the message that all readers must read before `free` is true; -1: there is room."""
        wanted: dict[Chunks, int] = {}
        for nbytes in large:
            chunks = self._notes.chunks_for(nbytes)
            wanted[chunks] = wanted.get(chunks, 0) + 1
        amount = self._layout.slots
        if not 1 <= slots <= amount:
            raise ValueError(f"a ring of {amount} slots cannot have {slots} of them free")
        # The message now in the last of these slots. In the first lap the slot is unused, so free unless damaged.
        last = self.seq + slots - 1
        message = last - amount if last >= amount else last
        blocker = -1 if self.finished(message) else message
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

    def spin_for(self, slots: int = 1, large: Sequence[int] = (), /) -> int:
        """Make busy-waits end when this much room is free; return the result of `blocker`."""
        blocker = self.blocker(slots, large)
        self.awaited = NO_MESSAGE if blocker < 0 else blocker
        return blocker

    # Memory for the chunks of a named segment

    def bind_allocate(self, allocate: Callable[[int, int], object], /) -> None:
        """Mark all chunks as unallocated; ``allocate`` gets an offset and a size in bytes, and allocates memory."""
        self._allocate = allocate
        for chunks in self._notes.chunks:
            chunks.allocated = 0

    def _allocate_chunks(self, chunks: Chunks, wanted: int) -> None:
        """Allocate memory until ``wanted`` free chunks have memory."""
        if self._notes.claimed is not chunks:
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

    # Eviction and admission

    def evict(self, reader: int, /) -> None:
        """Evict a reader: it counts as having read every message, past and future."""
        layout, view = self._layout, self._slots.view
        self.check_open()
        self._check_reader(reader)
        begin, row = layout.flags(0), layout.flag_bytes
        flags = view[begin : begin + layout.slots * row]
        flags[1 + reader :: row] = bytes([1]) * layout.slots
        self._notes.set_unread(reader, 1)
        view[at.READERS_PARKED + reader] = 0

    def admit(self, reader: int, history: int, gone: Callable[[int], object] | None, /) -> int:
        """Admit a reader; return its first message: at most ``history`` back, and none ``gone`` since."""
        self.check_unused()
        self._check_reader(reader)
        if history < 0:
            raise ValueError("there are no fewer than 0 messages")
        self.in_use += 1
        try:
            first = self._oldest_of(history, gone)
        finally:
            self.in_use -= 1
        slots, amount = self._slots, self._layout.slots
        for seq in range(self.seq - 1, first - 1, -1):
            self._keep_again(seq)
            slots.flags(seq % amount)[1 + reader] = 0
        self._notes.set_unread(reader, 0)
        slots.view[at.READERS_PARKED + reader] = 0
        return first

    def _check_reader(self, reader: int) -> None:
        if not 0 <= reader < self._layout.n_reader:
            raise IndexError(f"there is no reader {reader}")

    def _oldest_of(self, history: int, gone: Callable[[int], object] | None) -> int:
        """Return the oldest of the last ``history`` messages from which on the ring still has every message."""
        first = self.seq
        while first > 0 and self.seq - first < min(history, self._layout.slots) and self._has(first - 1, gone):
            first -= 1
        return first

    def _has(self, seq: int, gone: Callable[[int], object] | None) -> bool:
        """Return whether a message is still complete in its slot and chunk."""
        index = seq % self._layout.slots
        kind, found, number = self._header(index)
        if self._slots.flags(index)[0] == 0 or found != seq:
            return False
        if kind == at.OVERFLOW_KIND:  # the body lies in an overflow segment, which ``gone`` knows
            return gone is None or not gone(seq)
        place = chunk_at(self._layout.pools, number - 1) if number else None
        return not number or (place is not None and self._word(place[0]) == seq + 1)

    def _keep_again(self, seq: int) -> None:
        """Take a message's chunk off the free stack, if the chunk is free."""
        kind, _, number = self._header(seq % self._layout.slots)
        if kind == at.OVERFLOW_KIND or not number:
            return
        notes = self._notes
        for chunks in notes.chunks:
            chunks.keep_again(number - 1, seq, claimed=notes.claimed is chunks)

    def _header(self, index: int) -> tuple[int, int, int]:
        """Return a message's kind, its sequence number, and 1 + the number of its chunk (0: no chunk)."""
        begin = self._slots.begin(index)
        return self._slots.view[begin], self._word(begin + _SEQ * _WORD), self._word(begin + at.CHUNK)

    def _word(self, begin: int) -> int:
        return int.from_bytes(self._slots.view[begin : begin + _WORD], "little")


class WriterCore(WriterControl, WriterBase):
    """The core of a writer: `claim` a slot, fill its header and body, `commit` it; or all of that in one call."""
