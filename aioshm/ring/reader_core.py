"""The core of a ring's reader: the rare calls. Its base class has the hot calls, in C or in Python."""

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
    """The rare calls of a reader's core: peeking at slots, releasing retained slots, trace contexts."""

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
        """Return the slot of the next message; None: there is no message."""
        self.check_unused()
        return self._slots[self.seq % self._amount] if self.ready() else None

    def give_back(self, index: int, /) -> bool:
        """Release a slot that `skip` retained, in order; return whether the writer must be woken."""
        self.check_unused()
        if not 0 <= index < self._amount:
            raise IndexError(f"there is no slot {index}")
        memory_fence()  # the writer may reuse the chunk only after it was read
        self._slots.flags(index)[1 + self._reader] = 1
        self.kept = False
        memory_fence()
        return self._slots.view[at.WRITER_PARKED] != 0

    def traces(self, most: int, /) -> list[bytes]:
        """Return up to ``most`` of the latest trace contexts, the oldest first; zeros: a message without one."""
        if most < 0:
            raise OverflowError("there are no fewer than 0 messages")
        return self._notes.latest(most)


class ReaderCore(ReaderControl, ReaderBase):
    """The core of a reader: `peek` at the next message, `release` its slot when done; or both in one call."""
