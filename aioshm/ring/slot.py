"""Views of slots, and of the chunks that go with them."""

from __future__ import annotations

from collections.abc import Iterator

from aioshm.errors import CorruptSlot
from aioshm.ring import layout as at
from aioshm.ring.layout import Layout, chunk_at

_SEQ = 1  # which word of a slot's header has the number of the message in it, see codec/frames.py
_CHUNK = at.CHUNK // 8


class Slot:
    """One slot.

    Attributes:
        index: Which slot of the ring this is.
        header: Its 64-byte header.
    """

    __slots__ = ("_slots", "_words", "header", "index")

    def __init__(self, slots: Slots, index: int) -> None:
        self._slots = slots
        self.index = index
        start = slots.layout.slot(index)
        self.header = slots.bodies[start : start + at.SLOT_HEADER_BYTES]
        self._words = self.header.cast("Q")

    @property
    def flags(self) -> memoryview:
        """The written flag, then one flag per reader."""
        start = self._slots.layout.flags(self.index)
        return self._slots.view[start : start + self._slots.layout.flag_bytes]

    @property
    def chunk(self) -> int | None:
        """Number of the chunk that its header names; None: the message lies in the slot itself."""
        number = self._words[_CHUNK]
        return number - 1 if number else None

    @property
    def body(self) -> memoryview:
        """The room for a message: the slot's own, or that of the chunk that its header names. Not to be released.

        Raises:
            CorruptSlot: There is no such chunk, or it has another message by now.
        """
        slots, words = self._slots, self._words
        number, seq = words[_CHUNK], words[_SEQ]
        if not number:
            return slots.room(self.index)
        found = slots.chunks.get(number) or slots.cut_chunk(number)
        if found is None:
            raise CorruptSlot(seq, seq, f"there is no chunk {number - 1}")
        header, room = found
        stamp = header[0]
        if stamp != seq + 1:
            raise CorruptSlot(stamp - 1 if stamp else None, seq)
        return room

    def release(self) -> None:
        """Release the views that this keeps."""
        self._words.release()
        self.header.release()


class Slots(dict[int, Slot]):
    """All slots of a ring by index. There are thousands, so each is made when it is first asked for.

    Args:
        layout: The ring's.
        view: Its memory.
        writable: Whether slots and chunks can be written to; their flags can in any case.

    Attributes:
        layout, view: As above.
        bodies: The same memory, read-only unless ``writable``.
        chunks: The words of the header of a chunk, and its room, by the word that names it; of those seen so far.
    """

    def __init__(self, layout: Layout, view: memoryview, *, writable: bool = True) -> None:
        self.layout = layout
        self.view = view[:]
        self.bodies = view[:] if writable else view.toreadonly()
        self.chunks: dict[int, tuple[memoryview, memoryview]] = {}
        self._pools = layout.pools
        self._amount = layout.slots

    def __missing__(self, index: int) -> Slot:
        if not 0 <= index < self._amount:
            raise IndexError(f"there is no slot {index}")
        self[index] = slot = Slot(self, index)
        return slot

    def __len__(self) -> int:
        return self._amount

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._amount))

    def room(self, index: int) -> memoryview:
        """Return the room of a slot, behind its header."""
        start = self.layout.slot(index) + at.SLOT_HEADER_BYTES
        return self.bodies[start : start + self.layout.inline_bytes]

    def cut_chunk(self, word: int) -> tuple[memoryview, memoryview] | None:
        """Return what `chunks` is to have of the chunk that a word names, or None if there is no such chunk."""
        place = chunk_at(self._pools, word - 1)
        if place is None:
            return None
        start, room = place[0] + at.CHUNK_HEADER_BYTES, place[1]
        header = self.bodies[place[0] : start].cast("Q")
        self.chunks[word] = found = header, self.bodies[start : start + room]
        return found

    def release(self) -> None:
        """Release the views, so that the segment can be unmapped."""
        for slot in super().values():
            slot.release()
        for header, room in self.chunks.values():
            header.release()
            room.release()
        self.view.release()
        self.bodies.release()
