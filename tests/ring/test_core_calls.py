"""Awaited calls, which ask a core first and continue in Python where the core could not; and spins."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import traceback
from collections.abc import Coroutine
from time import monotonic_ns
from typing import Any

import pytest
from pairs_of_cores import NewPair, Notes, Pair
from rings import CORES, Cores
from support import eventually

from aioshm.ring.cores import EMPTY, Calls, native_core


@pytest.fixture
def cores() -> Cores:
    """The core that this process uses."""
    return CORES["native" if native_core else "portable"]


class Calling(Notes):
    """Has the calls of one core; notes each call that the core could not answer."""

    def __init__(self, pair: Pair, core: Any, slow_path: Any = None) -> None:
        self.future: asyncio.Future[str] | None = None
        self.calls = Calls(slow_path or self.slow_path)
        self.calls.core = core

    async def slow_path(self, outcome: Any, *args: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        self.append(f"{'empty' if outcome is EMPTY else outcome} {args}")
        return "later" if self.future is None else await self.future


@pytest.fixture
def pair(new_pair: NewPair) -> Pair:
    return new_pair()


@pytest.fixture
def sending(pair: Pair) -> Calling:
    return Calling(pair, pair.writer)


@pytest.fixture
def receiving(pair: Pair) -> Calling:
    return Calling(pair, pair.reader)


def run(call: Coroutine[Any, Any, Any]) -> Any:
    """Return what a coroutine returns that never waits."""
    with pytest.raises(StopIteration) as stopped:
        call.send(None)
    return stopped.value.value


class TestAnswers:
    def test_the_core_does_it_when_the_call_is_awaited_not_before(self, sending: Calling, receiving: Calling) -> None:
        sent, received = sending.calls.enqueue(b"one"), receiving.calls.dequeue()
        assert not sending.calls.core.seq
        assert run(sent) is None
        assert run(received) == b"one"
        assert not sending + receiving

    async def test_call_that_the_core_cannot_answer_continues_on_the_slow_path(
        self, pair: Pair, sending: Calling, receiving: Calling
    ) -> None:
        assert await receiving.calls.dequeue() == "later"
        assert await receiving.calls.dequeue(1.5, indefinite=True) == "later"
        for _ in pair.slots:
            assert await sending.calls.enqueue(b"x") is None
        await sending.calls.enqueue(b"y")
        pair.writer.open = False
        await sending.calls.enqueue(obj=b"z", timeout=2)
        assert receiving == ["empty (None, None, False)", "empty (1.5, None, True)"]
        assert sending == ["b'y' (b'y', None)", "False (b'z', 2)"]

    async def test_error_of_the_reader_goes_to_the_slow_path_with_its_traceback(self, pair: Pair) -> None:
        async def slow_path(outcome: Any, *_: object) -> None:
            raise ArithmeticError("seen from outside") from outcome

        def decode(message: bytes) -> str:
            return message.decode()

        calling = Calling(pair, pair.reader, slow_path)
        pair.reader.bind(decode, 7, False, None)
        pair.writer.put(b"\xff")
        with pytest.raises(ArithmeticError, match="seen") as raised:
            await calling.calls.dequeue()
        cause = raised.value.__cause__
        assert isinstance(cause, UnicodeDecodeError)
        assert "decode" in {frame.name for frame in traceback.extract_tb(cause.__traceback__)}
        assert pair.reader.seq == 1


class TestCoroutines:
    async def test_what_is_thrown_reaches_the_rest(self, pair: Pair, receiving: Calling) -> None:
        receiving.future = asyncio.get_running_loop().create_future()
        call = receiving.calls.dequeue()
        assert call.send(None) is receiving.future
        with pytest.raises(LookupError):
            call.throw(LookupError("thrown"))
        ended = []

        async def slow_path(*_: object) -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                ended.append(True)

        call = Calling(pair, pair.reader, slow_path).calls.dequeue()
        call.send(None)
        call.close()
        assert ended

    def test_call_is_awaited_once_and_closed_often(self, pair: Pair, receiving: Calling) -> None:
        for ended in (True, False):
            pair.writer.put(b"x")
            call = receiving.calls.dequeue()
            if ended:
                assert run(call) == b"x"
            for _ in range(2):
                call.close()
            for again in (lambda call=call: call.send(None), lambda call=call: call.throw(KeyError("k"))):
                with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
                    again()
        assert run(receiving.calls.dequeue()) == b"x"

    def test_one_that_nobody_awaits_is_told_of(self, pair: Pair, sending: Calling) -> None:
        for _ in range(2):
            with pytest.warns(RuntimeWarning, match="enqueue' was never awaited"):
                sending.calls.enqueue(b"x")
                gc.collect()
        assert not pair.writer.seq


MS = 1_000_000


class TestSpin:
    @pytest.mark.parametrize("end", ["writer", "reader"])
    @pytest.mark.parametrize("budget_ns", [-(1 << 62), 0, 50_000, 50_001])
    def test_the_budget(self, new_pair: NewPair, end: str, budget_ns: int) -> None:
        pair = new_pair(1, 1)
        if end == "writer":
            pair.writer.put(b"x")
        core = getattr(pair, end)
        before = monotonic_ns()
        assert core.spin(budget_ns) is False
        spent = monotonic_ns() - before
        assert (core.spins, core.hits) == (1, 0)
        assert max(0, budget_ns) <= core.spun_ns <= spent
        assert core.passes() is True, "it is not in use any more"
        if end == "reader":
            pair.writer.put(b"x")
        else:
            pair.reader.take()
        assert core.spin(10**18) is True
        assert core.spins == 1, "it was there at once"

    def test_a_long_one_lets_other_threads_run_and_ends_with_a_message(self, new_pair: NewPair) -> None:
        pair = new_pair()
        hits: list[bool] = []
        thread = threading.Thread(target=lambda: hits.append(pair.reader.spin(60_000 * MS)))
        thread.start()
        eventually(lambda: pair.reader.spins == 1, "the spin")
        assert pair.reader.passes() is False, "it is in use"
        with pytest.raises(BufferError):
            pair.reader.close()
        with pytest.raises(RuntimeError, match="in use"):
            pair.reader.take()
        assert pair.reader.receive() is pair.cores.module.EMPTY
        assert pair.writer.put(b"x")
        thread.join(60)
        assert hits == [True]
        assert (pair.reader.hits, pair.reader.take()) == (1, b"x")

    def test_a_short_one_lets_other_threads_run_if_it_yields(self, new_pair: NewPair) -> None:
        core, ran, ready = new_pair().reader, threading.Event(), threading.Lock()
        ready.acquire()
        thread = threading.Thread(target=lambda: (ready.acquire(), ran.set()))
        thread.start()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)  # from here on a thread runs only when another one lets it
        try:
            ready.release()
            for _ in range(100):
                core.spin(10_000)
            kept = not ran.is_set()
            core.spin_yields = True
            until = monotonic_ns() + 60_000 * MS
            while not ran.is_set() and monotonic_ns() < until:
                assert core.spin(10_000) is False
        finally:
            sys.setswitchinterval(interval)
        thread.join(60)
        assert kept
        assert ran.is_set()

    @pytest.mark.parametrize("spin_ns", [1000, MS])
    def test_receive_spins(self, new_pair: NewPair, spin_ns: int) -> None:
        pair = new_pair()
        assert pair.reader.receive() is pair.cores.module.EMPTY
        assert pair.reader.spins == 0
        pair.reader.spin_ns = spin_ns
        assert pair.reader.receive() is pair.cores.module.EMPTY
        assert pair.reader.spins == 1
        assert pair.reader.spun_ns >= spin_ns
        pair.reader.open = False
        pair.reader.receive()
        assert pair.reader.spins == 1
        pair.reader.open, pair.reader.spin_ns = True, -5
        pair.reader.receive()
        assert pair.reader.spins == 1
