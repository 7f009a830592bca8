"""What a wake-up is measured and learned to cost, and that no figure, however wrong, lets an end spin on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from arrivals import TYPICAL
from hypothesis import given
from hypothesis import strategies as st
from waiters import End, pollers

from aioshm.wait import timer as module
from aioshm.wait.policy import (
    SHORT_SLEEP_NS,
    TYPICAL_WAKE_UP_NS,
    WAKE_UP_BOUNDS_NS,
    YIELDING_SPIN_NS,
    WaitMode,
    WakeUpCost,
)
from aioshm.wait.timer import timer_lateness

__all__ = ["pollers"]  # a fixture

MS = 1_000_000
ANY = st.integers(-(10**18), 10**18)


class TestBounds:
    @given(ANY)
    def test_whatever_was_measured_spins_are_some_but_not_for_ever(self, wake_up: int) -> None:
        cost = WakeUpCost(lambda: wake_up)
        assert 40_000 < cost.spin_ns < MS / 2
        assert cost.spin_ns < cost.hot_gap_ns <= MS / 2, "a message each millisecond is none to spin for"
        assert 30_000 < cost.yielding_spin_ns <= YIELDING_SPIN_NS
        assert 0 < cost.jitter_ns < MS / 10


class TestMeasuring:
    def test_without_a_descriptor_it_sleeps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse() -> int:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(module, "timerfd_create", refuse)
        assert all(late > 0 for late in timer_lateness(3))

    def test_a_busy_machine_does_not_hold_the_loop_for_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter(range(0, 10**12, 5 * MS))
        monkeypatch.setattr(module, "monotonic_ns", lambda: next(clock))
        assert len(timer_lateness(100)) == 1

    def test_is_done_once_and_kept_within_bounds(self) -> None:
        measurements = iter([10**9])
        cost = WakeUpCost(lambda: next(measurements))
        assert not cost._ns
        assert cost.ns == cost.ns == WAKE_UP_BOUNDS_NS[1]
        assert cost._ns


class TestLearning:
    def learned(self, samples: list[int], first: int = TYPICAL_WAKE_UP_NS) -> float:
        cost = WakeUpCost(lambda: first)
        assert cost.ns
        for late_ns in samples:
            cost.learn(late_ns)
        return cost.ns

    @pytest.mark.parametrize("wrong", [3_000, 200_000])
    @pytest.mark.parametrize("right", [5_000, 30_000, 80_000])
    def test_what_was_measured_wrong_is_put_right(self, wrong: int, right: int) -> None:
        assert self.learned([right] * 200, wrong) == pytest.approx(right, rel=0.2)

    @pytest.mark.parametrize("outlier", [-(10**18), 0, 10**9, 10**18])
    def test_one_wake_up_changes_little(self, outlier: int) -> None:
        assert self.learned([outlier]) == pytest.approx(TYPICAL_WAKE_UP_NS, rel=0.04)

    @given(st.lists(ANY, max_size=300))
    def test_it_stays_within_bounds(self, samples: list[int]) -> None:
        least, most = WAKE_UP_BOUNDS_NS
        assert least <= self.learned(samples) <= most


class TestWaits:
    def waited(self, passed: int, at_ns: int, looked_ns: int, *, woken: bool = True) -> float:
        """Let an end park from 1 ms on, and wait for the next message; return what a wake-up costs by then."""
        policy = TYPICAL.policy(may_spin=False, crowded=True)
        assert policy.cost.ns == TYPICAL_WAKE_UP_NS
        assert policy.begin(5, 1, MS).mode is WaitMode.PARK
        policy.hit(looked_ns, woken)
        policy.begin(5 + passed, at_ns, looked_ns + MS)
        return policy.cost.ns

    def test_the_next_wait_learns_what_a_wake_up_cost(self) -> None:
        assert self.waited(1, 2 * MS, 2 * MS + 5_000) < TYPICAL_WAKE_UP_NS
        assert self.waited(1, 2 * MS, 2 * MS + 150_000) > TYPICAL_WAKE_UP_NS

    @pytest.mark.parametrize(
        ("passed", "at_ns", "woken"),
        [
            (0, 2 * MS, True),
            (7, 2 * MS, True),
            (1, MS - 1, True),
            (1, 3 * MS, True),
            (1, 2 * MS + SHORT_SLEEP_NS, True),
            (1, 2 * MS, False),
        ],
        ids=["no message", "several", "before", "future", "late", "not asleep"],
    )
    def test_nothing_is_learned_from_other_messages(self, passed: int, at_ns: int, woken: bool) -> None:
        assert self.waited(passed, at_ns, 2 * MS + 5_000, woken=woken) == TYPICAL_WAKE_UP_NS

    @pytest.mark.parametrize("mode", ["park", "spin"])
    async def test_nothing_is_measured_where_nothing_is_weighed(self, mode: Any) -> None:
        for end in (End(mode), End("adaptive", may_spin=False)):
            end.loop.call_soon(end.publish)
            await asyncio.wait_for(end.wait(), 10)
            assert not end.policy.cost._ns


def test_neither_importing_nor_a_queue_that_never_waits_measures() -> None:
    code = """
import asyncio, os, aioshm
from aioshm.wait.timer import wake_up_cost
async def main():
    async with aioshm.MessageQueue(1, 1) as writer:
        async with aioshm.MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            await asyncio.gather(writer.wait_until_ready(10), reader.wait_until_ready(10))
            for number in range(100):
                await writer.enqueue(number)
                assert await reader.dequeue() == number
asyncio.run(main())
assert not wake_up_cost._ns
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
