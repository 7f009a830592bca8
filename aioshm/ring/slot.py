"""Views of one slot."""

from __future__ import annotations

from aioshm.ring import layout as at
from aioshm.ring.layout import Layout


class Slot:
    """Views of one slot.

    Attributes:
        flags: The written flag, then one flag per reader.
        reader_flags: The latter alone.
        header: The slot's 64-byte header.
        chunk: Room for a message.
        index: Which slot of the ring this is.
        next: The slot that comes after this one, the first after the last.
    """

    __slots__ = ("chunk", "flags", "header", "index", "next", "reader_flags")

    next: Slot

    def __init__(self, layout: Layout, view: memoryview, index: int, body_view: memoryview) -> None:
        self.index: int = index
        start = layout.flags(index)
        self.flags: memoryview = view[start : start + layout.flag_bytes]
        self.reader_flags: memoryview = self.flags[1:]
        start = layout.slot(index)
        body = start + at.SLOT_HEADER_BYTES
        self.header: memoryview = body_view[start:body]
        self.chunk: memoryview = body_view[body : body + layout.max_chunk_bytes]

    def release(self) -> None:
        """Release the views, so that the segment can be unmapped."""
        for part in (self.flags, self.reader_flags, self.header, self.chunk):
            part.release()


def cut_slots(layout: Layout, view: memoryview, *, writable: bool = True) -> tuple[Slot, ...]:
    """Return all slots of a ring, each knowing its next; only their flags can be written to, unless ``writable``."""
    with (view if writable else view.toreadonly())[:] as bodies:
        slots = tuple(Slot(layout, view, index, bodies) for index in range(layout.max_chunks))
    for slot, following in zip(slots, [*slots[1:], slots[0]], strict=True):
        slot.next = following
    return slots
