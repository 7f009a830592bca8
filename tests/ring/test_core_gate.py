"""send and receive: who may pass, and what becomes of a message that cannot. One class for every kind of core."""

from __future__ import annotations

from threading import get_ident
from time import monotonic_ns
from typing import Any

import pytest
from pairs_of_cores import PLAIN, NewPair, Pair, in_a_thread, raising

from aioshm.process.loop_thread import ProcessLock


class TestSharedLock:
    """An end that threads share acquires their lock for each message."""

    @pytest.fixture
    def pair(self, new_pair: NewPair) -> Pair:
        return new_pair(raw=False)

    @pytest.fixture
    def lock(self, pair: Pair) -> ProcessLock:
        lock = ProcessLock(1)
        pair.writer.share(lock)
        pair.reader.share(lock)
        return lock

    def test_end_is_of_any_thread_and_another_threads_lock_lets_nothing_pass(
        self, pair: Pair, lock: ProcessLock
    ) -> None:
        assert in_a_thread(pair.writer.passes) is in_a_thread(pair.reader.passes) is True
        received: list[Any] = []
        lock.owner = get_ident() + 1
        assert pair.writer.send(b"1") is False
        assert pair.reader.receive_next(received) is pair.cores.module.EMPTY
        assert lock.owner == get_ident() + 1
        lock.owner = 0
        assert pair.writer.send(b"1") is None
        assert pair.reader.receive_next(received) is None
        assert (received, lock.owner) == (["1"], 0)
        pair.writer.put(b"2")
        pair.reader.open = False
        assert pair.reader.receive_next(received) is pair.cores.module.EMPTY

    @pytest.mark.parametrize("own", [False, True])
    def test_lock_goes_to_the_next_owner_unless_this_thread_had_it(
        self, pair: Pair, lock: ProcessLock, own: bool
    ) -> None:
        users: list[int] = []

        def code(message: Any) -> Any:
            users.append(lock.owner)
            return message

        for core, call in (
            (pair.writer, lambda: pair.writer.send(b"1")),
            (pair.reader, lambda: pair.reader.receive_next([])),
        ):
            core.bind(code, PLAIN, False, None)
            lock.owner = get_ident() if own else 0
            lock.next_owner = 7
            assert call() is None
            assert lock.owner == (get_ident() if own else 7)
        assert users == [get_ident()] * 2

    def test_lock_is_released_where_a_codec_raises(self, pair: Pair, lock: ProcessLock) -> None:
        pair.writer.put(b"1")
        for core, call in (
            (pair.writer, lambda: pair.writer.send(b"2")),
            (pair.reader, lambda: pair.reader.receive_next([])),
        ):
            core.bind(raising(EOFError()), PLAIN, False, None)
            with pytest.raises(EOFError):
                call()
            assert lock.owner == 0


class TestGate:
    def test_a_new_core_is_shut(self, new_pair: NewPair) -> None:
        pair = new_pair()
        for core in (
            pair.cores.writer(pair.ring.layout, pair.ring.view),
            pair.cores.reader(pair.ring.layout, pair.ring.view, 0),
        ):
            assert (core.open, core.budget, core.budget_ends_ns, core.spin_ns, core.seq) == (False, 0, 0, 0, 0)
            core.open, core.budget = True, 1
            assert core.passes() is False, "it belongs to nobody"
            core.belong(None)
            assert core.passes() is True
            core.close()

    def test_shut_it_does_nothing(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.put(b"there")
        before = bytes(pair.ring.view)
        pair.writer.open = pair.reader.open = False
        pair.writer.bind(raising(AssertionError()), 1, False, None)
        assert pair.writer.send("x") is False
        assert pair.reader.receive() is pair.cores.module.EMPTY
        assert bytes(pair.ring.view) == before

    def test_each_message_takes_of_the_budget_which_time_ends_too(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.budget = pair.reader.budget = 2
        assert [pair.writer.send(b"%d" % number) for number in range(3)] == [None, None, False]
        assert [pair.reader.receive() for _ in range(3)] == [b"0", b"1", pair.cores.module.EMPTY]
        assert (pair.writer.budget, pair.reader.budget) == (0, 0)
        assert pair.writer.put(b"x"), "not gated"
        assert pair.reader.take() == b"x"
        assert (pair.writer.budget, pair.reader.budget) == (0, 0)
        pair.writer.budget = pair.reader.budget = 9
        pair.writer.budget_ends_ns = pair.reader.budget_ends_ns = monotonic_ns()
        assert [pair.writer.send(b""), pair.writer.send(b"")] == [None, False]
        assert pair.reader.receive() == b""
        assert (pair.writer.budget, pair.reader.budget) == (0, 0)


class TestSend:
    def test_raw_bytes_are_sent_unencoded_and_other_memory_is_encoded(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.bind(raising(AssertionError()), PLAIN, True, None)
        assert pair.writer.send(b"message") is None
        assert pair.reader.receive() == b"message"
        with pytest.raises(AssertionError):
            pair.writer.send("no bytes")
        pair.writer.bind(bytes, PLAIN, True, None)
        kinds: list[Any] = [bytearray, memoryview, type("Bytes", (bytes,), {})]
        for kind in kinds:
            assert pair.writer.send(kind(b"message")) is None
            assert pair.reader.receive() == b"message"
        assert pair.writer.send(bytearray(101)) == bytes(101), "too large"

    @pytest.mark.parametrize("result", [None, 0, bytearray(b"x"), (b"x",), b"y" * 101, b"y" * 65537])
    def test_result_of_encoding_comes_back_where_it_is_not_sent(self, new_pair: NewPair, result: object) -> None:
        pair = new_pair()
        before = bytes(pair.ring.view)
        pair.writer.bind(lambda obj: result, 7, False, None)
        assert pair.writer.send("x") is result
        assert bytes(pair.ring.view) == before
        for error in (ValueError("code"), KeyboardInterrupt()):
            pair.writer.bind(raising(error), 7, False, None)
            with pytest.raises(type(error)):
                pair.writer.send("x")
        assert (pair.writer.seq, pair.reader.ready()) == (0, False)

    def test_encoding_that_sends(self, new_pair: NewPair) -> None:
        pair = new_pair()

        def code(obj: Any) -> bytes:
            if obj:
                assert pair.writer.send(obj - 1) is None
            return b"%d" % obj

        pair.writer.bind(code, 7, False, None)
        assert pair.writer.send(2) is None
        assert [pair.reader.take() for _ in range(3)] == [b"0", b"1", b"2"]

    def test_the_header_of_a_message(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.bind(bytes, (1 << 64) - 1, True, None)
        for number in range(5):
            before = monotonic_ns()
            assert pair.writer.send(b"x" * number) is None
            words = pair.slots[number % 3].header.cast("Q")
            assert (words[0], words[1], words[3]) == ((1 << 64) - 1, number, number)
            assert before <= words[2] == pair.writer.published_ns <= monotonic_ns()
            words.release()
            pair.reader.bind(bytes, (1 << 64) - 1, True, None)
            assert pair.reader.receive() == b"x" * number
            assert pair.reader.published_ns == pair.writer.published_ns
