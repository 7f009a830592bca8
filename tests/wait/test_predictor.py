"""Synthetic arrivals without a rhythm: when an end should spin at once or nap, and when it should not."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from arrivals import US, follow, machine, times
from hypothesis import given
from hypothesis import strategies as st

from aioshm.wait.costs import HOT_GAP_NS, TYPICAL, Costs
from aioshm.wait.predictor import FAILURES, NAPS, PROBE, Predictor
from aioshm.wait.rhythm import MAX_PERIOD_NS, PARK

__all__ = ["machine"]  # a fixture

MS = 1_000_000
START = 1_000_000_000
LONGEST = 5 * MS
"""No single spin may cost more than this."""
FEW = 12
"""So many messages are enough to learn that the stream has changed."""


def budget_ns(predictor: Predictor, count: int, at_ns: int) -> int:
    """Return how long the next wait spins at once; it begins soon after the latest message."""
    return predictor.plan(count, at_ns, at_ns + 30_000).spin_ns


def waits(predictor: Predictor, gaps: Iterable[int]) -> list[bool]:
    """Let one message after the other arrive, one wait for each; return which waits spun.

    A spin hits if the next message comes while it lasts.
    """
    spun = []
    at_ns = START
    for count, gap in enumerate(gaps, 1):
        budget = budget_ns(predictor, count, at_ns)
        spun.append(budget > 0)
        if budget:
            predictor.spun(gap <= budget)
        at_ns += gap
    return spun


def parks(spun: list[bool]) -> bool:
    """Return whether none of these waits spins, but for the probes."""
    return sum(spun) <= 1 + len(spun) // PROBE


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Replace the check of the other tests: this is arithmetic."""


class TestStreams:
    @pytest.mark.parametrize("wake_ups", [0.01, 0.25, 1, 2])
    def test_a_hot_one_is_spun_for(self, machine: Costs, wake_ups: float) -> None:
        assert all(waits(Predictor(may_spin=True, costs=machine), [int(wake_ups * machine.wake_up_ns)] * 200))

    @pytest.mark.parametrize("gap", [2 * MS, 5 * MS, 50 * MS, 10_000 * MS])
    def test_a_slow_one_is_not(self, machine: Costs, gap: int) -> None:
        assert parks(waits(Predictor(may_spin=True, costs=machine), [gap] * 1000)[FEW:])

    def test_a_slow_one_with_jitter_is_not(self, machine: Costs) -> None:
        rng = random.Random(1)
        gaps = [int(rng.gauss(5 * MS, MS)) for _ in range(1000)]
        assert parks(waits(Predictor(may_spin=True, costs=machine), gaps)[FEW:])

    def test_a_hot_one_is_still_spun_for_after_a_hiccup(self, machine: Costs) -> None:
        spun = waits(Predictor(may_spin=True, costs=machine), [5_000] * 50 + [3 * MS] + [5_000] * 50)
        assert all(spun[:51])
        assert all(spun[53:]), "the wait that follows a late message may park, the next ones spin"

    def test_a_slow_one_after_a_hot_one_is_no_longer_spun_for(self, machine: Costs) -> None:
        spun = waits(Predictor(may_spin=True, costs=machine), [5_000] * 50 + [5 * MS] * 200)
        assert parks(spun[50 + FEW :])

    def test_batches_count_message_by_message(self, machine: Costs) -> None:
        """Twenty messages that one wake-up drains are twenty short gaps, not one long one."""
        predictor, gap = Predictor(may_spin=True, costs=machine), machine.wake_up_ns // 8
        budgets = [budget_ns(predictor, 1 + 20 * turn, START + 20 * gap * turn) for turn in range(50)]
        assert all(budgets)


class TestBursts:
    def test_idle_after_a_burst_is_one_spin_and_then_sleep(self, machine: Costs) -> None:
        predictor = Predictor(may_spin=True, costs=machine)
        waits(predictor, [2_000] * 100)
        assert 0 < budget_ns(predictor, 101, START + 200_000) <= LONGEST, "one budget for the whole wait"
        predictor.spun(False)
        spun = waits(predictor, [60_000 * MS] * 20)
        assert sum(spun) <= FAILURES + 1

    def test_one_after_a_long_silence_is_hot_at_once(self, machine: Costs) -> None:
        spun = waits(Predictor(may_spin=True, costs=machine), [60_000 * MS] * 20 + [2_000] * 20)
        assert parks(spun[FEW:21])
        assert all(spun[22:])

    @pytest.mark.parametrize("silence", [10 * MS, 1_000 * MS, 3_600_000 * MS])
    def test_ping_pong_after_a_silence_is_hot_after_a_few_messages(self, machine: Costs, silence: int) -> None:
        assert all(waits(Predictor(may_spin=True, costs=machine), [silence, *[2 * machine.wake_up_ns] * 100])[FEW:])

    def test_ping_pong_after_a_slow_stream_is_found_out(self, machine: Costs) -> None:
        """Spins have failed often by then, so it may take until the next probe."""
        spun = waits(Predictor(may_spin=True, costs=machine), [5 * MS] * 100 + [2 * machine.wake_up_ns] * 200)
        assert all(spun[100 + PROBE + FEW :])


class TestPingPong:
    def test_two_parking_ends_find_to_each_other(self, machine: Costs) -> None:
        """Each answers as soon as it has the other's message, which takes a wake-up for one that is parked."""
        ends = [Predictor(may_spin=True, costs=machine), Predictor(may_spin=True, costs=machine)]
        now, latest, hits = START, [START, START], []
        for turn in range(400):
            me = ends[turn % 2]
            budget = budget_ns(me, 1 + turn // 2, latest[turn % 2])
            other_wakes = 0 if turn > 1 and hits[-1] else machine.wake_up_ns
            arrives_in = 5_000 + other_wakes
            hit = budget >= arrives_in
            if budget:
                me.spun(hit)
            hits.append(hit)
            now += arrives_in + (0 if hit else machine.wake_up_ns)
            latest[turn % 2] = now
        assert all(hits[2 * FEW :])


class TestFailures:
    def failing(self, machine: Costs, amount: int) -> list[bool]:
        """Return which of so many waits spin where every gap promises a hit and every spin is in vain."""
        predictor = Predictor(may_spin=True, costs=machine)
        spun = []
        for number in range(1, amount + 1):
            budget = budget_ns(predictor, number, START + number * (machine.spin_ns + machine.hot_gap_ns) // 2)
            spun.append(budget > 0)
            if budget:
                predictor.spun(False)
        return spun

    def test_switch_spinning_off_but_for_probes(self, machine: Costs) -> None:
        spun = self.failing(machine, PROBE * 10)
        assert spun[:FAILURES] == [True] * FAILURES
        assert sum(spun[FAILURES:]) == 10
        probes = [number for number, did in enumerate(spun, 1) if did][FAILURES:]
        assert [number % PROBE for number in probes] == [0] * 10

    def test_a_hit_switches_it_on_again(self, machine: Costs) -> None:
        predictor = Predictor(may_spin=True, costs=machine)
        for _ in range(FAILURES):
            predictor.spun(False)
        spun = waits(predictor, [machine.hot_gap_ns // 2] * (PROBE + 50))
        assert not any(spun[: PROBE - 1])
        assert all(spun[PROBE - 1 :]), "the probe hit"

    def test_a_burst_switches_it_on_again(self, machine: Costs) -> None:
        predictor = Predictor(may_spin=True, costs=machine)
        for _ in range(FAILURES):
            predictor.spun(False)
        assert all(waits(predictor, [1_000] * 20)[1:])

    def test_waits_in_vain_without_any_message_park(self, machine: Costs) -> None:
        predictor = Predictor(may_spin=True, costs=machine)
        spun = []
        for _ in range(PROBE * 3):
            budget = budget_ns(predictor, 7, START)
            spun.append(budget > 0)
            if budget:
                predictor.spun(False)
        assert sum(spun) <= FAILURES + 3


class TestWhereNothingMaySpin:
    @given(st.lists(st.integers(0, 10**10), max_size=3 * PROBE))
    def test_nothing_spins(self, gaps: list[int]) -> None:
        assert not any(waits(Predictor(may_spin=False), gaps))

    def test_not_even_a_probe(self, machine: Costs) -> None:
        assert not any(waits(Predictor(may_spin=False, costs=machine), [1_000] * PROBE * 3))


class TestAnything:
    @given(st.lists(st.tuples(st.integers(0, 50), st.integers(-(10**9), 10**12), st.booleans()), max_size=200))
    def test_a_budget_is_nothing_or_one_spin_that_ends_soon(self, series: list[tuple[int, int, bool]]) -> None:
        """Also for clocks that seem to go backwards, and counts that stand still."""
        predictor = Predictor(may_spin=True)
        count, at_ns = 0, START
        for passed, gap, hit in series:
            count += passed
            at_ns += gap
            budget = budget_ns(predictor, count, at_ns)
            assert budget == 0 or TYPICAL.spin_ns <= budget <= LONGEST
            if budget:
                predictor.spun(hit)

    def test_an_end_of_a_fresh_queue_spins_first(self, machine: Costs) -> None:
        assert machine.spin_ns <= budget_ns(Predictor(may_spin=True, costs=machine), 0, 0) <= LONGEST

    @given(
        st.lists(st.tuples(st.integers(0, 50), st.integers(-(10**9), 10**12), st.integers(0, 3)), max_size=200),
        st.booleans(),
        st.sampled_from([0.0, 0.1, 1.0]),
    )
    def test_a_plan_lies_ahead_and_ends(self, series: list[tuple[int, int, int]], crowded: bool, share: float) -> None:
        predictor = Predictor(may_spin=True, crowded=crowded, max_spin_cpu=share)
        count, at_ns = 0, START
        for passed, gap, outcome in series:
            count += passed
            at_ns += gap
            now_ns = at_ns + 30_000
            plan = predictor.plan(count, at_ns, now_ns)
            assert not (plan.nap_ns and not crowded)
            assert not (crowded and (plan.spin_ns or plan.wake_at_ns))
            while plan.wake_at_ns:
                assert now_ns < plan.until_ns
                assert plan.wake_at_ns < plan.until_ns < now_ns + 8 * MAX_PERIOD_NS
                if outcome == 0:
                    break
                predictor.woke(outcome * 50_000)
                predictor.watched(outcome == 1, 100_000)
                if outcome == 1:
                    break
                now_ns = plan.until_ns
                plan = predictor.after_miss(now_ns)


class TestHot:
    def test_is_a_stream_and_nothing_else(self, machine: Costs) -> None:
        predictor = Predictor(may_spin=True, costs=machine)
        assert not predictor.hot
        waits(predictor, [5_000] * 20)
        assert predictor.hot
        waits(predictor, [5 * MS] * 200)
        assert not predictor.hot

    @pytest.mark.parametrize("kwargs", [{"may_spin": False}, {"may_spin": True, "crowded": True}])
    def test_is_nothing_where_nothing_may_spin(self, kwargs: dict[str, bool]) -> None:
        predictor = Predictor(**kwargs)
        waits(predictor, [5_000] * 20)
        assert not predictor.hot


class TestMoreEndsThanCpus:
    def crowded(self, machine: Costs, may_spin: bool = True) -> Predictor:
        return Predictor(may_spin=may_spin, costs=machine, crowded=True)

    @pytest.mark.parametrize("may_spin", [True, False])
    def test_a_stream_is_drained_by_naps(self, machine: Costs, may_spin: bool) -> None:
        record = follow(self.crowded(machine, may_spin), times([5 * US] * 2000))
        assert record.spent == []
        assert record.wake_ups < 2000 / 8, "one wake-up finds a batch"
        assert record.naps > 0.9 * record.wake_ups, "and the other end need not signal"

    def test_a_stream_that_ends_is_parked_for(self, machine: Costs) -> None:
        record = follow(self.crowded(machine), times([*[5 * US] * 500, 10_000 * MS]))
        before = follow(self.crowded(machine), times([5 * US] * 500))
        assert record.naps - before.naps <= NAPS

    @pytest.mark.parametrize("gap", [MS, 5 * MS, 1000 * MS])
    def test_slower_messages_are_parked_for(self, machine: Costs, gap: int) -> None:
        record = follow(self.crowded(machine), times([gap] * 300))
        assert record.naps <= NAPS, "none but at the beginning"
        assert record.spent == []

    def test_an_end_of_a_fresh_queue_parks(self, machine: Costs) -> None:
        assert self.crowded(machine).plan(0, 0, START) is PARK


class TestAnswersOfACrowd:
    """Spins hand their CPU on there, but keep the event loop."""

    def crowd(self, machine: Costs, ends: int = 3) -> Predictor:
        return Predictor(may_spin=True, costs=machine, crowded=True, crowd=ends)

    @pytest.mark.parametrize("ends", [3, 5, 9])
    @pytest.mark.parametrize("share", [0.3, 0.8])
    def test_are_spun_for_while_all_of_it_may_answer(self, machine: Costs, ends: int, share: float) -> None:
        longest = machine.crowd_spin_ns(ends)
        assert 2 * machine.wake_up_ns < longest <= HOT_GAP_NS
        record = follow(self.crowd(machine, ends), times([max(share * longest, 1.2 * machine.wake_up_ns)] * 300))
        assert record.wake_ups <= FEW, "of all that come later none wakes it"
        assert record.naps <= NAPS

    @pytest.mark.parametrize("gap", [MS, 5 * MS, 1000 * MS])
    def test_that_come_later_are_parked_for(self, machine: Costs, gap: int) -> None:
        record = follow(self.crowd(machine), times([gap] * 300))
        assert len(record.spent) <= 1 + 300 // PROBE, "but for the probes"

    def test_its_streams_are_drained_by_naps(self, machine: Costs) -> None:
        record = follow(self.crowd(machine), times([5 * US] * 2000))
        assert record.wake_ups < 2000 / 8

    def test_two_ends_that_wake_each_other_come_to_spin(self, machine: Costs) -> None:
        predictor, at_ns, spun = self.crowd(machine), START, []
        for count in range(1, 4 * PROBE):
            plan = predictor.plan(count, at_ns, at_ns + 10_000)
            spun.append(plan.spin_ns > 0)
            at_ns += 10_000 + (20_000 if spun[-1] else machine.crowd_spin_ns(3) * 3 // 2)
            if spun[-1]:
                predictor.spun(True)
        assert all(spun[-PROBE:])
        assert not all(spun[: PROBE - 1])

    def test_where_only_one_cpu_is_nothing_spins(self, machine: Costs) -> None:
        predictor = Predictor(may_spin=False, costs=machine, crowded=True, crowd=3)
        assert follow(predictor, times([100 * US] * 300)).spent == []
