"""put, take, batches and their answers. One class for every kind of core."""

from __future__ import annotations

import asyncio
import signal
import struct
import sys
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

import pytest
from pairs_of_cores import PLAIN, NewPair, Notes, Pair, decode, raising

from aioshm.ring import layout as at

COPY_MAX = 65536


def rewrite(pair: Pair, what: int = PLAIN, seq: int = 0, size: int = 0) -> None:
    struct.pack_into("<4Q", pair.slots[0].header, 0, what, seq, 1, size)


class TestPutMany:
    @pytest.mark.parametrize(
        ("messages", "start", "sent"),
        [
            ([], 0, []),
            ([b"a"], 1 << 40, []),
            ([b"a", None, b"c"], 1, []),
            ([b"a", bytearray(b"b")], 0, [b"a"]),
            ([b"a", b"b" * 101, b"c"], 0, [b"a"]),
            ([b"%d" % number for number in range(9)], 1, [b"1", b"2", b"3", b"4"]),
        ],
    )
    def test_batch_ends_where_a_message_is_not_ordinary_or_finds_no_room(
        self, new_pair: NewPair, messages: list[Any], start: int, sent: list[bytes]
    ) -> None:
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


def receive_into(reader: Any) -> object:
    received: list[object] = []
    reader.receive_into(received)
    return received[0]


WAYS: dict[str, Callable[[Any], object]] = {
    "take": lambda reader: reader.take(),
    "receive": lambda reader: reader.receive(),
    "receive_into": receive_into,
    "take_many": lambda reader: reader.take_many(1)[0],
}


class TestTake:
    @pytest.mark.parametrize(
        ("words", "plain"),
        [
            ({"size": 3}, True),
            ({"size": 100}, True),
            ({"size": 101}, False),
            ({"size": (1 << 64) - 1}, False),
            ({"what": PLAIN | 1 << 63}, False),
            ({"seq": (1 << 64) - 1}, False),
        ],
    )
    def test_what_the_header_says(self, new_pair: NewPair, words: dict[str, int], plain: bool) -> None:
        pair = new_pair(inline_bytes=100)
        pair.writer.put(b"abc")
        rewrite(pair, **words)
        if plain:
            assert pair.reader.take() == (b"abc" + bytes(97))[: words["size"]]
            return
        assert pair.reader.take() is pair.reader.receive() is pair.cores.module.SLOW_PATH
        assert pair.reader.take_many(3) == []
        assert (pair.reader.seq, pair.reader.ready()) == (0, True), "it is still there"

    @pytest.mark.parametrize(("size", "plain"), [(COPY_MAX, True), (COPY_MAX + 1, False)])
    def test_large_ones_are_for_the_caller(self, new_pair: NewPair, size: int, plain: bool) -> None:
        pair = new_pair(1, 2, 2 * COPY_MAX)
        pair.reader.bind(bytes, PLAIN, False, None)  # what is not decoded may have any size
        message = b"z" * size
        assert pair.writer.put(message)
        assert pair.reader.take() == (message if plain else pair.cores.module.SLOW_PATH)
        if not plain:
            assert pair.reader.take_many(2) == []

    @pytest.mark.parametrize("take", WAYS.values(), ids=WAYS)
    @pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
    def test_what_interrupts_decoding_takes_nothing(
        self, new_pair: NewPair, take: Callable[[Any], object], error: type[BaseException]
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

        before = signal.signal(signal.SIGUSR1, handle)
        try:
            pair.reader.bind(code, PLAIN, False, None)
            with pytest.raises(error):
                take(pair.reader)
            assert (pair.reader.seq, pair.reader.damaged) == (0, False)
        finally:
            signal.signal(signal.SIGUSR1, before)
        pair.reader.bind(decode, PLAIN, True, None)
        assert take(pair.reader) == b"1"

    def test_receive_into_appends_also_where_the_end_is_shut(self, new_pair: NewPair) -> None:
        pair, received = new_pair(), [b"earlier"]
        pair.reader.open = False
        assert pair.reader.receive_into(received) is pair.cores.module.EMPTY
        pair.writer.put(b"1")
        assert pair.reader.receive_into(received) is None
        assert received == [b"earlier", b"1"]
        for wrong in (None, ()):
            with pytest.raises(TypeError):
                pair.reader.receive_into(wrong)

    def test_message_that_cannot_be_decoded_is_finished_with_and_damaged(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 4, raw=False)
        pair.writer.put_many([b"\xff", b"\xff", b"0", b"good"], 0)
        assert not pair.reader.damaged
        for call in (pair.reader.take, lambda: pair.reader.receive_into([])):
            with pytest.raises(UnicodeDecodeError):
                call()
            assert pair.reader.damaged
        pair.reader.bind(raising(asyncio.CancelledError()), PLAIN, False, None)
        with pytest.raises(RuntimeError, match=r"^CancelledError\(\)$"):
            pair.reader.take()
        assert pair.reader.damaged
        pair.reader.bind(decode, PLAIN, False, None)
        assert pair.reader.receive() == "good"


class TestTakeMany:
    def test_an_error_after_the_first_is_the_next_calls(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 4, raw=False)
        pair.writer.put_many([b"a", b"\xff", b"c"], 0)
        assert pair.reader.take_many(9) == ["a"]
        with pytest.raises(UnicodeDecodeError):
            pair.reader.take_many(9)
        assert pair.reader.take_many(9) == ["c"]

    def test_an_exit_is_raised_at_once(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 4)
        pair.writer.put_many([b"a", b"exit"], 0)

        def code(message: bytes) -> bytes:
            if message == b"exit":
                raise KeyboardInterrupt
            return message

        pair.reader.bind(code, PLAIN, False, None)
        with pytest.raises(KeyboardInterrupt):
            pair.reader.take_many(9)
        pair.reader.bind(bytes, PLAIN, True, None)
        assert pair.reader.take_many(9) == [b"exit"]

    def test_batch_ends_at_most_so_many_before_a_special_message_and_with_the_budget(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 64)
        pair.writer.put_many([b"a"] * 30, 0)
        pair.writer.bind(bytes, PLAIN + 1, True, None)
        pair.writer.put(b"other")
        assert pair.reader.take_many(-1) == pair.reader.take_many(0) == []
        assert pair.reader.take_many(2) == [b"a"] * 2
        pair.reader.budget_ends_ns = monotonic_ns()
        assert len(pair.reader.take_many(64)) == 8
        assert pair.reader.budget == 0
        pair.reader.budget_ends_ns = 1 << 62
        assert [len(pair.reader.take_many(64)), pair.reader.take_many(9)] == [20, []]
        assert pair.reader.take() is pair.cores.module.SLOW_PATH

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
            reader.bind(code, PLAIN, False, None)
            return message

        reader.bind(code, PLAIN, False, None)
        assert reader.take_many(9) == [b"1", b"2"]
        assert len(refused) == 12
        reader.bind(decode, PLAIN, True, None)
        assert reader.take() is pair.cores.module.EMPTY


class TestOutOfBand:
    def test_the_writer_has_its_slot_filled_and_publishes(self, new_pair: NewPair) -> None:
        pair = new_pair()

        def fill(begin: int, message: Any, seq: int) -> bool:
            if message == ["no"]:
                return False
            struct.pack_into("<4Q", pair.slots.bodies, begin, PLAIN, seq, 5, 1)
            pair.slots.body(begin)[:1] = message[0]
            return True

        assert pair.writer.send([b"x"]) == [b"x"], "nothing does that"
        pair.writer.bind_out_of_band(fill, len)
        assert pair.writer.send([b"x"]) is None
        assert pair.writer.send(["no"]) == ["no"]
        assert (pair.writer.seq, pair.writer.published_ns) == (1, 5)
        assert pair.reader.take() == b"x"
        pair.writer.bind_out_of_band(None)
        assert pair.writer.send([b"x"]) == [b"x"]

    def test_a_chunk_is_taken_where_it_does_not_fit_the_slot(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 2, 100, slots=4, inline_bytes=16)
        sizes = []

        def fill(begin: int, message: Any, seq: int) -> bool:
            sizes.append((pair.slots.chunk(begin) is not None, len(pair.slots.body(begin))))
            struct.pack_into("<4Q", pair.slots.bodies, begin, PLAIN, seq, 5, message[0])
            pair.slots.body(begin)[: message[0]] = b"z" * message[0]
            return True

        pair.writer.bind_out_of_band(fill, lambda message: message[0])
        for nbytes in (16, 17, 100):
            assert pair.writer.send([nbytes]) is None
        assert sizes == [(False, 16), (True, 100), (True, 100)]
        assert pair.writer.send([17]) == [17], "no chunk is free"
        assert [len(pair.reader.take()) for _ in range(2)] == [16, 17]
        assert pair.writer.send([101]) == [101], "it does not fit a chunk"
        assert pair.writer.send([100]) is None
        with pytest.raises((OverflowError, TypeError)):
            pair.writer.send([-1])

    def test_filling_fails(self, new_pair: NewPair) -> None:
        pair = new_pair()

        def fail(*_: Any) -> bool:
            with pytest.raises((RuntimeError, BufferError)):
                pair.writer.commit()
            with pytest.raises(BufferError):
                pair.writer.close()
            raise ZeroDivisionError

        for measure in (len, lambda _: 1 // 0):
            pair.writer.bind_out_of_band(fail, measure)
            with pytest.raises(ZeroDivisionError):
                pair.writer.send([1])
            assert (pair.writer.seq, pair.reader.ready()) == (0, False)
        assert pair.writer.send(b"next") is None
        assert pair.reader.take() == b"next"

    @pytest.mark.parametrize(("error", "left"), [(ValueError, False), (KeyboardInterrupt, True)])
    def test_decoding_fails(self, new_pair: NewPair, error: type[BaseException], left: bool) -> None:
        pair = new_pair()

        def fail(_: Any) -> None:
            raise error

        pair.reader.bind_out_of_band(fail)
        pair.writer.put(b"bad")
        struct.pack_into("<Q", pair.slots[0].header, 0, PLAIN + 1)  # none that the core decodes itself
        pair.writer.put(b"good")
        with pytest.raises(error):
            pair.reader.take()
        assert pair.reader.seq == (0 if left else 1)
        if left:
            pair.reader.bind_out_of_band(lambda begin: ("decoded", bytes(pair.slots.body(begin)[:1])))
            assert pair.reader.take() == ("decoded", b"b")
        pair.reader.bind_out_of_band(None)
        assert pair.reader.take() == b"good"


class TestWaking:
    def test_each_parked_reader_is_woken_once_per_message(self, new_pair: NewPair) -> None:
        pair, notes = new_pair(20, 9), Notes()
        pair.writer.bind(bytes, PLAIN, True, notes.noting("parked"))
        for reader in (0, 7, 8, 19):
            pair.writer.send(b"")
            assert notes == []
            pair.ring.view[at.READERS_PARKED + reader] = 1
            assert pair.writer.send(b"") is None
            assert notes == ["parked"]
            pair.ring.view[at.READERS_PARKED + reader] = 0
            notes.clear()

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
