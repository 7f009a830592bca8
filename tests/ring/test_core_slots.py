"""Slots by hand: claim, commit, peek, release, skip, give back, evict, free. One class for every kind of core."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest
from pairs_of_cores import NewPair, Pair, flags

from aioshm.ring import layout as at


def words(pair: Pair, line: int) -> int:
    return int(struct.unpack_from("<Q", pair.ring.view, line)[0])


class TestFlags:
    def test_flags_say_who_may_read_and_write_a_slot(self, new_pair: NewPair) -> None:
        pair = new_pair(3)
        for row in itertools.product((0, 1), repeat=4):
            pair.slots[0].flags[:] = bytes(row)
            written, *read = row
            assert [reader.ready() for reader in pair.readers] == [bool(written and not flag) for flag in read]
            writable = not written or all(read)
            assert pair.writer.free() is writable
            assert pair.writer.laggards() == [place for place in range(3) if written and not read[place]]
            assert flags(pair)[0] == bytes(row), "looking changes nothing"
            assert (pair.writer.claim() is not None) is writable
            assert flags(pair)[0] == bytes([not writable, *read])

    @pytest.mark.parametrize("readers", [1, 7, 8, 9, 17, 64, 200])
    def test_slot_is_free_when_every_reader_has_read_it(self, new_pair: NewPair, readers: int) -> None:
        pair = new_pair(readers, 1)
        assert pair.writer.put(b"x")
        assert flags(pair) == [b"\1" + bytes(readers)]
        for reader in reversed(pair.readers):
            assert not pair.writer.free()
            assert pair.writer.claim() is None
            assert reader.take() == b"x"
        assert pair.writer.free()

    def test_message_is_finished_when_every_reader_has_released_it(self, new_pair: NewPair) -> None:
        pair = new_pair(2)
        pair.writer.put_many([b"x"] * 3, 0)
        assert not any(map(pair.writer.finished, range(3)))
        pair.readers[0].take()
        assert not pair.writer.finished(0)
        pair.readers[1].take()
        assert [pair.writer.finished(number) for number in range(3)] == [True, False, False]
        assert pair.writer.claim() is not None
        assert pair.writer.finished(0), "when its slot is claimed again"
        pair.writer.commit()
        assert [pair.writer.finished(number) for number in range(4)] == [True, False, False, False]

    def test_spin_ends_when_so_many_slots_are_free(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.put_many([b"x"] * 2, 0)
        pair.reader.take()
        for slots, free in ((2, True), (3, False)):
            pair.writer.spin_for(slots)
            assert pair.writer.spin(1000) is free
        pair.reader.take()
        assert pair.writer.spin(1000) is True

    def test_skipped_slot_keeps_the_slot_until_it_is_given_back(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.put_many([b"a", b"b", b"c"], 0)
        for _ in range(2):
            assert pair.reader.skip() is None
        assert pair.reader.take() == b"c"
        assert words(pair, pair.ring.layout.reader_line(0)) == pair.reader.seq == 3
        assert not pair.writer.free()
        assert pair.reader.give_back(0) is False
        assert pair.writer.free()
        assert not pair.writer.free(2)
        pair.ring.view[at.WRITER_PARKED] = 1
        assert pair.reader.give_back(1) is True
        assert pair.writer.free(3)


class TestClosing:
    def test_every_call_says_so(self, new_pair: NewPair) -> None:
        pair = new_pair()
        writer, reader = pair.writer, pair.reader
        for core in (writer, reader):
            core.close()
            core.close()
            assert (core.open, core.passes()) == (False, False)
        before = bytes(pair.ring.view)
        for call in (
            writer.free,
            writer.claim,
            writer.commit,
            lambda: writer.put(b""),
            lambda: writer.put_many([b""], 0),
            lambda: writer.evict(0),
            lambda: writer.spin(10),
            reader.ready,
            reader.peek,
            reader.release,
            reader.skip,
            lambda: reader.give_back(0),
            reader.take,
            lambda: reader.take_many(1),
            lambda: reader.spin(10),
        ):
            with pytest.raises(ValueError, match=r"closed|released"):
                call()
        assert bytes(pair.ring.view) == before
        assert writer.send(b"") is False
        assert reader.receive() is pair.cores.module.EMPTY

    def test_lets_the_memory_go(self, new_pair: NewPair) -> None:
        pair = new_pair()
        memory = bytearray(pair.ring.layout.total_bytes)
        view = memoryview(memory)
        writer = pair.cores.writer(pair.ring.layout, view)
        reader = pair.cores.reader(pair.ring.layout, view, 0)
        with pytest.raises(BufferError):
            memory.append(0)
        writer.close()
        with pytest.raises(BufferError):
            memory.append(0)
        reader.close()
        view.release()
        memory.append(0)


NUMBERS = ["1", None, b"1"]
FAR = 1 << 40
WRONG: list[tuple[str, tuple[Any, ...], type[Exception]]] = [
    *(("free spin_for", (ahead,), ValueError) for ahead in (0, 4, FAR, -FAR)),
    *(("free spin_for blocker", (ahead,), TypeError) for ahead in NUMBERS),
    *(("free blocker spin_for", (3, large), ValueError) for large in ([17] * 4, [101] * 4)),
    ("free blocker spin_for", (1, [-1]), OverflowError),
    *(("free blocker spin_for", arguments, TypeError) for arguments in ((1, ["1"]), (1, 5))),
    *(("put", (message,), TypeError) for message in (bytearray(b"x"), "x", None)),
    ("put_many", ([b"a"], -1), ValueError),
    *(("put_many", arguments, TypeError) for arguments in ((b"a", 0), ([b"a"], "0"), ([b"a"],), ([], 0, 0))),
    ("claim", (-1,), OverflowError),
    ("claim", ("1",), TypeError),
    *(("evict", (reader,), IndexError) for reader in (-1, 2, FAR)),
    *(("evict", (reader,), TypeError) for reader in ("0", None)),
    *(("admit", (reader, 0, None), IndexError) for reader in (-1, 2)),
    ("admit", (0, -1, None), ValueError),
    *(("give_back", (index,), IndexError) for index in (-1, 3, FAR)),
    *(("give_back take_many traces", (value,), TypeError) for value in ("0", None, b"")),
    ("give_back", (1.0,), TypeError),
    ("start_at traces", (-1,), OverflowError),
    *(("trace", (wrong,), ValueError) for wrong in (b"", bytes(27))),
    *(("trace", (wrong,), TypeError) for wrong in (None, bytearray(26))),
]


@pytest.mark.parametrize(
    ("call", "arguments", "error"), [(call, *rest) for calls, *rest in WRONG for call in calls.split()]
)
def test_wrong_arguments_are_refused_and_change_nothing(
    new_pair: NewPair, call: str, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    pair = new_pair(2)
    pair.writer.put(b"x")
    before = bytes(pair.ring.view)
    core = pair.writer if hasattr(pair.writer, call) else pair.reader
    with pytest.raises(error):
        setattr(core, call, *arguments) if call == "trace" else getattr(core, call)(*arguments)
    assert bytes(pair.ring.view) == before
    assert pair.writer.trace == bytes(at.TRACE_BYTES)
    assert pair.reader.take_many(1) == [b"x"], "the core is not in use any more"
