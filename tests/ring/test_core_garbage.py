"""A ring's end forgotten in a cycle with the memory that it stands on: collecting it crashes nothing."""

from __future__ import annotations

import gc
import mmap
from typing import Any

from rings import Cores

from aioshm.ring import Layout, RingReader, RingWriter


class Owner:
    """Whatever an end hangs on, and is known to."""


def forget(cores: Cores) -> None:
    layout = Layout.of(1, 100, 3, 3)
    memory = mmap.mmap(-1, layout.total_bytes)
    view = memoryview(memory)
    for cursor in (RingWriter(layout, view, cores.writer), RingReader(layout, view, 0, cores.reader)):
        owner: Any = Owner()
        owner.itself, owner.cursor, owner.memory, owner.view = owner, cursor, memory, view
        cursor.core.bind(lambda obj, owner=owner: obj, 1, False, lambda owner=owner: owner)


def test_an_end_in_a_cycle_with_its_view(cores: Cores) -> None:
    for _ in range(50):
        forget(cores)
        gc.collect()
    assert not [obj for obj in gc.get_objects() if isinstance(obj, Owner)]
