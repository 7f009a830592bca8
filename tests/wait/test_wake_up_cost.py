"""What a wake-up is measured and learned to cost, and that no figure, however wrong, lets an end spin on."""

from __future__ import annotations

import subprocess
import sys

import pytest
from arrivals import TYPICAL
from hypothesis import given
from hypothesis import strategies as st
from waiters import pollers

from aioshm.wait.policy import (
    SHORT_SLEEP_NS,
    TYPICAL_WAKE_UP_NS,
    WAKE_UP_BOUNDS_NS,
    YIELDING_SPIN_NS,
    WaitMode,
    WakeUpCost,
)

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
