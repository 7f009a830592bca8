"""send and receive: who may pass, and what becomes of a message that cannot. One class for every kind of core."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import Any

import pytest
from pairs_of_cores import PLAIN, NewPair, Notes, in_a_thread, open_gate

from aioshm.process.loop_thread import ProcessLock
from aioshm.ring.reference import ReaderBase, WriterBase


class Truth:
    """Something whose truth value is what it is told, or an error."""

    def __init__(self, value: bool | Exception) -> None:
        self.value = value

    def __bool__(self) -> bool:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*_: object) -> Any:
        raise error

    return call


class TestSharedLock:
    """An end that threads share acquires their lock for each message."""

    def test_lock_held_by_another_thread_lets_nothing_pass(self, new_pair: NewPair) -> None:
        pair = new_pair()
        lock = ProcessLock(1)
        pair.writer.share(lock)
        pair.reader.share(lock)
        received: list[Any] = []
        lock.owner = get_ident() + 1
        assert pair.writer.send(b"1") is False
        assert pair.reader.receive_next(received) is pair.cores.module.EMPTY
        assert lock.owner == get_ident() + 1
        lock.owner = 0
        assert pair.writer.send(b"1") is None
        assert pair.reader.receive_next(received) is None
        assert (received, lock.owner) == ([b"1"], 0)

    def test_lock_goes_to_the_next_owner_after_a_message(self, new_pair: NewPair) -> None:
        pair = new_pair(raw=False)
        lock = ProcessLock(1)
        lock.next_owner = 7
        users: list[int] = []

        def code(message: Any) -> Any:
            users.append(lock.owner)
            return message

        pair.writer.share(lock)
        pair.writer.bind(code, PLAIN, False, None)
        assert pair.writer.send(b"1") is None
        assert (users, lock.owner) == ([get_ident()], 7)
        pair.reader.share(lock)
        pair.reader.bind(code, PLAIN, False, None)
        lock.owner = 0
        assert pair.reader.receive_next([]) is None
        assert (users, lock.owner) == ([get_ident()] * 2, 7)

    def test_lock_of_this_thread_stays_its_own(self, new_pair: NewPair) -> None:
        pair = new_pair()
        lock = ProcessLock(1)
        lock.owner, lock.next_owner = get_ident(), 7
        pair.writer.share(lock)
        pair.reader.share(lock)
        assert pair.writer.send(b"1") is None
        assert pair.reader.receive_next([]) is None
        assert lock.owner == get_ident()

    def test_lock_is_released_where_a_codec_raises(self, new_pair: NewPair) -> None:
        pair = new_pair(raw=False)
        lock = ProcessLock(1)
        pair.writer.share(lock)
        pair.reader.share(lock)
        pair.writer.put(b"1")
        for core in (pair.writer, pair.reader):
            core.bind(raising(EOFError()), PLAIN, False, None)
        with pytest.raises(EOFError):
            pair.writer.send(b"2")
        assert lock.owner == 0
        with pytest.raises(EOFError):
            pair.reader.receive_next([])
        assert lock.owner == 0

    def test_shut_end_receives_nothing(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.reader.share(ProcessLock(1))
        pair.writer.put(b"1")
        pair.reader.open = False
        assert pair.reader.receive_next([]) is pair.cores.module.EMPTY


class TestGate:
    @pytest.fixture(params=["writer", "reader"])
    def core(self, request: pytest.FixtureRequest, new_pair: NewPair) -> Any:
        return getattr(new_pair(), request.param)

    def test_a_new_core_is_shut(self, new_pair: NewPair) -> None:
        pair = new_pair()
        for core in (
            pair.cores.writer(pair.ring.layout, pair.ring.view, pair.slots),
            pair.cores.reader(pair.ring.layout, pair.ring.view, pair.slots, 0),
        ):
            assert (core.open, core.budget, core.budget_ends_ns, core.spin_ns, core.seq) == (False, 0, 0, 0, 0)
            core.open, core.budget = True, 1
            assert core.passes() is False, "it belongs to nobody"
            core.belong(None)
            assert core.passes() is True
            core.close()

    @pytest.mark.parametrize(("budget", "passes"), [(1, True), (0, False), (-1, False), (1 << 40, True)])
    def test_budget(self, core: Any, budget: int, passes: bool) -> None:
        core.budget = budget
        assert core.budget == budget
        assert core.passes() is passes

    def test_shared_end_belongs_to_any_thread(self, core: Any) -> None:
        core.share(ProcessLock(1))
        assert core.passes() is True
        assert in_a_thread(core.passes) is True

    @pytest.mark.parametrize("wrong", [None, 5, b"read-only memory", bytearray(8)])
    def test_lock_without_two_words_is_refused(self, core: Any, wrong: object) -> None:
        if isinstance(core, WriterBase | ReaderBase):
            pytest.skip("the Python reference takes any object with these attributes")
        with pytest.raises((TypeError, BufferError, ValueError)):
            core.share(wrong)

    @pytest.mark.parametrize("value", [True, False, 1, 0, None, "x", [], Truth(True), Truth(False)])
    def test_runs(self, core: Any, value: object) -> None:
        core.belong(lambda: value)
        assert core.passes() is bool(value)

    @pytest.mark.parametrize("runs", [raising(KeyError("runs")), lambda: Truth(KeyError("runs")), raising(EOFError())])
    def test_runs_raises(self, core: Any, runs: Callable[[], object]) -> None:
        core.belong(runs)
        call = (lambda: core.send(b"")) if hasattr(core, "send") else core.receive
        for attempt in (core.passes, call):
            with pytest.raises((KeyError, EOFError)):
                attempt()
        assert core.seq == 0

    def test_runs_closes_the_ring(self, core: Any) -> None:
        core.belong(lambda: core.close() or True)
        with pytest.raises(ValueError, match=r"closed|released"):
            core.send(b"") if hasattr(core, "send") else core.receive()

    def test_runs_replaces_itself(self, core: Any) -> None:
        core.belong(lambda: core.belong(None) or True)
        assert core.passes() is True

    def test_shut_it_does_nothing(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.put(b"there")
        before = bytes(pair.ring.view)
        pair.writer.open = pair.reader.open = False
        calls = Notes()
        pair.writer.bind(lambda obj: calls.append("code"), 1, False, None)
        assert pair.writer.send("x") is False
        assert pair.reader.receive() is pair.cores.module.EMPTY
        assert calls == []
        assert bytes(pair.ring.view) == before

    def test_each_message_takes_of_the_budget(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.budget = pair.reader.budget = 2
        assert [pair.writer.send(b"%d" % number) for number in range(3)] == [None, None, False]
        assert [pair.reader.receive() for _ in range(3)] == [b"0", b"1", pair.cores.module.EMPTY]
        assert (pair.writer.budget, pair.reader.budget) == (0, 0)

    def test_budget_that_is_over_in_time_ends_with_the_next_message(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.budget_ends_ns = pair.reader.budget_ends_ns = monotonic_ns()
        assert [pair.writer.send(b""), pair.writer.send(b"")] == [None, False]
        assert pair.reader.receive() == b""
        assert (pair.writer.budget, pair.reader.budget) == (0, 0)

    def test_what_is_not_gated_leaves_no_negative_budget(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.budget = pair.reader.budget = 0
        assert pair.writer.put(b"x")
        assert pair.reader.take() == b"x"
        assert (pair.writer.budget, pair.reader.budget) == (0, 0)

    def test_closed_and_opened_again_it_still_refuses(self, new_pair: NewPair) -> None:
        pair = new_pair()
        for core, call in ((pair.writer, lambda: pair.writer.send(b"")), (pair.reader, pair.reader.receive)):
            core.close()
            assert core.open is False
            open_gate(core)
            with pytest.raises(ValueError, match=r"closed|released"):
                call()


class TestSend:
    def test_bytes_that_stand_for_themselves(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.bind(raising(AssertionError()), 7, True, None)
        assert pair.writer.send(b"message") is None
        assert pair.reader.receive() == b"message"
        with pytest.raises(AssertionError):
            pair.writer.send("no bytes")

    @pytest.mark.parametrize("kind", [bytearray, memoryview, type("Bytes", (bytes,), {})])
    def test_other_memory_that_stands_for_itself(self, new_pair: NewPair, kind: Callable[[bytes], object]) -> None:
        pair = new_pair()
        pair.writer.bind(bytes, 7, True, None)
        assert pair.writer.send(kind(b"message")) is None
        assert pair.reader.receive() == b"message"
        assert pair.writer.send(kind(bytes(101))) == bytes(101), "encoded, for it is too large"

    def test_encoded(self, new_pair: NewPair) -> None:
        pair = new_pair(raw=False)
        assert pair.writer.send("grüße") is None
        assert pair.reader.receive() == "grüße"

    @pytest.mark.parametrize("result", [None, 0, "text", bytearray(b"x"), (b"x",)])
    def test_what_encoding_returned_comes_back(self, new_pair: NewPair, result: object) -> None:
        pair = new_pair()
        pair.writer.bind(lambda obj: result, 7, False, None)
        assert pair.writer.send("x") is result
        assert pair.writer.seq == 0

    @pytest.mark.parametrize("size", [0, 1, 99, 100])
    def test_what_fits(self, new_pair: NewPair, size: int) -> None:
        pair = new_pair()
        assert pair.writer.send(b"y" * size) is None
        assert pair.reader.receive() == b"y" * size

    @pytest.mark.parametrize("size", [101, 128, 65537])
    def test_what_is_too_large(self, new_pair: NewPair, size: int) -> None:
        pair = new_pair()
        before = bytes(pair.ring.view)
        message = b"y" * size
        assert pair.writer.send(message) is message
        assert pair.writer.put(message) is False
        assert bytes(pair.ring.view) == before

    @pytest.mark.parametrize("error", [ValueError("code"), KeyboardInterrupt()])
    def test_encoding_raises(self, new_pair: NewPair, error: BaseException) -> None:
        pair = new_pair(raw=False)
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

    def test_encoding_that_binds_and_closes(self, new_pair: NewPair) -> None:
        pair = new_pair()

        def code(obj: object) -> bytes:
            pair.writer.bind(None, 7, False, None)
            pair.writer.close()
            return b"late"

        pair.writer.bind(code, 7, False, None)
        del code
        with pytest.raises(ValueError, match=r"closed|released"):
            pair.writer.send("x")

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
