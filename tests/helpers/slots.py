"""What a test does to a slot behind the back of the queue."""

from __future__ import annotations

from typing import Any


def slot_of(writer: Any, number: int) -> memoryview:
    """Return the slot that holds message ``number``, header first, as any process of the queue could write it."""
    layout = writer.end.ring.buffer.layout
    start = layout.slot(number % layout.slots)
    view: memoryview = writer.end.ring.buffer.view[start : start + layout.slot_bytes]
    return view


def body_of(writer: Any, number: int) -> memoryview:
    """Return the room that message ``number`` has: its slot's, or that of its chunk."""
    slots = writer.end.ring.ring.slots
    body: memoryview = slots[number % len(slots)].body
    return body
