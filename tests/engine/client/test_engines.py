"""The engine for the next request; and the errors if there is none."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from aioshm.engine.client.engines import Engines, LoadBalancer
from aioshm.errors import EngineDead


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
    """Return how far the loads of four engines lie apart after 2,000 requests that end in any order, in 10 runs."""
    gaps = []
    for seed in range(10):
        chance = random.Random(seed)
        balance = LoadBalancer(range(4))
        open_ = []
        for number in range(2000):
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
        balance = LoadBalancer(range(2))
        for turn in range(6):
            assert spread(balance, 1) == [turn % 2]
            balance.done(turn % 2)

    def test_the_least_loaded_is_chosen(self) -> None:
        balance = LoadBalancer(range(2))
        spread(balance, 10)
        for _ in range(3):
            balance.done(1)
        assert spread(balance, 4) == [1, 1, 1, 0]

    @pytest.mark.parametrize(
        ("counts", "chosen"),
        [
            pytest.param([[1, 0], [0, 3]], [1, 0, 1], id="waiting requests weigh more"),
            pytest.param([[2, 0, 0.1], [0, 3, 0.1]], [0], id="but not where the cache has room"),
            pytest.param([[2, 0, 0.9], [0, 3, 0.1]], [1] * 4, id="and more the fuller the cache"),
            pytest.param([[2, 0, 1.0], [2, 0, 0.6]], [1] * 3, id="and more in the fuller of two caches"),
            pytest.param([[0, 0, 0.42], [0, 0, 0.41], [0, 0, 0.43]], [0, 1, 2, 0, 1, 2], id="usage counts in tenths"),
            pytest.param([[0, 0, 1.0], [0, 3, 0.0]], [0, 1], id="one request before a full cache is as four that run"),
            pytest.param([[0, 90]], [1, 1, 1], id="an engine that was just added has no counts"),
        ],
    )
    def test_published_counts_decide(self, counts: list[list[float]], chosen: list[int]) -> None:
        balance = LoadBalancer(range(max(2, len(counts))))
        balance.update(counts)
        assert spread(balance, len(chosen)) == chosen

    @pytest.mark.parametrize("counts", [[0, 0], [0, 7], [3, 7]])
    def test_of_equal_counts_the_emptier_cache_is_chosen(self, counts: list[float]) -> None:
        for fuller in range(2):
            balance = LoadBalancer(range(2))
            balance.update([[*counts, 0.8 if rank == fuller else 0.3] for rank in range(2)])
            assert balance.choose() == 1 - fuller

    def test_usage_beyond_bounds(self) -> None:
        balance = LoadBalancer(range(2))
        balance.update([[0, 0, float("inf")], [0, 0, -1.0]])
        assert balance.choose() == 1
        with pytest.raises(ValueError, match="NaN"):
            balance.update([[0, 0, 0.5], [0, 0, float("nan")]])
        assert balance.choose() == 1, "nothing of a wrong publication is taken"

    def test_requests_since_the_publication_and_in_flight_count(self) -> None:
        balance = LoadBalancer(range(2))
        balance.update([[0, 10], [0, 8]])
        assert sorted(spread(balance, 6)) == [0, 0, 1, 1, 1, 1]
        balance.update([[0, 0], [0, 0]])  # late: cannot hide the requests in flight
        assert sorted(spread(balance, 4)) == [0, 0, 0, 1]
        balance = LoadBalancer(range(2), n_clients=4)  # the other clients are taken to do the same
        balance.update([[0, 0], [0, 8]])
        assert spread(balance, 3) == [0, 0, 1], "8 on either side once the other clients have sent theirs"

    def test_a_load_stays_balanced(self) -> None:
        assert max(widest_gaps(published=False)) <= 2

    def test_a_load_that_old_publications_describe_stays_balanced_on_average(self) -> None:
        assert mean(widest_gaps(published=True)) <= 7, "of engines chosen at random it is about 10"


def three() -> Engines:
    return Engines([4, 5, 6])


def test_engines_that_cannot_be_reached_are_named_before_their_deaths_are_told() -> None:
    engines = three()
    engines.begin_to_leave(5)
    for rank in (4, 6):
        engines.balance.leave_out(rank)
    for choose in (lambda: engines.choose(None), engines.in_service):
        with pytest.raises(EngineDead) as caught:
            choose()
        assert str(caught.value) == "no engine is left: engines 4, 5, 6 cannot be reached, or are leaving"
        assert (caught.value.engine, caught.value.pid) == (4, None)


def test_an_engine_without_progress_is_passed_over_while_another_is_there() -> None:
    engines = three()
    for rank in (4, 5):
        engines.note_health(rank, "stalled", "at model.py:41 in forward")
    for _ in range(3):
        assert engines.choose(None) == 6
        engines.balance.sent(6)
    assert engines.choose(4) == 4, "where its rank is given"
    assert engines.in_service() == [4, 5, 6], "calls of all engines are for all"
    engines.note_health(6, "stopped", "")
    assert engines.choose(None) in (4, 5), "if all make no progress, the least busy is chosen, as before"
    assert engines.stalled[4] == "engine 4 is stalled: at model.py:41 in forward"
    assert engines.stalled[6] == "engine 6 is stopped"
    engines.note_health(4, "running", "")
    assert engines.choose(None) == 4


def test_a_leaving_or_dead_engine_stays_out_when_it_makes_progress_again() -> None:
    engines = three()
    engines.register(engines.names[4], [b""])
    engines.note_health(4, "stalled", "")
    engines.note_health(5, "stalled", "")
    engines.begin_to_leave(4)
    engines.go_on_without(5, EngineDead("engine 5 was killed", engine=5), lambda *_: None)
    assert list(engines.stalled) == [4]
    for rank in (4, 5):
        engines.note_health(rank, "running", "")
    assert engines.choose(None) == 6
    engines.note_health(5, "stalled", "")  # late
    engines.note_health(7, "stalled", "")  # unknown
    assert engines.stalled == {}
    engines.stay(4)
    assert set(engines.balance.choices) == {4, 6}
    engines.note_health(6, "stalled", "")
    engines.register(engines.names[6], [b""])
    assert engines.stalled == {}, "an engine that registers again makes progress"
