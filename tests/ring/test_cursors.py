"""The table of the flags, for each core; the order in which the portable cores touch memory, and their fences."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rings import ORDERED, TWINS, NewEnds, content, look, put, receive

from aioshm.ring import RingReader, RingWriter, reference

# The order of the native core's stores cannot be seen from here: test_litmus.py tries it.
portable = pytest.mark.parametrize("cores", TWINS.values(), ids=TWINS, indirect=True)
ordered = pytest.mark.parametrize("cores", [ORDERED], ids=["ordered"], indirect=True)


class TestCursors:
    @pytest.mark.parametrize("row", list(itertools.product((0, 1), repeat=4)), ids=lambda row: "".join(map(str, row)))
    def test_every_row_of_the_table(self, new_ends: NewEnds, row: tuple[int, ...]) -> None:
        ring, writer, readers = new_ends(3)
        flags = ring.flags(0)
        flags[:] = bytes(row)
        written, *read = row
        for reader in readers:
            readable = bool(written and not read[reader.reader])
            assert reader.ready() is readable
            assert (reader.peek() is not None) is readable
        writable = not written or all(read)
        assert writer.free() is writable
        assert writer.laggards() == ([i for i in range(3) if not read[i]] if written else [])
        assert bytes(flags) == bytes(row), "looking changes nothing"
        assert (writer.claim() is not None) is writable
        assert flags[0] == (0 if writable else 1)
        assert bytes(flags[1:]) == bytes(read)

    def test_a_message_is_finished_with_when_every_reader_has_released_it(self, new_ends: NewEnds) -> None:
        _, writer, readers = new_ends(2, 3)
        for number in range(3):
            put(writer, content(number, 100))
        assert not any(map(writer.finished, range(3)))
        receive(readers[0])
        assert not writer.finished(0)
        receive(readers[1])
        assert list(map(writer.finished, range(3))) == [True, False, False]
        assert writer.claim() is not None
        assert writer.finished(0), "when its slot is claimed again"
        writer.commit()
        assert list(map(writer.finished, range(4))) == [True, False, False, False]

    def test_closed_cursors_let_the_ring_be_unmapped(self, new_ends: NewEnds) -> None:
        def mapped() -> int:
            return Path("/proc/self/maps").read_text().count("/memfd:aioshm")

        before = mapped()
        ring, writer, readers = new_ends(2)
        put(writer, b"x")
        look(readers[0])
        assert mapped() == before + 1
        for cursor in (writer, *readers):
            cursor.close()
            cursor.close()
        ring.close()
        assert mapped() == before


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
