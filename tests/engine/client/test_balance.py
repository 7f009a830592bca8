"""Which engine gets the next request, and what an engine knows of waves."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from aioshm.engine.client.engines import LoadBalancer
from aioshm.engine.protocol.messages import StartWave
from aioshm.engine.protocol.waves import Lockstep


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Replace the check of the other tests: nothing is opened or started here."""


def spread(balance: LoadBalancer, count: int) -> list[int]:
    chosen = []
    for _ in range(count):
        chosen.append(balance.choose())
        balance.sent(chosen[-1])
    return chosen


def widest_gaps(*, published: bool) -> list[int]:
    """Return how far the loads of four engines lie apart after 4,000 requests that end in any order, in 20 runs."""
    gaps = []
    for seed in range(20):
        chance, balance, open_ = random.Random(seed), LoadBalancer(range(4)), []
        for number in range(4000):
            chosen = balance.choose()
            balance.sent(chosen)
            open_.append(chosen)
            if len(open_) > 100:
                balance.done(open_.pop(chance.randrange(len(open_))))
            if published and number % 50 == 0:
                balance.update([[0, count] for count in balance.in_flight.values()])
        gaps.append(max(balance.in_flight.values()) - min(balance.in_flight.values()))
    return gaps


class TestBalance:
    def test_equals_take_turns(self) -> None:
        assert spread(LoadBalancer(range(3)), 7) == [0, 1, 2, 0, 1, 2, 0]
        assert spread(LoadBalancer(range(3), first=4), 4) == [1, 2, 0, 1]

    def test_turns_go_on_when_nothing_is_in_flight(self) -> None:
        balance = LoadBalancer(range(2))
        for turn in range(6):
            chosen = balance.choose()
            assert chosen == turn % 2
            balance.sent(chosen)
            balance.done(chosen)

    def test_the_least_loaded_is_chosen(self) -> None:
        balance = LoadBalancer(range(2))
        spread(balance, 10)
        for _ in range(3):
            balance.done(1)
        assert spread(balance, 4) == [1, 1, 1, 0]

    def test_waiting_requests_weigh_more(self) -> None:
        balance = LoadBalancer(range(2))
        balance.update([[1, 0], [0, 3]])
        assert spread(balance, 3) == [1, 0, 1]

    def test_waiting_requests_weigh_more_the_fuller_the_cache(self) -> None:
        balance = LoadBalancer(range(2))
        balance.update([[2, 0, 0.1], [0, 3, 0.1]])
        assert spread(balance, 1) == [0], "they are about to be taken"
        balance = LoadBalancer(range(2))
        balance.update([[2, 0, 0.9], [0, 3, 0.1]])
        assert spread(balance, 4) == [1] * 4
        balance = LoadBalancer(range(2))
        balance.update([[2, 0, 1.0], [2, 0, 0.6]])
        assert spread(balance, 3) == [1] * 3

    @pytest.mark.parametrize("counts", [[0, 0], [0, 7], [3, 7]])
    def test_of_equal_counts_the_emptier_cache_is_chosen(self, counts: list[float]) -> None:
        for fuller in range(2):
            balance = LoadBalancer(range(2))
            balance.update([[*counts, 0.8 if rank == fuller else 0.3] for rank in range(2)])
            assert balance.choose() == 1 - fuller

    def test_caches_as_full_as_each_other_take_turns(self) -> None:
        balance = LoadBalancer(range(3))
        balance.update([[0, 0, 0.42], [0, 0, 0.41], [0, 0, 0.43]])
        assert spread(balance, 6) == [0, 1, 2, 0, 1, 2]

    def test_what_is_sent_to_a_full_engine_waits_there(self) -> None:
        balance = LoadBalancer(range(2))
        balance.update([[0, 0, 1.0], [0, 3, 0.0]])
        assert spread(balance, 2) == [0, 1], "one request in front of a full cache is as bad as four that run"

    def test_usage_beyond_bounds(self) -> None:
        balance = LoadBalancer(range(2))
        balance.update([[0, 0, float("inf")], [0, 0, -1.0]])
        assert balance.choose() == 1
        with pytest.raises(ValueError, match="NaN"):
            balance.update([[0, 0, 0.5], [0, 0, float("nan")]])
        assert balance.choose() == 1, "nothing of a wrong publication is taken"

    def test_the_other_clients_are_taken_to_do_the_same(self) -> None:
        balance = LoadBalancer(range(2), n_clients=4)
        balance.update([[0, 0], [0, 8]])
        assert spread(balance, 3) == [0, 0, 1], "8 on either side once the other clients have sent theirs"

    def test_what_was_sent_since_counts(self) -> None:
        balance = LoadBalancer(range(2))
        balance.update([[0, 10], [0, 8]])
        assert sorted(spread(balance, 6)) == [0, 0, 1, 1, 1, 1]

    def test_a_late_publication_cannot_hide_what_is_in_flight(self) -> None:
        balance = LoadBalancer(range(2))
        spread(balance, 100)
        balance.update([[0, 0], [0, 0]])
        assert sorted(spread(balance, 10)) == [0] * 5 + [1] * 5

    def test_a_load_stays_balanced(self) -> None:
        assert max(widest_gaps(published=False)) <= 2

    def test_a_load_that_old_publications_describe_stays_balanced_on_average(self) -> None:
        assert mean(widest_gaps(published=True)) <= 7, "of engines chosen at random it is about 10"


class TestLockstep:
    def test_a_wave(self) -> None:
        engine = Lockstep(0)
        assert not engine.running
        assert engine.add(0) == 0
        assert engine.running
        assert engine.add(0) is None
        assert engine.stepped(unfinished=True) is None
        assert engine.step == 1
        assert engine.stepped(unfinished=False) == 0
        assert (engine.wave, engine.running, engine.step) == (1, False, 0)
        assert engine.add(0) == 1

    def test_only_the_first_one_reports(self) -> None:
        engine = Lockstep(1)
        engine.add(0)
        assert engine.stepped(unfinished=False) is None
        assert engine.wave == 1

    def test_being_woken(self) -> None:
        engine = Lockstep(1)
        engine.start(StartWave(3, 1))
        assert not engine.running
        engine.start(StartWave(3, 0))
        assert (engine.running, engine.wave) == (True, 3)
        engine.stepped(unfinished=False)
        engine.start(StartWave(3, None))
        assert not engine.running, "that wave is over"
        engine.start(StartWave(4, None))
        assert engine.running

    def test_a_request_may_know_of_a_later_wave(self) -> None:
        engine = Lockstep(1)
        assert engine.add(5) == 5
