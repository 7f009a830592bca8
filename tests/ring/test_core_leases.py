"""Messages with buffers beside them, and leases, in both cores."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from pairs_of_cores import PLAIN, NewPair, Notes, Pair, in_a_thread, open_gate


class Leasing(Notes):
    """Binds a reader's leases; notes what it is asked for."""

    def __init__(self, pair: Pair, code: Callable[[bytes], Any] = bytes.decode, **other: Any) -> None:
        self.core = pair.reader
        self.core.bind(code, PLAIN, False, None)
        self.elsewhere = pair.cores.module.ELSEWHERE
        calls: dict[str, Any] = {
            "show_beside": self.show_beside,
            "end_shown": self.end_shown,
            "open_slowly": self.noting("open"),
            "close_slowly": lambda *error: self.append(f"close {len(error)}"),
            "await_next": None,
            "whose": None,
            "fail": self.fail,
            **other,
        }
        self.core.bind_leases(*calls.values())

    def show_beside(self, begin: int) -> Any:
        self.append("beside")
        self.core.shown = True
        return begin

    def end_shown(self) -> None:
        self.append("end")
        self.core.shown = False
        self.core.release()

    def fail(self, error: Exception) -> None:
        raise ArithmeticError("seen from outside") from error


def beside(pair: Pair) -> None:
    """Make the next message of the reader none that the core decodes itself."""
    struct.pack_into("<Q", pair.slots[pair.reader.seq % len(pair.slots)].header, 0, PLAIN + 1)


class TestBeside:
    def test_the_writer_has_its_slot_filled_and_publishes(self, new_pair: NewPair) -> None:
        pair = new_pair()

        def fill(begin: int, message: Any, seq: int) -> bool:
            if message == ["no"]:
                return False
            struct.pack_into("<4Q", pair.slots.bodies, begin, PLAIN, seq, 5, 1)
            pair.slots.body(begin)[:1] = message[0]
            return True

        assert pair.writer.send([b"x"]) == [b"x"], "nothing does that"
        pair.writer.bind_beside(fill, len)
        assert pair.writer.send([b"x"]) is None
        assert pair.writer.send(["no"]) == ["no"]
        assert (pair.writer.seq, pair.writer.published_ns) == (1, 5)
        assert pair.reader.take() == b"x"
        pair.writer.bind_beside(None)
        assert pair.writer.send([b"x"]) == [b"x"]

    def test_there_is_no_slot(self, new_pair: NewPair) -> None:
        pair, notes = new_pair(1, 2), Notes()
        pair.writer.bind_beside(lambda *_: notes.append("called"), len)
        assert [pair.writer.send(b"x"), pair.writer.send(b"x")] == [None, None]
        assert pair.writer.send([1]) == [1]
        assert notes == []

    def test_a_chunk_is_taken_where_it_does_not_fit_the_slot(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 2, 100, slots=4, inline_bytes=16)
        sizes = []

        def fill(begin: int, message: Any, seq: int) -> bool:
            sizes.append((pair.slots.chunk(begin) is not None, len(pair.slots.body(begin))))
            struct.pack_into("<4Q", pair.slots.bodies, begin, PLAIN, seq, 5, message[0])
            pair.slots.body(begin)[: message[0]] = b"z" * message[0]
            return True

        pair.writer.bind_beside(fill, lambda message: message[0])
        for nbytes in (16, 17, 100):
            assert pair.writer.send([nbytes]) is None
        assert sizes == [(False, 16), (True, 100), (True, 100)]
        assert pair.writer.send([17]) == [17], "no chunk is free"
        assert [len(pair.reader.take()) for _ in range(2)] == [16, 17]
        assert pair.writer.send([101]) == [101], "it does not fit a chunk"
        assert pair.writer.send([100]) is None
        with pytest.raises((OverflowError, TypeError)):
            pair.writer.send([-1])

    def test_measuring_fails(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.bind_beside(lambda *_: True, lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            pair.writer.send([1])
        assert (pair.writer.seq, pair.writer.send(b"next")) == (0, None)

    def test_filling_fails(self, new_pair: NewPair) -> None:
        pair = new_pair()

        def fail(*_: Any) -> bool:
            with pytest.raises((RuntimeError, BufferError)):
                pair.writer.commit()
            with pytest.raises(BufferError):
                pair.writer.close()
            raise ZeroDivisionError

        pair.writer.bind_beside(fail, len)
        with pytest.raises(ZeroDivisionError):
            pair.writer.send([1])
        assert (pair.writer.seq, pair.reader.ready()) == (0, False)
        assert pair.writer.send(b"next") is None
        assert pair.reader.take() == b"next"

    def test_the_reader_has_its_message_decoded_and_releases(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 2)
        pair.reader.bind_beside(lambda begin: ("decoded", bytes(pair.slots.body(begin)[:1])))
        for number in range(5):
            pair.writer.put(b"%d" % number)
            beside(pair)
            assert pair.reader.receive() == ("decoded", b"%d" % number)
        assert pair.reader.seq == 5

    @pytest.mark.parametrize(("error", "left"), [(ValueError, False), (KeyboardInterrupt, True)])
    def test_decoding_fails(self, new_pair: NewPair, error: type[BaseException], left: bool) -> None:
        pair = new_pair()

        def fail(_: Any) -> None:
            raise error

        pair.reader.bind_beside(fail)
        pair.writer.put(b"bad")
        beside(pair)
        pair.writer.put(b"good")
        with pytest.raises(error):
            pair.reader.take()
        assert pair.reader.seq == (0 if left else 1)
        pair.reader.bind_beside(None)
        assert pair.reader.take() == (pair.cores.module.ELSEWHERE if left else b"good")


class TestLeases:
    def test_the_message_stays_until_the_block_ends(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 2)
        leasing = Leasing(pair)
        for number in range(5):
            pair.writer.put(b"%d" % number)
            with pair.reader as obj:
                assert obj == str(number)
                assert (pair.reader.leased, pair.reader.seq, pair.reader.passes()) == (True, number, False)
                assert pair.reader.receive() is pair.cores.module.NOTHING
            assert (pair.reader.leased, pair.reader.seq) == (False, number + 1)
        assert leasing == []

    def test_awaited(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.reader.belong(lambda: True)
        pair.reader.open, pair.reader.turn = True, 1 << 30
        leasing = Leasing(pair, whose=lambda: leasing)

        async def lease() -> Any:
            async with pair.reader as obj:
                assert pair.reader.holder == id(leasing)
                return obj

        for text in ("a", "b"):
            pair.writer.put(text.encode())
            assert asyncio.run(lease()) == text
        pair.writer.put(b"c")
        entered = pair.reader.__aenter__()
        assert [*_finished(entered)] == ["c"]
        assert pair.reader.__aexit__(None, None, None) is not None
        assert pair.reader.seq == 3

    def test_what_is_seen_where_it_lies_ends_with_a_call(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.reader.belong(lambda: True)
        leasing = Leasing(pair)
        pair.writer.put(b"x")
        beside(pair)
        assert [*_finished(pair.reader.__aenter__())] == [pair.slots.begin(0)]
        assert pair.reader.leased
        pair.reader.__aexit__(None, None, None)
        assert leasing == ["beside", "end"]
        assert (pair.reader.leased, pair.reader.shown, pair.reader.seq) == (False, False, 1)

    def test_where_calls_block_that_end_is_the_callers(self, new_pair: NewPair) -> None:
        pair = new_pair()
        leasing = Leasing(pair)
        pair.writer.put(b"x")
        beside(pair)
        with pair.reader as obj:
            assert obj == pair.slots.begin(0)
        assert leasing == ["beside", "close 3"]
        pair.reader.unlease()
        assert (leasing[-1], pair.reader.leased, pair.reader.seq, pair.reader.user) == ("end", False, 1, 0)

    def test_an_undelivered_message_comes_first(self, new_pair: NewPair) -> None:
        pair, undelivered = new_pair(1, 2), ["earlier"]
        leasing = Leasing(pair, open_slowly=lambda: nullcontext(undelivered.pop()), await_next=lambda: 1 // 0)
        pair.reader.bind_undelivered(undelivered)
        pair.writer.put(b"x")
        with pair.reader as obj:
            assert (obj, pair.reader.leased, pair.reader.seq) == ("earlier", False, 0)
        with pair.reader as obj:
            assert obj == "x"
        assert (leasing, undelivered, pair.reader.seq) == ([], [], 1)

    def test_an_adopted_lease_ends_with_a_call(self, new_pair: NewPair) -> None:
        pair = new_pair()
        leasing = Leasing(pair)
        assert pair.reader.adopt() is False
        pair.writer.put(b"x")
        with pair.reader:
            assert in_a_thread(pair.reader.adopt) is True
            assert pair.reader.adopt() is False
        assert (leasing, pair.reader.leased, pair.reader.seq) == (["close 3"], True, 0)
        pair.reader.unlease()
        assert (pair.reader.leased, pair.reader.seq) == (False, 1)

    def test_where_nothing_is_there_another_block_is_opened(self, new_pair: NewPair) -> None:
        pair = new_pair()
        block = _Block()
        leasing = Leasing(pair, open_slowly=lambda: block)
        with pair.reader as obj:
            assert obj == "opened"
        assert block == ["enter", "exit None"]
        with pytest.raises(ZeroDivisionError), pair.reader:
            raise ZeroDivisionError
        assert block[2:] == ["enter", "exit ZeroDivisionError"]
        assert leasing == []

    def test_it_waits_first_where_calls_block(self, new_pair: NewPair) -> None:
        pair = new_pair()

        def await_next() -> bool:
            pair.writer.put(b"late")
            return True

        Leasing(pair, await_next=await_next)
        with pair.reader as obj:
            assert obj == "late"

    def test_a_kept_slot_goes_back_first(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.reader.belong(lambda: True)
        leasing = Leasing(pair)
        pair.writer.put(b"kept")
        pair.writer.put(b"next")
        pair.reader.skip()
        assert pair.reader.kept
        assert pair.reader.receive() is pair.cores.module.NOTHING
        assert not pair.reader.passes()
        assert [*_finished(pair.reader.__aenter__())] == ["next"]
        pair.reader.__aexit__(None, None, None)
        assert leasing == ["end"]
        pair.reader.give_back(0)
        assert not pair.reader.kept

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_what_cannot_be_decoded(self, new_pair: NewPair, error: type[BaseException]) -> None:
        pair = new_pair()

        def code(_: bytes) -> None:
            raise error

        Leasing(pair, code)
        pair.writer.put(b"bad")
        is_damage = issubclass(error, Exception)
        pair.reader.user = 0
        with pytest.raises(ArithmeticError if is_damage else error), pair.reader:
            pytest.fail("it cannot be decoded")
        assert (pair.reader.leased, pair.reader.seq, pair.reader.user) == (False, int(is_damage), 0)

    def test_other_threads_are_kept_out(self, new_pair: NewPair) -> None:
        pair = new_pair()
        Leasing(pair)
        pair.writer.put(b"a")
        pair.writer.put(b"b")
        with pair.reader:
            assert in_a_thread(pair.reader.receive) is pair.cores.module.NOTHING
        assert in_a_thread(pair.reader.receive) == "b"

    def test_unbound_or_shut(self, new_pair: NewPair) -> None:
        pair = new_pair()
        block = _Block()
        assert pair.reader.enter_or(lambda: block) == "opened"
        pair.reader.__exit__(None, None, None)
        Leasing(pair, open_slowly=lambda: block)
        pair.writer.put(b"x")
        pair.reader.open = False
        with pair.reader as obj:
            assert obj == "opened"
        open_gate(pair.reader)
        assert pair.reader.receive() == "x"


class _Block(list[str]):
    def __enter__(self) -> str:
        self.append("enter")
        return "opened"

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.append(f"exit {kind and kind.__name__}")


def _finished(awaitable: Any) -> list[Any]:
    """Return what something gives that need not be waited for."""
    try:
        next(awaitable.__await__())
    except StopIteration as stop:
        return [stop.value]
    raise AssertionError("it waits")


class TestCopied:
    """How many bytes were copied: of what is sent, and of what is leased, but not where it lies."""

    def test_of_a_writer(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 8)
        pair.writer.put(b"12345")
        assert pair.writer.copied == 5
        pair.writer.put_many([b"1", b"23"], 0)
        assert pair.writer.copied == 8
        pair.writer.bind(lambda obj: obj, PLAIN, False, None)
        pair.writer.bind_beside(lambda *_: True, lambda message: 10)
        open_gate(pair.writer)
        pair.writer.send(["beside"])
        assert pair.writer.copied == 18
        pair.writer.copied += 2
        assert pair.writer.copied == 20

    def test_of_a_reader(self, new_pair: NewPair) -> None:
        pair = new_pair()
        leasing = Leasing(pair)
        open_gate(pair.reader)
        for _ in range(3):
            pair.writer.put(b"12345")
        assert pair.reader.receive() == "12345"
        assert pair.reader.copied == 0
        assert pair.reader.lease() == "12345"
        pair.reader.unlease()
        assert pair.reader.copied == 5
        beside(pair)
        pair.reader.lease()
        assert leasing == ["beside"]
        assert pair.reader.copied == 5
        pair.reader.unlease()
