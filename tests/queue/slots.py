"""What a test does to a slot behind the back of the queue."""

from __future__ import annotations

from typing import Any


def slot_of(writer: Any, number: int) -> memoryview:
    """Return the slot that holds message ``number``, header first, as any process of the queue could write it."""
    layout = writer.end.ring.buffer.layout
    start = layout.slot(number % layout.max_chunks)
    view: memoryview = writer.end.ring.buffer.view[start : start + layout.slot_bytes]
    return view
