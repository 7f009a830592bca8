"""Who gets requests, without any engine to be reached: the error names each of them."""

from __future__ import annotations

import pytest

from aioshm.engine.client.engines import Engines
from aioshm.errors import EngineDead


def three() -> Engines:
    """Return that of a client of three engines, which have registered."""
    return Engines([4, 5, 6])


def test_engines_that_cannot_be_reached_are_named_before_their_deaths_are_told() -> None:
    engines = three()
    engines.begin_to_leave(5)
    for rank in (4, 6):
        engines.balance.leave_out(rank)
    for choose in (lambda: engines.choose(None), engines.in_service):
        with pytest.raises(EngineDead) as caught:
            choose()
        assert str(caught.value) == (
            "no engine is left: engine 4 cannot be reached; engine 5 is being taken out of service; "
            "engine 6 cannot be reached"
        )
        assert (caught.value.engine, caught.value.pid) == (4, None)


def test_a_death_that_was_told_is_named_with_its_process() -> None:
    engines = three()
    for rank in (4, 5):
        engines.balance.leave_out(rank)
    engines.go_on_without(6, EngineDead("engine 6 (pid 77) was killed", engine=6, pid=77), lambda *_: None)
    with pytest.raises(EngineDead, match=r"^engine 6 \(pid 77\) was killed$") as caught:
        engines.choose(None)
    assert (caught.value.engine, caught.value.pid) == (6, 77)
