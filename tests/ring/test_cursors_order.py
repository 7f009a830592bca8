"""In which order the portable cores touch shared memory, where they fence, and what that costs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from rings import ORDERED, TWINS, NewEnds, put

from aioshm.ring import RingReader, RingWriter, reference

# The order of the native core's stores cannot be seen from here: test_litmus.py tries it.
portable = pytest.mark.parametrize("cores", TWINS.values(), ids=TWINS, indirect=True)
ordered = pytest.mark.parametrize("cores", [ORDERED], ids=["ordered"], indirect=True)


class Watched:
    """A view of shared memory that notes what is stored in it and what is compared with it."""

    def __init__(self, view: memoryview, what: str, log: list[str]) -> None:
        self._view, self._what, self._log = view, what, log

    def __getitem__(self, index: Any) -> Any:
        return self._view[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        at = index if isinstance(index, int) else f"{index.start}:{index.stop}"
        name = f"{self._what}[{at}]"
        self._log.append(f"{name} = {value if isinstance(value, int) else bytes(value).hex()}")
        self._view[index] = value

    def __eq__(self, other: object) -> bool:
        return self._view == other

    __hash__ = None  # type: ignore[assignment]

    def release(self) -> None:
        self._view.release()


class WatchedSlots:
    """Slots of which it is noted what is stored in their bodies."""

    def __init__(self, slots: Any, log: list[str]) -> None:
        self._slots, self._log = slots, log

    def __getitem__(self, index: int) -> Any:
        slot = self._slots[index]
        return SimpleNamespace(body=Watched(slot.body, "body", self._log))


class ParkedFlags(Watched):
    """Parked flags, of which also a look is noted."""

    def __getitem__(self, index: Any) -> Any:
        self._log.append("look at the parked flags")
        return super().__getitem__(index)


def watch(cursor: RingWriter | RingReader, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the log of what a cursor does with its only slot from now on."""
    log: list[str] = []
    core: Any = cursor.core
    core._flags = Watched(core._flags, "flags", log)
    core._slots = WatchedSlots(core._slots, log)
    core._parked = ParkedFlags(core._parked, "parked", log)
    monkeypatch.setattr(reference, "memory_fence", lambda: log.append("fence"))
    return log


def in_order(log: list[str], *steps: str) -> bool:
    """Return whether the log has these steps in this order, whatever stands between them."""
    rest = iter(log)
    return all(step in rest for step in steps)


class TestOrder:
    @portable
    def test_of_a_write(self, new_ends: NewEnds, monkeypatch: pytest.MonkeyPatch) -> None:
        _, writer, _ = new_ends(2, 1)
        log = watch(writer, monkeypatch)
        slot = writer.claim()
        assert slot is not None
        slot.body[0] = 7
        writer.commit()
        stores = [entry for entry in log if "=" in entry]
        assert stores == ["flags[0] = 0", "body[0] = 7", "flags[1:3] = 0000", "flags[0] = 1"]
        assert in_order(log, "flags[0] = 1", "fence", "look at the parked flags")

    @portable
    def test_of_a_read(self, new_ends: NewEnds, monkeypatch: pytest.MonkeyPatch) -> None:
        _, writer, (_, reader) = new_ends(2, 1)
        put(writer, b"message")
        log = watch(reader, monkeypatch)
        assert reader.peek() is not None
        assert not [entry for entry in log if "=" in entry], "a look stores nothing"
        log.clear()
        reader.release()
        assert [entry for entry in log if "=" in entry] == ["flags[2] = 1"]
        assert in_order(log, "flags[2] = 1", "fence", "look at the parked flags")

    @ordered
    def test_the_ordered_writer_fences_what_the_written_flag_announces(
        self, new_ends: NewEnds, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, writer, _ = new_ends(2, 1)
        log = watch(writer, monkeypatch)
        slot = writer.claim()
        assert slot is not None
        slot.body[0] = 7
        writer.commit()
        assert in_order(log, "flags[0] = 0", "fence", "body[0] = 7", "fence", "flags[0] = 1")
        # Cleared after the written flag is seen, a flag that a quick reader has set by then would be lost for ever.
        assert in_order(log, "flags[1:3] = 0000", "fence", "flags[0] = 1")
        assert log.count("flags[1:3] = 0000") == 1, "and not once more afterwards"

    @ordered
    def test_the_ordered_reader_fences_the_chunk(self, new_ends: NewEnds, monkeypatch: pytest.MonkeyPatch) -> None:
        _, writer, (reader,) = new_ends(1, 1)
        put(writer, b"message")
        log = watch(reader, monkeypatch)
        reader.peek()
        assert log == ["fence"]
        reader.release()
        assert in_order(log, "fence", "fence", "flags[1] = 1")


def steps(work: Callable[[], object]) -> int:
    """Return how many bytecode instructions a call executes."""
    count = 0

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # or its callbacks would count
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


@portable
def test_readers_cost_the_writer_no_python_loop(new_ends: NewEnds) -> None:
    steps(lambda: None)  # CPython 3.12.1 traces no instructions the first time
    costs = []
    for n_reader in (1, 10, 1000):
        _, writer, readers = new_ends(n_reader, 2)
        for reader in readers:
            reader.parked[0] = 0
        first = steps(writer.claim), steps(writer.commit), steps(writer.free)
        writer.claim()
        writer.commit()
        refused = steps(writer.claim)
        for reader in readers:
            reader.release()
            reader.release()
        costs.append((*first, refused, steps(writer.claim)))
    assert costs[0] == costs[1] == costs[2]
    assert all(cost > 0 for cost in costs[0])
