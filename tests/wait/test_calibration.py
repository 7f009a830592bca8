"""What a machine's figures are measured and learned to be, and that no figure, however wrong, lets an end spin on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from time import monotonic_ns, thread_time_ns
from typing import Any

import pytest
from arrivals import MACHINES
from hypothesis import given
from hypothesis import strategies as st
from waiters import End, Told, pollers

from aioshm.wait import calibration as module
from aioshm.wait import poller as poller_module
from aioshm.wait.calibration import AHEAD_NS, SHORT_SLEEP_NS, Calibration, measured, timer_lateness
from aioshm.wait.costs import TYPICAL, WAKE_UP_BOUNDS_NS, YIELDING_SPIN_NS, Costs
from aioshm.wait.predictor import Predictor

__all__ = ["pollers"]  # a fixture

MS = 1_000_000
ANY = st.integers(-(10**18), 10**18)


class TestBounds:
    @given(ANY, ANY, ANY)
    def test_whatever_was_measured_spins_are_some_but_not_for_ever(self, wake_up: int, timer: int, yields: int) -> None:
        costs = Costs(wake_up, timer, yields).within_bounds()
        assert 40_000 < costs.spin_ns < MS / 2
        assert costs.spin_ns < costs.hot_gap_ns <= MS / 2, "a message each millisecond is none to spin for"
        assert 30_000 < costs.yielding_spin_ns <= YIELDING_SPIN_NS
        assert costs.answer_ns <= 4 * YIELDING_SPIN_NS
        assert 0 < costs.nap_ns <= costs.nap_gap_ns < MS
        assert 0 < costs.jitter_ns < MS / 10
        assert 0 < costs.timer_late_ns < MS
        assert 10_000 < costs.shared_cpu_ns < MS

    @pytest.mark.parametrize("costs", MACHINES.values(), ids=list(MACHINES))
    def test_real_machines_are_within(self, costs: Costs) -> None:
        assert costs.within_bounds() == costs

    def test_dearer_wake_ups_make_every_wait_more_patient(self) -> None:
        figures = ["spin_ns", "hot_gap_ns", "nap_gap_ns", "nap_ns", "yielding_spin_ns", "jitter_ns"]
        cheap, dear = MACHINES["bare metal"], MACHINES["virtual machine"]
        assert all(getattr(cheap, name) < getattr(dear, name) for name in figures)


class TestMeasuring:
    def test_is_quick_and_finds_something(self) -> None:
        """The quickest of some tries: the others may have been interrupted. A busy machine's timers are not ours."""
        times, cpu = [], []
        for _ in range(20):
            began, cpu_began = monotonic_ns(), thread_time_ns()
            costs = measured()
            times.append(monotonic_ns() - began)
            cpu.append(thread_time_ns() - cpu_began)
            assert min(costs.wake_up_ns, costs.timer_ns, costs.yield_ns) > 0
        assert min(times) > 3 * AHEAD_NS
        assert min(cpu) < 2 * MS

    def test_without_a_descriptor_it_sleeps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse() -> int:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(module, "timerfd_create", refuse)
        assert all(late > 0 for late in timer_lateness(3))

    def test_a_busy_machine_does_not_hold_the_loop_for_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter(range(0, 10**12, 5 * MS))
        monkeypatch.setattr(module, "monotonic_ns", lambda: next(clock))
        assert len(timer_lateness(100)) == 1

    def test_one_interruption_does_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "timer_lateness", lambda _: [9_000, 400 * MS, 8_000])
        monkeypatch.setattr(module, "yield_times", lambda _: [300, 5 * MS, 250])
        assert measured() == Costs(49_000, 9_000, 300)

    def test_is_done_once_and_kept_within_bounds(self) -> None:
        measurements = iter([Costs(10**9, 10**9, 10**9)])
        it = Calibration(lambda: next(measurements))
        assert it.costs() is it.costs()
        assert it.costs().wake_up_ns == WAKE_UP_BOUNDS_NS[1]


class TestLearning:
    def learned(self, samples: list[int], first: Costs = TYPICAL) -> int:
        it = Calibration(lambda: first)
        it.costs()
        for late_ns in samples:
            it.woke(late_ns)
        return it.costs().wake_up_ns

    @pytest.mark.parametrize("wrong", [3_000, 200_000])
    @pytest.mark.parametrize("right", [5_000, 30_000, 80_000])
    def test_what_was_measured_wrong_is_put_right(self, wrong: int, right: int) -> None:
        costs = Costs(wrong, 20_000, 500)
        assert self.learned([right] * 200, costs) == pytest.approx(right, rel=0.2)

    @pytest.mark.parametrize("outlier", [-(10**18), 0, 10**9, 10**18])
    def test_one_wake_up_changes_nothing(self, outlier: int) -> None:
        assert self.learned([outlier]) == TYPICAL.wake_up_ns

    def test_one_in_three_that_is_late_changes_little(self) -> None:
        assert self.learned([80_000, 80_000, 50 * MS] * 100) == pytest.approx(80_000, rel=0.2)

    @given(st.lists(ANY, max_size=300))
    def test_it_stays_within_bounds(self, samples: list[int]) -> None:
        least, most = WAKE_UP_BOUNDS_NS
        assert least <= self.learned(samples) <= most

    def test_nothing_is_learned_before_it_was_measured(self) -> None:
        it = Calibration(lambda: TYPICAL)
        for _ in range(100):
            it.woke(3_000)
        assert it.costs() == TYPICAL


class Heard(Calibration):
    """Tells what it was told."""

    def __init__(self, costs: Costs = TYPICAL) -> None:
        super().__init__(lambda: costs)
        self.late: list[int] = []

    def woke(self, late_ns: int) -> None:
        self.late.append(late_ns)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    it = Heard()
    monkeypatch.setattr(poller_module, "calibration", it)
    return it


class TestWaits:
    async def waited(self, passed: int, published_ns: Any = monotonic_ns) -> None:
        """Wait for a message, asleep, and then for another one that is there soon."""
        end = End("adaptive")
        end.poller._predictor = Told()
        task = await end.asleep()
        at_ns = published_ns()
        end.publish()
        await asyncio.wait_for(task, 10)
        end.ready = False
        task = asyncio.ensure_future(end.poller.wait(end.look, passed, at_ns))
        await asyncio.sleep(0)
        end.publish()
        await asyncio.wait_for(task, 10)

    async def test_the_next_wait_learns_what_a_wake_up_cost(self, heard: Heard) -> None:
        for _ in range(50):  # unless this sleeps for long, which teaches nothing
            await self.waited(1)
            if heard.late:
                break
        assert heard.late[0] > 0

    @pytest.mark.parametrize("passed", [0, 2, 7])
    async def test_not_from_a_message_that_was_not_the_one(self, heard: Heard, passed: int) -> None:
        await self.waited(passed)
        assert heard.late == []

    @pytest.mark.parametrize("off_ns", [-SHORT_SLEEP_NS, 10 * SHORT_SLEEP_NS])
    async def test_not_from_one_that_was_there_before_or_is_of_the_future(self, heard: Heard, off_ns: int) -> None:
        await self.waited(1, lambda: monotonic_ns() + 5 * off_ns)
        assert heard.late == []

    async def test_an_end_goes_by_what_was_measured_and_then_learned(
        self, heard: Heard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        end = End("adaptive")
        for machine in ("bare metal", "crowded container"):
            monkeypatch.setattr(heard, "_costs", MACHINES[machine])
            end.ready = False
            task = asyncio.ensure_future(end.wait())
            await asyncio.sleep(0)
            end.publish()
            await asyncio.wait_for(task, 10)
            assert end.predictor.costs is MACHINES[machine]

    @pytest.mark.parametrize("mode", ["park", "spin"])
    async def test_nothing_is_measured_where_nothing_is_weighed(self, heard: Heard, mode: Any) -> None:
        for end in (End(mode), End("adaptive", may_spin=False)):
            end.loop.call_soon(end.publish)
            await asyncio.wait_for(end.wait(), 10)
        assert heard._costs is None


def test_other_costs_are_gone_by_at_once() -> None:
    predictor = Predictor(may_spin=True, costs=MACHINES["virtual machine"])
    at_ns, hot = 1_000_000_000, []
    for count in range(1, 61):
        at_ns += 150_000
        if count == 31:
            predictor.adjust(MACHINES["bare metal"])
        predictor.plan(count, at_ns, at_ns)
        hot.append(predictor.hot)
    assert all(hot[2:30])
    assert not any(hot[30:])


def test_neither_importing_nor_a_queue_that_never_waits_measures() -> None:
    code = """
import asyncio, os, aioshm
from aioshm.wait.calibration import calibration
async def main():
    async with aioshm.MessageQueue(1, 1) as writer:
        async with aioshm.MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            await asyncio.gather(writer.wait_until_ready(10), reader.wait_until_ready(10))
            for number in range(100):
                await writer.enqueue(number)
                assert await reader.dequeue() == number
asyncio.run(main())
assert calibration._costs is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
