"""The restart policy: how often, and how soon."""

from __future__ import annotations

from typing import Any

import pytest

from aioshm.process.restart import Restart, RestartHistory


def test_first_restart_is_immediate_and_the_next_ones_come_later_and_later_until_a_crash_loop() -> None:
    history = RestartHistory(Restart(max_restarts=6, backoff_s=0.1, backoff_max_s=1.0))
    assert [history.died(0.1 * n, f"cause {n}") for n in range(6)] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.0]
    assert history.restarts == 6
    assert history.died(0.7, "the last one") is None
    assert history.restarts == 6
    assert history.story == (
        "7 deaths within 60 s, and Restart(max_restarts=6) allows no further restart: "
        "cause 0; cause 1; cause 2; cause 3; cause 4; cause 5; the last one"
    )


def test_deaths_of_long_ago_do_not_count() -> None:
    history = RestartHistory(Restart(max_restarts=1, within_s=10))
    for start in (0.0, 11.0, 22.0):
        assert history.died(start, "") == 0.0
    assert history.restarts == 3
    history.started(15.0)  # the replacement was not ready before
    assert history.died(46.9, "again") is None
    assert RestartHistory(Restart(max_restarts=0)).died(5.0, "the only death") is None


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"max_restarts": -1}, ValueError, "max_restarts must be at least 0, not -1"),
        ({"max_restarts": 1.5}, TypeError, "max_restarts must be an int"),
        ({"within_s": 0}, ValueError, "within_s must be a finite number of seconds above 0"),
        ({"backoff_s": float("nan")}, ValueError, "backoff_s"),
        ({"backoff_max_s": "1"}, TypeError, "backoff_max_s"),
        ({"hang_s": 0}, ValueError, "hang_s"),
        ({"kill_stopped": 1}, TypeError, "kill_stopped"),
    ],
)
def test_wrong_values_are_errors(values: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Restart(**values)
