"""Synthetic arrivals without a period: when an end spins, naps or parks; and what it takes a wake-up to cost."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from arrivals import TYPICAL, US, Machine, follow, machine, times
from hypothesis import given
from hypothesis import strategies as st

from aioshm.wait.policy import (
    FAILURES,
    HOT_GAP_NS,
    MAX_PERIOD_NS,
    MISSES,
    NAPS,
    PARK,
    PROBE,
    SHORT_SLEEP_NS,
    TYPICAL_WAKE_UP_NS,
    WAKE_UP_BOUNDS_NS,
    YIELDING_SPIN_NS,
    Policy,
    WaitMode,
    WakeUpCost,
)

__all__ = ["machine"]  # a fixture

MS = 1_000_000
START = 1_000_000_000
LONGEST = 5 * MS
"""No single spin may cost more than this."""
FEW = 12
"""So many messages are enough to learn that the stream has changed."""


def budget_ns(policy: Policy, count: int, at_ns: int) -> int:
    """Return how long the next wait spins at once; it begins soon after the latest message."""
    now_ns = at_ns + 30_000
    step = policy.begin(count, at_ns, now_ns)
    if step.mode is not WaitMode.SPIN:
        return 0
    assert 0 < step.until_ns - now_ns <= LONGEST
    return step.until_ns - now_ns


def spun_for(policy: Policy, hit: bool, at_ns: int = START) -> None:
    """End the spin that the policy has asked for."""
    if hit:
        policy.hit(at_ns, woken=False)
    else:
        policy.missed(at_ns)


def waits(policy: Policy, gaps: Iterable[int]) -> list[bool]:
    """Let one message after the other arrive, one wait for each; return which waits spun."""
    spun = []
    at_ns = START
    for count, gap in enumerate(gaps, 1):
        budget = budget_ns(policy, count, at_ns)
        spun.append(budget > 0)
        if budget:
            spun_for(policy, gap <= budget)
        at_ns += gap
    return spun


def parks(spun: list[bool]) -> bool:
    """Return whether none of these waits spins, but for the probes."""
    return sum(spun) <= 1 + len(spun) // PROBE


pytestmark = pytest.mark.opens_nothing


class TestStreams:
    @pytest.mark.parametrize("wake_ups", [0.01, 2])
    @pytest.mark.parametrize("silence", [3 * MS, 3_600_000 * MS])
    def test_hot_one_is_spun_for_also_after_a_silence(self, machine: Machine, wake_ups: float, silence: int) -> None:
        gap = int(wake_ups * machine.wake_up_ns)
        spun = waits(machine.policy(), [gap] * 50 + [silence] + [gap] * 50)
        assert all(spun[:51])
        assert all(spun[53:]), "the wait that follows a late message may park, the next ones spin"

    @pytest.mark.parametrize("gap", [2 * MS, 10_000 * MS])
    def test_slow_one_is_not_also_after_a_hot_one(self, machine: Machine, gap: int) -> None:
        spun = waits(machine.policy(), [5_000] * 50 + [gap] * 1000)
        assert parks(spun[50 + FEW :])

    def test_two_parking_ends_find_to_each_other(self, machine: Machine) -> None:
        """Each answers as soon as it has the other's message, which takes a wake-up for one that is parked."""
        ends = [machine.policy(), machine.policy()]
        now, latest, hits = START, [START, START], []
        for turn in range(400):
            me = ends[turn % 2]
            budget = budget_ns(me, 1 + turn // 2, latest[turn % 2])
            other_wakes = 0 if turn > 1 and hits[-1] else machine.wake_up_ns
            arrives_in = 5_000 + other_wakes
            hit = budget >= arrives_in
            if budget:
                spun_for(me, hit)
            hits.append(hit)
            now += arrives_in + (0 if hit else machine.wake_up_ns)
            latest[turn % 2] = now
        assert all(hits[2 * FEW :])


class TestFailures:
    def failing(self, machine: Machine, amount: int) -> list[bool]:
        """Return which of so many waits spin where every gap promises a hit and every spin is in vain."""
        policy = machine.policy()
        spun = []
        for number in range(1, amount + 1):
            budget = budget_ns(policy, number, START + number * (machine.cost.spin_ns + machine.cost.hot_gap_ns) // 2)
            spun.append(budget > 0)
            if budget:
                spun_for(policy, False)
        return spun

    def test_switch_spinning_off_but_for_probes(self, machine: Machine) -> None:
        spun = self.failing(machine, PROBE * 10)
        assert spun[:FAILURES] == [True] * FAILURES
        assert sum(spun[FAILURES:]) == 10
        probes = [number for number, did in enumerate(spun, 1) if did][FAILURES:]
        assert [number % PROBE for number in probes] == [0] * 10

    @pytest.mark.parametrize("burst", [False, True])
    def test_a_hit_or_a_burst_switches_it_on_again(self, machine: Machine, burst: bool) -> None:
        policy = machine.policy()
        for _ in range(FAILURES):
            assert budget_ns(policy, 0, 0)
            spun_for(policy, False)
        gap = 1_000 if burst else machine.cost.hot_gap_ns // 2
        spun = waits(policy, [int(gap)] * (PROBE + 50))
        first = 1 if burst else PROBE - FAILURES - 1
        assert not any(spun[:first])
        assert all(spun[first:])


class TestAnything:
    @given(
        st.lists(st.tuples(st.integers(0, 50), st.integers(-(10**9), 10**12), st.integers(0, 3)), max_size=200),
        st.booleans(),
        st.sampled_from([0.0, 0.1, 1.0]),
    )
    def test_a_plan_lies_ahead_and_ends(self, series: list[tuple[int, int, int]], crowded: bool, share: float) -> None:
        policy = TYPICAL.policy(crowded=crowded, max_spin_cpu=share)
        count, at_ns = 0, START
        for passed, gap, outcome in series:
            count += passed
            at_ns += gap
            now_ns = at_ns + 30_000
            step = policy.begin(count, at_ns, now_ns)
            assert step.mode is not WaitMode.NAP or crowded
            for _ in range(2 + NAPS + 2 * MISSES):
                if step is PARK:
                    break
                assert not (crowded and step.mode in (WaitMode.SLEEP, WaitMode.WINDOW))
                assert now_ns < step.until_ns < now_ns + 8 * MAX_PERIOD_NS
                if outcome == 0:
                    policy.stopped(now_ns)
                    break
                if outcome == 1:
                    policy.hit(now_ns, woken=False)
                    break
                now_ns = step.until_ns + 50_000 * (outcome - 2)
                step = policy.missed(now_ns)
            else:
                raise AssertionError("a wait that never parks")


class TestHot:
    def test_is_a_stream_and_nothing_else(self, machine: Machine) -> None:
        policy = machine.policy()
        assert not policy.hot
        waits(policy, [5_000] * 20)
        assert policy.hot
        waits(policy, [5 * MS] * 200)
        assert not policy.hot

    def test_modes_that_are_chosen_always_spin_and_always_park(self) -> None:
        policy = TYPICAL.policy(mode="spin")
        parking = Policy(may_spin=True, mode="park", cost=WakeUpCost(lambda: pytest.fail("nothing to measure")))
        assert policy.hot
        at_ns = START
        for count, gap in enumerate([5 * US, 5 * MS, 10_000 * MS] * PROBE):
            at_ns += gap
            assert parking.begin(count, at_ns, at_ns) is PARK
            step = policy.begin(count, at_ns, at_ns)
            assert step.mode is WaitMode.SPIN
            assert step.until_ns > at_ns + 10**15


class TestMoreEndsThanCpus:
    """Spins yield the CPU there, but keep the event loop."""

    def crowded(self, machine: Machine, may_spin: bool = True) -> Policy:
        return machine.policy(may_spin=may_spin, crowded=True)

    @pytest.mark.parametrize("may_spin", [True, False])
    def test_a_stream_is_drained_by_naps(self, machine: Machine, may_spin: bool) -> None:
        record = follow(machine, self.crowded(machine, may_spin), times([5 * US] * 2000))
        assert record.wake_ups < 2000 / 8, "one wake-up finds a batch"
        assert record.naps > 0.9 * record.wake_ups, "and the other end need not signal"

    def test_a_stream_that_ends_is_parked_for(self, machine: Machine) -> None:
        record = follow(machine, self.crowded(machine), times([*[5 * US] * 500, 10_000 * MS]))
        before = follow(machine, self.crowded(machine), times([5 * US] * 500))
        assert record.naps - before.naps <= NAPS

    @pytest.mark.parametrize("gap", [MS, 1000 * MS])
    def test_slower_messages_are_parked_for(self, machine: Machine, gap: int) -> None:
        record = follow(machine, self.crowded(machine), times([gap] * 300))
        assert record.naps <= NAPS, "none but at the beginning"
        assert len(record.spent) <= FAILURES + 300 // PROBE, "but for the first and the probes"

    @pytest.mark.parametrize("share", [0.3, 0.8])
    def test_answers_of_all_are_spun_for(self, machine: Machine, share: float) -> None:
        longest = machine.cost.hot_gap_ns
        assert 2 * machine.wake_up_ns < longest <= HOT_GAP_NS
        gap = max(share * longest, 1.2 * machine.wake_up_ns)
        record = follow(machine, self.crowded(machine), times([gap] * 300))
        assert record.wake_ups <= FEW, "of all that come later none wakes it"
        assert record.naps <= NAPS


class TestThreads:
    """Spins yield the CPU, and keep no event loop."""

    @pytest.mark.parametrize("gap", [0.3 * MS, 0.9 * MS])
    def test_answers_are_spun_for_up_to_a_millisecond(self, gap: float) -> None:
        record = follow(TYPICAL, TYPICAL.policy(in_threads=True), times([gap] * 300))
        assert record.hit_ratio(FEW) == 1.0
        assert record.wake_ups <= FEW

    def test_a_long_answer_is_spun_for_where_questions_are_far_apart(self) -> None:
        policy, at_ns, spun = TYPICAL.policy(in_threads=True), START, []
        for count in range(1, 100):
            asked_ns = at_ns + 9 * MS  # works for 9 ms on each answer, then asks; the answer takes 1.5 ms
            step = policy.begin(count, at_ns, asked_ns)
            at_ns = asked_ns + 3 * MS // 2
            spun.append(step.mode is WaitMode.SPIN and step.until_ns >= at_ns)
            if spun[-1]:
                policy.hit(at_ns, woken=False)
            else:
                while step is not PARK:
                    step = policy.missed(step.until_ns)
                policy.hit(at_ns + TYPICAL.wake_up_ns, woken=True)
        assert all(spun[-20:])


class TestCostOfWakeUps:
    @given(st.integers(-(10**18), 10**18), st.lists(st.integers(-(10**18), 10**18), max_size=300))
    def test_no_figure_however_wrong_lets_an_end_spin_on(self, measured: int, samples: list[int]) -> None:
        cost = WakeUpCost(lambda: measured)
        least, most = WAKE_UP_BOUNDS_NS
        for late_ns in [0, *samples]:
            assert least <= cost.ns <= most
            assert 40_000 < cost.spin_ns < MS / 2
            assert cost.spin_ns < cost.hot_gap_ns <= MS / 2, "a message each millisecond is none to spin for"
            assert 30_000 < cost.yielding_spin_ns <= YIELDING_SPIN_NS
            assert 0 < cost.jitter_ns < MS / 10
            cost.learn(late_ns)

    @pytest.mark.parametrize(("wrong", "right"), [(3_000, 80_000), (200_000, 5_000), (200_000, 80_000)])
    def test_what_was_measured_wrong_is_put_right(self, wrong: int, right: int) -> None:
        cost = WakeUpCost(lambda: wrong)
        assert cost.ns == wrong
        for _ in range(200):
            cost.learn(right)
        assert cost.ns == pytest.approx(right, rel=0.2)

    @pytest.mark.parametrize(
        ("passed", "at_ns", "looked_ns", "woken", "change"),
        [
            (1, 2 * MS, 2 * MS + 5_000, True, -1),
            (1, 2 * MS, 2 * MS + 150_000, True, 1),
            (0, 2 * MS, 2 * MS + 5_000, True, 0),
            (7, 2 * MS, 2 * MS + 5_000, True, 0),
            (1, MS - 1, 2 * MS + 5_000, True, 0),
            (1, 3 * MS, 2 * MS + 5_000, True, 0),
            (1, 2 * MS + SHORT_SLEEP_NS, 2 * MS + 5_000, True, 0),
            (1, 2 * MS, 2 * MS + 5_000, False, 0),
        ],
        ids=["quick", "slow", "no message", "several", "before", "future", "late", "not asleep"],
    )
    def test_is_learned_from_the_message_that_ended_the_wait(
        self, passed: int, at_ns: int, looked_ns: int, woken: bool, change: int
    ) -> None:
        """An end parks from 1 ms on, and then waits for the next message."""
        policy = TYPICAL.policy(may_spin=False, crowded=True)
        assert policy.cost.ns == TYPICAL_WAKE_UP_NS
        assert policy.begin(5, 1, MS).mode is WaitMode.PARK
        policy.hit(looked_ns, woken)
        policy.begin(5 + passed, at_ns, looked_ns + MS)
        learned = policy.cost.ns - TYPICAL_WAKE_UP_NS
        assert (learned > 0) - (learned < 0) == change
