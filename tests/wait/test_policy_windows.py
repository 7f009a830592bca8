"""Steady streams: how many messages are caught by spinning at the right moment, and what that costs."""

from __future__ import annotations

import random

import pytest
from arrivals import MS, TYPICAL, US, Machine, Record, follow, jittered, machine, quick_machine, times
from hypothesis import given
from hypothesis import strategies as st

from aioshm.wait.policy import MISSES, PARK, WaitMode

__all__ = ["machine", "quick_machine"]  # fixtures

LEARNING = 12
"""So many messages are enough to believe in a rhythm."""

CAUGHT = 0.87
"""The share of messages with normal jitter that is caught: an eighth of them, at most, comes before a window begins."""


pytestmark = pytest.mark.opens_nothing


def followed(machine: Machine, arrivals: list[int], **options: float) -> Record:
    return follow(machine, machine.policy(**options), arrivals)


class TestSteady:
    @pytest.mark.parametrize("period", [0.5 * MS, 5 * MS, 1000 * MS])
    def test_one_that_keeps_time_is_caught_for_next_to_nothing(self, quick_machine: Machine, period: float) -> None:
        record = followed(quick_machine, times(jittered(period, 0, 500)))
        assert record.hit_ratio(LEARNING) > 0.9
        assert record.spin_share < 0.005 + 40 * US / period

    @pytest.mark.parametrize("period", [MS, 50 * MS])
    def test_a_little_jitter_costs_little(self, quick_machine: Machine, period: float) -> None:
        record = followed(quick_machine, times(jittered(period, 0.02, 1000)))
        assert record.hit_ratio(LEARNING) > CAUGHT
        assert record.spin_share < 0.031 + 20 * US / period

    @pytest.mark.parametrize("jitter", [0.2, 0.5])
    def test_too_much_jitter_is_not_spun_for(self, quick_machine: Machine, jitter: float) -> None:
        record = followed(quick_machine, times(jittered(5 * MS, jitter, 1000)))
        assert record.spin_share < 0.005
        assert record.windows_tried(LEARNING) < 50


class TestBursts:
    def test_bursts_are_met_at_their_beginning(self, quick_machine: Machine) -> None:
        rng = random.Random(1)
        pattern = [20 * MS, *[quick_machine.cost.hot_gap_ns / 3.2] * 4]
        record = followed(quick_machine, times(gap * rng.gauss(1, 0.02) for gap in pattern * 200))
        assert record.hit_ratio(10 * LEARNING) > 0.9
        assert record.spin_share < 0.06

    def test_several_beats_while_the_end_was_away_are_no_new_rhythm(self, quick_machine: Machine) -> None:
        arrivals = times(jittered(5 * MS, 0.0, 301))
        policy = quick_machine.policy()
        follow(quick_machine, policy, arrivals[:200])
        count = 203
        assert policy.begin(count, arrivals[count - 1], arrivals[count - 1] + 30 * US).mode is WaitMode.SLEEP
        step = policy.begin(count + 1, arrivals[count], arrivals[count] + 30 * US)
        window = policy.missed(step.until_ns)
        assert step.until_ns < arrivals[count + 1] < window.until_ns


class TestChange:
    @pytest.mark.parametrize(("before", "after"), [(10, 5), (5, 6), (2, 100)])
    def test_of_period_is_followed_within_a_few_messages(
        self, quick_machine: Machine, before: float, after: float
    ) -> None:
        gaps = [*jittered(before * MS, 0.01, 200), *jittered(after * MS, 0.01, 60)]
        record = followed(quick_machine, times(gaps))
        assert record.hit_ratio(LEARNING, 200) > CAUGHT
        assert record.windows_tried(200 + 8, 260) > 0.85 * 52
        assert record.hit_ratio(200 + 8, 260) > 0.8

    def test_a_hiccup_does_not_end_a_rhythm(self, quick_machine: Machine) -> None:
        gaps = jittered(5 * MS, 0.01, 400)
        gaps[200] = 23 * MS
        record = followed(quick_machine, times(gaps))
        assert record.hit_ratio(202, 260) > 0.85

    def test_silence_costs_two_windows_and_then_the_end_parks_for_good(self, machine: Machine) -> None:
        policy = machine.policy()
        steady = times(jittered(5 * MS, 0.02, 100))
        until_then = follow(machine, policy, steady)
        quiet = follow(machine, machine.policy(), [*steady, steady[-1] + 60_000 * MS])
        assert len(quiet.spent) - len(until_then.spent) <= MISSES
        assert quiet.spent[-1][0] > steady[-1], "it hoped for another message"
        assert sum(ns for _, ns in quiet.spent) - sum(ns for _, ns in until_then.spent) < 0.4 * 5 * MS
        assert policy.begin(100, steady[-1], steady[-1] + 100 * MS) is PARK


class TestBudget:
    @pytest.mark.parametrize(("share", "jitter", "period"), [(0.01, 0.1, 0.4 * MS), (0.3, 0.1, 5 * MS), (0.3, 0, MS)])
    def test_bounds_what_rhythms_cost(self, machine: Machine, share: float, jitter: float, period: float) -> None:
        record = followed(machine, times(jittered(period, jitter, 1500)), max_spin_cpu=share)
        assert record.highest_share(int(200 * period)) <= share * (200 + 8) / 200

    @given(
        st.lists(st.tuples(st.integers(400 * US, 60 * MS), st.integers(1, 40)), min_size=5, max_size=20),
        st.sampled_from([0.02, 0.1]),
        st.integers(0, 10),
    )
    def test_bounds_what_any_series_costs(self, parts: list[tuple[int, int]], share: float, seed: int) -> None:
        rng = random.Random(seed)
        gaps = [
            max(TYPICAL.cost.hot_gap_ns + 1, rng.gauss(gap, 0.05 * gap)) for gap, times_ in parts for _ in range(times_)
        ]
        record = followed(TYPICAL, times([*gaps, 1]), max_spin_cpu=share)
        assert sum(ns for _, ns in record.watched) <= share * (record.elapsed + 5 * max(gaps))


def test_nothing_spins_and_no_timer_is_set_where_nothing_may_spin(machine: Machine) -> None:
    for arrivals in (times(jittered(5 * MS, 0.0, 300)), times([5 * US] * 300)):
        record = follow(machine, machine.policy(may_spin=False), arrivals)
        assert (record.spent, record.naps) == ([], 0)
        assert record.wake_ups <= len(arrivals)
