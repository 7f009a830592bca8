"""The engine for the next request; and the errors if there is none."""

from __future__ import annotations

import pytest

from aioshm.engine.client.engines import Engines
from aioshm.errors import EngineDead


def registered(*ranks: int, **options: int) -> Engines:
    engines = Engines(ranks, **options)
    for engine in engines:
        engine.register({}, engine.rank, f"pid {engine.rank}", None)
    return engines


def spread(engines: Engines, count: int) -> list[int]:
    chosen = []
    for _ in range(count):
        engine = engines.choose()
        engines.sent(engine)
        chosen.append(engine.rank)
    return chosen


class TestBalance:
    def test_equals_take_turns(self) -> None:
        assert spread(registered(0, 1, 2), 7) == [0, 1, 2, 0, 1, 2, 0]
        assert spread(registered(0, 1, 2, client_index=1, n_clients=3), 4) == [1, 2, 0, 1]
        engines = registered(0, 1)
        for turn in range(6):
            assert spread(engines, 1) == [turn % 2]
            engines[turn % 2].in_flight -= 1

    def test_the_least_loaded_is_chosen(self) -> None:
        engines = registered(0, 1)
        spread(engines, 10)
        engines[1].in_flight -= 3
        assert spread(engines, 4) == [1, 1, 1, 0]

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
        engines = registered(*range(max(2, len(counts))))
        engines.update(counts)
        assert spread(engines, len(chosen)) == chosen

    def test_usage_beyond_bounds(self) -> None:
        engines = registered(0, 1)
        engines.update([[0, 0, float("inf")], [0, 0, -1.0]])
        assert engines.choose().rank == 1
        with pytest.raises(ValueError, match="NaN"):
            engines.update([[0, 0, 0.5], [0, 0, float("nan")]])
        assert engines.choose().rank == 1, "nothing of a wrong publication is taken"

    def test_requests_since_the_publication_and_in_flight_count(self) -> None:
        engines = registered(0, 1)
        engines.update([[0, 10], [0, 8]])
        assert sorted(spread(engines, 6)) == [0, 0, 1, 1, 1, 1]
        engines.update([[0, 0], [0, 0]])  # late: cannot hide the requests in flight
        assert sorted(spread(engines, 4)) == [0, 0, 0, 1]
        engines = registered(0, 1, n_clients=4)  # the other clients are taken to do the same
        engines.update([[0, 0], [0, 8]])
        assert spread(engines, 3) == [0, 0, 1], "8 on either side once the other clients have sent theirs"


def test_engine_is_added_while_another_thread_counts_them() -> None:
    engines = registered(0, 1)
    counting = iter(engines)
    next(counting)
    engines.add(2, b"\2\0")
    assert [each.rank for each in counting] == [1]


def test_engines_that_cannot_be_reached_are_named_before_their_deaths_are_told() -> None:
    engines = Engines([4, 5, 6])
    engines[5].register({}, 1, "pid 5", None)
    engines[5].leaving = True
    for choose in (engines.choose, engines.in_service):
        with pytest.raises(EngineDead) as caught:
            choose()
        assert str(caught.value) == "no engine is left: engines 4, 5, 6 cannot be reached, or are leaving"
        assert (caught.value.engine, caught.value.pid) == (4, None)


def test_an_engine_without_progress_is_passed_over_while_another_is_there() -> None:
    engines = registered(4, 5, 6)
    for rank in (4, 5):
        engines.note_health(rank, "stalled", "at model.py:41 in forward")
    assert spread(engines, 3) == [6, 6, 6]
    assert engines.choose(4).rank == 4, "where its rank is given"
    engines.note_health(6, "stopped", "")
    assert engines.choose().rank in (4, 5), "if all make no progress, the least busy is chosen, as before"
    stalls = [engines[rank].stall for rank in (4, 6)]
    assert stalls == ["engine 4 is stalled: at model.py:41 in forward", "engine 6 is stopped"]
    engines.note_health(4, "running", "")
    assert engines.choose().rank == 4
    assert len(engines.in_service()) == 3, "calls of all engines are for all"
    engines.note_health(7, "stalled", "")  # unknown
    engines[6].register({}, 1, "pid 7", None)
    assert not engines[6].stall, "an engine that registers again makes progress"


def test_a_leaving_or_dead_engine_stays_out_when_it_makes_progress_again() -> None:
    engines = registered(4, 5, 6)
    engines[4].leaving = True
    engines[5].registration = None
    engines[5].death = EngineDead("engine 5 was killed", engine=5)
    engines.note_health(5, "stalled", "")  # late
    assert not engines[5].stall
    for rank in (4, 5):
        engines.note_health(rank, "running", "")
    assert spread(engines, 2) == [6, 6]
    engines[4].leaving = False
    assert {each.rank for each in engines.in_service()} == {4, 6}
