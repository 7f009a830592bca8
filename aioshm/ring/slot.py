"""Views of slots, and of the chunks that go with them."""

from __future__ import annotations

from collections.abc import Iterator

from aioshm.errors import CorruptSlot
from aioshm.ring import layout as at
from aioshm.ring.layout import Layout, chunk_at

_SEQ = 1  # which word of a slot's header has the number of the message in it, see codec/frames.py
_CHUNK = at.CHUNK // 8
_SIZE = at.SIZE // 8


class Slot:
    """One slot."""

    __slots__ = ("_slots", "begin", "index")

    def __init__(self, slots: Slots, index: int) -> None:
        self._slots = slots
        self.index: int = index
        # The offset of the slot's header in the segment.
        self.begin: int = slots.begin(index)

    @property
    def header(self) -> memoryview:
        """The 64-byte header."""
        return self._slots.header(self.begin)

    @property
    def flags(self) -> memoryview:
        """The written flag, then one flag per reader."""
        return self._slots.flags(self.index)

    @property
    def seq(self) -> int:
        """The number of the message, as the header says."""
        return self._slots.seq(self.begin)

    @property
    def chunk(self) -> int | None:
        """The number of the chunk that the header names; None: the message lies in the slot itself."""
        return self._slots.chunk(self.begin)

    @property
    def body(self) -> memoryview:
        """The room for a message; do not release this view."""
        return self._slots.body(self.begin)


class Slots:
    """The slots of a ring and their chunks, by offset; flags are always writable."""

    def __init__(self, layout: Layout, view: memoryview, *, writable: bool = True) -> None:
        self.layout: Layout = layout
        self.view: memoryview = view[:]
        # The same memory, read-only unless ``writable``.
        self.bodies: memoryview = view[:] if writable else view.toreadonly()
        self._words: memoryview = self.bodies[: layout.total_bytes].cast("Q")
        self._chunks: dict[int, tuple[memoryview, memoryview]] = {}  # header's words and room, by the word naming it
        self._pools = layout.pools
        self._first = layout.header_bytes
        self._stride = layout.slot_bytes
        self._inline_bytes = layout.inline_bytes

    def __getitem__(self, index: int) -> Slot:
        if not 0 <= index < self.layout.slots:
            raise IndexError(f"there is no slot {index}")
        return Slot(self, index)

    def __len__(self) -> int:
        return self.layout.slots

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.layout.slots))

    def begin(self, index: int) -> int:
        """Return where a slot begins."""
        return self._first + index * self._stride

    def index(self, begin: int) -> int:
        """Return which slot begins at an offset."""
        return (begin - self._first) // self._stride

    def flags(self, index: int) -> memoryview:
        """Return the flags of a slot: the written flag, then one per reader."""
        start = self.layout.flags(index)
        return self.view[start : start + self.layout.flag_bytes]

    def chunk(self, begin: int) -> int | None:
        """Return which chunk the header at an offset names; None: the message lies in the slot itself."""
        number = self._words[(begin >> 3) + _CHUNK]
        if not number:
            return None
        return number - 1

    def header(self, begin: int) -> memoryview:
        """Return the header at an offset."""
        return self.bodies[begin : begin + at.SLOT_HEADER_BYTES]

    def seq(self, begin: int) -> int:
        """Return the number of the message, as the header at an offset says."""
        return self._words[(begin >> 3) + _SEQ]

    def size(self, begin: int) -> int:
        """Return the bytes of a body that did not overflow, as the header at an offset says."""
        return self._words[(begin >> 3) + _SIZE]

    def body(self, begin: int) -> memoryview:
        """Return the room of a slot, or of its chunk; do not release this view."""
        words = self._words
        header = begin >> 3
        number = words[header + _CHUNK]
        if not number:
            begin += at.SLOT_HEADER_BYTES
            return self.bodies[begin : begin + self._inline_bytes]
        seq = words[header + _SEQ]
        found = self._chunks.get(number) or self._cut_chunk(number)
        if found is None:
            raise CorruptSlot(seq, seq, f"there is no chunk {number - 1}")
        stamp = found[0][0]
        if stamp != seq + 1:
            found_seq = None
            if stamp:
                found_seq = stamp - 1
            raise CorruptSlot(found_seq, seq)
        return found[1]

    def _cut_chunk(self, word: int) -> tuple[memoryview, memoryview] | None:
        place = chunk_at(self._pools, word - 1)
        if place is None:
            return None
        start = place[0] + at.CHUNK_HEADER_BYTES
        header = self.bodies[place[0] : start].cast("Q")
        self._chunks[word] = found = header, self.bodies[start : start + place[1]]
        return found

    def release(self) -> None:
        """Release the views, so that the segment can be unmapped."""
        for header, room in self._chunks.values():
            header.release()
            room.release()
        for view in (self._words, self.view, self.bodies):
            view.release()
