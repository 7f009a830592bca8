"""The core of a ring's reader: the hot calls are its base's, in C or in Python, and the rare ones are here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioshm.ring import layout as at
from aioshm.ring.atomics import ReaderBase, memory_fence
from aioshm.ring.book import ReaderBook
from aioshm.ring.layout import Layout
from aioshm.ring.slot import Slot, Slots

if TYPE_CHECKING:
    from aioshm.ring.reference import ReaderBase as _Base
else:
    _Base = object


class ReaderControl(_Base):
    """The rare calls of a reader's core: slots by hand, slots that are kept, trace contexts."""

    def __init__(self, layout: Layout, view: memoryview, slots: Slots, reader: int, /) -> None:
        if not 0 <= reader < layout.n_reader:
            raise IndexError(f"there is no reader {reader}")
        if len(slots) != layout.slots:
            raise TypeError("slots must be all slots, by index")
        self._slots = slots
        self._amount = layout.slots
        self._reader = reader
        self._notes = ReaderBook(layout.sizes)
        line, histogram = layout.reader_line(reader), layout.histogram(reader)
        super().__init__(layout.sizes, layout.pools, view, self._notes.memory, reader, line, histogram)

    def peek(self) -> Slot | None:
        """Return the slot of the next message, or None."""
        self.check_unused()
        return self._slots[self.seq % self._amount] if self.ready() else None

    def give_back(self, index: int, /) -> bool:
        """Finish with a slot kept by `skip`, in order; return whether to wake the writer."""
        self.check_unused()
        if not 0 <= index < self._amount:
            raise IndexError(f"there is no slot {index}")
        memory_fence()  # only after the chunk was read
        self._slots.flags(index)[1 + self._reader] = 1
        self.kept = False
        memory_fence()
        return self._slots.view[at.WRITER_PARKED] != 0

    def traces(self, most: int, /) -> list[bytes]:
        """Return the latest trace contexts, the latest last, at most ``most``; zeros: none."""
        if most < 0:
            raise OverflowError("there are no fewer than 0 messages")
        return self._notes.latest(most)


class ReaderCore(ReaderControl, ReaderBase):
    """A reader's end: `peek` at the next message, `release` it when done with its slot; or both in one call."""
