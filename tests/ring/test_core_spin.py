"""Spins. One class for every kind of core."""

from __future__ import annotations

import sys
import threading
from time import monotonic_ns

import pytest
from pairs_of_cores import NewPair
from support import eventually

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
