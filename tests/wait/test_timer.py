"""A timer is never early, calls back once, and leaves no descriptor behind; with a timerfd and without one."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from time import monotonic_ns

import pytest
from loops import open_fds, turns
from support import until

from aioshm.wait import timer as timer_module
from aioshm.wait.timer import Timer

MS = 1_000_000


class Noted:
    """A timer and the times when it called back."""

    def __init__(self) -> None:
        self.rings: list[int] = []
        self.timer = Timer(asyncio.get_running_loop(), lambda: self.rings.append(monotonic_ns()))

    async def rung(self, times: int) -> None:
        await until(lambda: len(self.rings) >= times, f"ring number {times}")


@pytest.fixture(params=["timerfd", "no descriptor left", "no timerfd"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "no timerfd":
        monkeypatch.setattr(timer_module, "HAVE_TIMERFD", False)
    elif request.param == "no descriptor left":

        def fail() -> int:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(timer_module, "timerfd_create", fail)
    elif not timer_module.HAVE_TIMERFD:
        pytest.skip("there is no timerfd on this system")
    return str(request.param)


@pytest.fixture(autouse=True)
def no_descriptor_left_behind(nothing_left_behind: None) -> Iterator[None]:
    gc.collect()
    before = {fd for fd, what in open_fds().items() if "timerfd" in what}
    yield
    assert {fd for fd, what in open_fds().items() if "timerfd" in what} == before


async def test_is_never_early_and_rings_once() -> None:
    noted = Noted()
    for number, after_ns in enumerate([3 * MS, 100_000, 50_000, 1_700_000, 0, 10 * MS], 1):
        at_ns = monotonic_ns() + after_ns
        noted.timer.arm(at_ns)
        await noted.rung(number)
        assert noted.rings[-1] >= at_ns
        await turns(20)
        assert len(noted.rings) == number
    for number, passed_ns in enumerate([-(10**18), -1, 0, 1], len(noted.rings) + 1):
        noted.timer.arm(passed_ns)
        await noted.rung(number)
    noted.timer.close()


async def test_armed_anew_it_forgets_the_time_before() -> None:
    noted = Noted()
    noted.timer.arm(monotonic_ns() + 3_600_000 * MS)
    noted.timer.arm(monotonic_ns() + MS)
    await noted.rung(1)
    at_ns = monotonic_ns() + 30 * MS
    noted.timer.arm(monotonic_ns() + MS)
    noted.timer.arm(at_ns)
    await noted.rung(2)
    assert noted.rings[1] >= at_ns
    noted.timer.close()


async def test_takes_no_descriptor_before_it_is_armed(kind: str) -> None:
    before = open_fds()
    noted = Noted()
    assert open_fds() == before
    noted.timer.arm(monotonic_ns() + 3_600_000 * MS)
    assert len(open_fds()) == len(before) + (kind == "timerfd")
    noted.timer.close()
    assert open_fds() == before


async def test_closed_it_is_silent_for_good() -> None:
    noted, other = Noted(), Noted()
    noted.timer.arm(monotonic_ns())
    noted.timer.close()
    noted.timer.close()
    noted.timer.arm(monotonic_ns())
    other.timer.arm(monotonic_ns() + 10 * MS)
    await other.rung(1)
    other.timer.close()
    assert noted.rings == []
