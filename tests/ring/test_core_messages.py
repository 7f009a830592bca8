"""put, take, batches and their answers. One class for every kind of core."""

from __future__ import annotations

import signal
import struct
import sys
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

import pytest
from pairs_of_cores import PLAIN, NewPair, Notes, Pair, decode

from aioshm.ring import layout as at

COPY_MAX = 65536


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*_: object) -> Any:
        raise error

    return call


def rewrite(pair: Pair, what: int = PLAIN, seq: int = 0, size: int = 0) -> None:
    struct.pack_into("<4Q", pair.slots[0].header, 0, what, seq, 1, size)


class TestPut:
    def test_passes_by_the_gate(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.open = pair.reader.open = False
        assert pair.writer.put(b"x") is True
        assert pair.reader.take() == b"x"
        assert pair.reader.take() is pair.cores.module.EMPTY


class TestPutMany:
    @pytest.mark.parametrize(
        ("messages", "start", "sent"),
        [
            ([], 0, []),
            ([], 1, []),
            ([b"a"], 1, []),
            ([b"a"], 1 << 40, []),
            ([b"a", b"b", b"c"], 1, [b"b", b"c"]),
            ([b"a", None, b"c"], 0, [b"a"]),
            ([b"a", None, b"c"], 1, []),
            ([b"a", bytearray(b"b")], 0, [b"a"]),
            ([b"a", b"b" * 101, b"c"], 0, [b"a"]),
            ([b"a", b"b" * 100], 0, [b"a", b"b" * 100]),
            ([b"%d" % number for number in range(9)], 0, [b"0", b"1", b"2", b"3"]),
        ],
    )
    def test_where_it_ends(self, new_pair: NewPair, messages: list[Any], start: int, sent: list[bytes]) -> None:
        pair = new_pair(1, 4)
        before = list(messages)
        assert pair.writer.put_many(messages, start) == len(sent)
        assert messages == before
        assert pair.reader.take_many(99) == sent

    def test_counts_of_the_turn_and_tells_once(self, new_pair: NewPair) -> None:
        pair, notes = new_pair(1, 4), Notes()
        pair.writer.bind(bytes, PLAIN, True, notes.noting("parked"))
        pair.writer.budget = 10
        pair.ring.view[192] = 1
        assert pair.writer.put_many([b"x"] * 3, 0) == 3
        assert (notes, pair.writer.budget) == (["parked"], 7)
        assert pair.writer.put_many([None], 0) == 0
        assert notes == ["parked"], "nothing passed"
        pair.writer.budget = 1
        pair.writer.put_many([b"x"], 0)
        assert pair.writer.budget == 0


class TestTake:
    @pytest.mark.parametrize(
        ("words", "plain"),
        [
            ({"size": 3}, True),
            ({"size": 100}, True),
            ({"size": 101}, False),
            ({"size": (1 << 64) - 1}, False),
            ({"size": 1 << 63}, False),
            ({"what": PLAIN + 1}, False),
            ({"what": 0}, False),
            ({"what": PLAIN | 1 << 63}, False),
            ({"seq": 1}, False),
            ({"seq": (1 << 64) - 1}, False),
        ],
    )
    def test_what_the_header_says(self, new_pair: NewPair, words: dict[str, int], plain: bool) -> None:
        pair = new_pair(inline_bytes=100)
        pair.writer.put(b"abc")
        rewrite(pair, **words)
        for call in (pair.reader.take, pair.reader.receive, lambda: pair.reader.take_many(3)):
            if not plain:
                elsewhere = pair.cores.module.SLOW_PATH
                assert call() == ([] if call not in (pair.reader.take, pair.reader.receive) else elsewhere)
                assert (pair.reader.seq, pair.reader.ready()) == (0, True), "it is still there"
        if plain:
            assert pair.reader.take() == (b"abc" + bytes(97))[: words["size"]]

    @pytest.mark.parametrize(("size", "plain"), [(COPY_MAX, True), (COPY_MAX + 1, False)])
    def test_large_ones_are_for_the_caller(self, new_pair: NewPair, size: int, plain: bool) -> None:
        pair = new_pair(1, 2, 2 * COPY_MAX)
        pair.reader.bind(bytes, PLAIN, False, None)  # what is not decoded may have any size
        message = b"z" * size
        assert pair.writer.put(message)
        assert pair.reader.take() == (message if plain else pair.cores.module.SLOW_PATH)
        if not plain:
            assert pair.reader.take_many(2) == []

    def test_a_message_that_cannot_be_decoded_is_finished_with(self, new_pair: NewPair) -> None:
        pair = new_pair(raw=False)
        pair.writer.put(b"\xff")
        pair.writer.put(b"good")
        with pytest.raises(UnicodeDecodeError):
            pair.reader.take()
        assert pair.reader.receive() == "good"

    def test_decoding_that_takes_closes_and_binds(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.put(b"1")

        def code(message: bytes) -> object:
            with pytest.raises(RuntimeError, match="in use"):
                pair.reader.take()
            with pytest.raises(BufferError, match="in use"):
                pair.reader.close()
            pair.reader.bind(bytes, 1, False, None)
            return message

        pair.reader.bind(code, PLAIN, False, None)
        assert pair.reader.take() == b"1"
        assert pair.reader.take() is pair.cores.module.EMPTY

    @pytest.mark.parametrize("way", ["take", "receive", "receive_into", "take_many"])
    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, TimeoutError])
    def test_what_interrupts_decoding_takes_nothing(
        self, new_pair: NewPair, way: str, error: type[BaseException]
    ) -> None:
        pair = new_pair()
        pair.writer.put(b"1")
        decoded: list[bytes] = []

        def handle(_number: int, _frame: object) -> None:
            raise error

        def code(message: bytes) -> object:
            decoded.append(message)
            if len(decoded) == 1:
                signal.raise_signal(signal.SIGUSR1)
            return message

        def receive() -> object:
            decoded.clear()
            if way == "receive_into":
                received: list[Any] = []
                pair.reader.receive_into(received)
                return received[0]
            return pair.reader.take_many(1)[0] if way == "take_many" else getattr(pair.reader, way)()

        before = signal.signal(signal.SIGUSR1, handle)
        try:
            pair.reader.bind(code, PLAIN, False, None)
            for _ in range(3):
                with pytest.raises(error):
                    receive()
                assert pair.reader.seq == 0
                assert not pair.reader.damaged
        finally:
            signal.signal(signal.SIGUSR1, before)
        pair.reader.bind(decode, PLAIN, True, None)
        assert receive() == b"1"

    def test_receive_into_appends_whatever_the_gate_says(self, new_pair: NewPair) -> None:
        pair, received = new_pair(1, 4), [b"earlier"]
        pair.reader.open = False
        assert pair.reader.receive_into(received) is pair.cores.module.EMPTY
        pair.writer.put(b"1")
        assert pair.reader.receive_into(received) is None
        assert (received, pair.reader.seq) == ([b"earlier", b"1"], 1)
        for wrong in (None, (), "x"):
            with pytest.raises(TypeError):
                pair.reader.receive_into(wrong)

    def test_damage_is_told(self, new_pair: NewPair) -> None:
        pair = new_pair(raw=False)
        pair.writer.put(b"\xff")
        assert not pair.reader.damaged
        with pytest.raises(UnicodeDecodeError):
            pair.reader.receive_into([])
        assert pair.reader.damaged
        assert pair.reader.seq == 1


class TestTakeMany:
    @pytest.mark.parametrize(("most", "amount"), [(0, 0), (-1, 0), (-(1 << 40), 0), (1, 1), (3, 3), (9, 4)])
    def test_at_most(self, new_pair: NewPair, most: int, amount: int) -> None:
        pair = new_pair(1, 4)
        pair.writer.put_many([b"%d" % number for number in range(4)], 0)
        assert pair.reader.take_many(most) == [b"%d" % number for number in range(amount)]
        assert pair.reader.seq == amount

    def test_an_error_after_the_first_is_the_next_calls(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 4, raw=False)
        pair.writer.put_many([b"a", b"\xff", b"c"], 0)
        assert pair.reader.take_many(9) == ["a"]
        with pytest.raises(UnicodeDecodeError):
            pair.reader.take_many(9)
        assert pair.reader.take_many(9) == ["c"]

    @pytest.mark.parametrize("first", [True, False])
    def test_an_exit_is_raised_at_once(self, new_pair: NewPair, first: bool) -> None:
        pair = new_pair(1, 4)
        pair.writer.put_many([b"exit", b"b"] if first else [b"a", b"exit"], 0)

        def code(message: bytes) -> bytes:
            if message == b"exit":
                raise KeyboardInterrupt
            return message

        pair.reader.bind(code, PLAIN, False, None)
        with pytest.raises(KeyboardInterrupt):
            pair.reader.take_many(9)
        pair.reader.bind(bytes, PLAIN, True, None)
        assert pair.reader.take_many(9) == ([b"exit", b"b"] if first else [b"exit"])

    def test_ends_before_what_is_not_ordinary(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 4)
        pair.writer.put(b"a")
        pair.writer.bind(bytes, PLAIN + 1, True, None)
        pair.writer.put(b"other")
        assert [pair.reader.take_many(9), pair.reader.take_many(9)] == [[b"a"], []]
        assert pair.reader.take() is pair.cores.module.SLOW_PATH

    def test_ends_with_the_turn(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 64)
        pair.writer.put_many([b"x"] * 64, 0)
        pair.reader.budget_ends_ns = monotonic_ns()
        assert len(pair.reader.take_many(64)) == 8
        assert pair.reader.budget == 0

    def test_nothing_but_looking_is_possible_from_inside(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 4)
        pair.writer.put_many([b"1", b"2"], 0)
        reader, refused = pair.reader, []

        def code(message: bytes) -> bytes:
            for call in (
                reader.take,
                reader.peek,
                reader.release,
                reader.skip,
                lambda: reader.give_back(0),
                lambda: reader.take_many(1),
            ):
                with pytest.raises(RuntimeError, match="in use"):
                    call()
                refused.append(call)
            with pytest.raises(BufferError):
                reader.close()
            assert reader.receive() is pair.cores.module.EMPTY
            assert (reader.passes(), reader.ready()) == (False, True)
            return message

        reader.bind(code, PLAIN, False, None)
        assert reader.take_many(9) == [b"1", b"2"]
        assert len(refused) == 12
        reader.bind(decode, PLAIN, True, None)
        assert reader.take() is pair.cores.module.EMPTY


class TestTelling:
    def test_of_a_parked_reader(self, new_pair: NewPair) -> None:
        pair, notes = new_pair(20, 9), Notes()
        pair.writer.bind(bytes, PLAIN, True, notes.noting("parked"))
        for reader in range(20):
            pair.writer.send(b"")
            assert notes == []
            pair.ring.view[192 + reader] = 1
            assert pair.writer.free()
            assert pair.writer.send(b"") is None
            assert notes == ["parked"]
            pair.ring.view[192 + reader] = 0
            notes.clear()
            for each in pair.readers:
                each.take_many(9)

    def test_a_parked_flag_of_an_evicted_last_reader_wakes_nobody(self, new_pair: NewPair) -> None:
        pair = new_pair(2)
        pair.writer.evict(1)
        for place, parked in ((1, False), (0, True)):
            pair.ring.view[at.READERS_PARKED + place] = 1
            pair.writer.claim()
            assert pair.writer.commit() is parked

    def test_of_a_parked_writer(self, new_pair: NewPair) -> None:
        pair, notes = new_pair(1, 4), Notes()
        pair.reader.bind(bytes, PLAIN, True, notes.noting("parked"))
        pair.writer.put_many([b"x"] * 4, 0)
        pair.reader.take()
        assert notes == []
        pair.ring.view[128] = 1
        pair.reader.take()
        pair.reader.receive()
        pair.reader.take_many(9)
        assert notes == ["parked"] * 3
        pair.writer.put(b"x")
        assert pair.reader.release() is True
        assert notes == ["parked"] * 3, "release only says so"

    @pytest.mark.parametrize("error", [OSError("the bell is gone"), KeyboardInterrupt()])
    def test_that_fails_is_reported_and_loses_nothing(
        self, new_pair: NewPair, error: BaseException, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pair = new_pair(1, 4)
        reported: list[BaseException | None] = []
        monkeypatch.setattr(sys, "unraisablehook", lambda args: reported.append(args.exc_value))
        pair.ring.view[128] = pair.ring.view[192] = 1
        for core in (pair.writer, pair.reader):
            core.bind(decode, PLAIN, True, raising(error))
        assert pair.writer.send(b"1") is None
        assert pair.writer.put(b"2") is True
        assert pair.writer.put_many([b"3"], 0) == 1
        assert [pair.reader.take(), pair.reader.receive(), pair.reader.take_many(3)] == [b"1", b"2", [b"3"]]
        assert [str(each) for each in reported] == [str(error)] * 6

    def test_that_unbinds_and_closes(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 4)
        pair.ring.view[128] = pair.ring.view[192] = 1
        for core in (pair.writer, pair.reader):

            def parked(core: Any = core) -> None:
                core.bind(decode, PLAIN, True, None)
                core.close()

            core.bind(decode, PLAIN, True, parked)
            del parked
        assert pair.writer.send(b"1") is None
        assert pair.reader.receive() == b"1"
