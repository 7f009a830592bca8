"""An alarm is never early, rings once, and leaves no descriptor behind; with a timerfd and without one."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from select import select
from time import monotonic_ns

import pytest
from loops import open_fds, turns
from support import until

from aioshm.wait import alarm as alarm_module
from aioshm.wait.alarm import Alarm

MS = 1_000_000


class Bedside:
    """An alarm and the times when it rang."""

    def __init__(self) -> None:
        self.rings: list[int] = []
        self.alarm = Alarm(asyncio.get_running_loop(), lambda: self.rings.append(monotonic_ns()))

    async def rung(self, times: int) -> None:
        await until(lambda: len(self.rings) >= times, f"ring number {times}")


@pytest.fixture(params=["timerfd", "no descriptor left", "no timerfd"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "no timerfd":
        monkeypatch.setattr(alarm_module, "HAVE_TIMERFD", False)
    elif request.param == "no descriptor left":

        def fail() -> int:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(alarm_module, "timerfd_create", fail)
    elif not alarm_module.HAVE_TIMERFD:
        pytest.skip("there is no timerfd on this system")
    return str(request.param)


@pytest.fixture(autouse=True)
def no_descriptor_left_behind(nothing_left_behind: None) -> Iterator[None]:
    gc.collect()
    before = {fd for fd, what in open_fds().items() if "timerfd" in what}
    yield
    assert {fd for fd, what in open_fds().items() if "timerfd" in what} == before


async def test_is_never_early_and_rings_once() -> None:
    bedside = Bedside()
    for number, after_ns in enumerate([3 * MS, 100_000, 50_000, 1_700_000, 0, 10 * MS], 1):
        at_ns = monotonic_ns() + after_ns
        bedside.alarm.arm(at_ns)
        await bedside.rung(number)
        assert bedside.rings[-1] >= at_ns
        await turns(20)
        assert len(bedside.rings) == number
    bedside.alarm.close()


@pytest.mark.parametrize("at_ns", [-(10**18), -1, 0, 1])
async def test_rings_at_once_for_a_time_that_has_passed(at_ns: int) -> None:
    bedside = Bedside()
    bedside.alarm.arm(at_ns)
    await bedside.rung(1)
    bedside.alarm.close()


async def test_armed_anew_it_forgets_the_time_before() -> None:
    bedside = Bedside()
    bedside.alarm.arm(monotonic_ns() + 3_600_000 * MS)
    bedside.alarm.arm(monotonic_ns() + MS)
    await bedside.rung(1)
    at_ns = monotonic_ns() + 30 * MS
    bedside.alarm.arm(monotonic_ns() + MS)
    bedside.alarm.arm(at_ns)
    await bedside.rung(2)
    assert bedside.rings[1] >= at_ns
    bedside.alarm.close()


async def test_armed_anew_before_the_loop_noticed_it_rings_once(kind: str) -> None:
    bedside = Bedside()
    bedside.alarm.arm(monotonic_ns() + 1000)
    at_ns = monotonic_ns() + 5 * MS
    while monotonic_ns() < at_ns - 4 * MS:  # holds the loop until the first has come due
        pass
    bedside.alarm.arm(at_ns)
    await bedside.rung(1)
    assert bedside.rings[0] >= at_ns
    await turns(20)
    assert len(bedside.rings) == 1
    bedside.alarm.close()


async def test_once_it_has_rung_it_leaves_the_loop_alone(kind: str) -> None:
    bedside = Bedside()
    bedside.alarm.arm(monotonic_ns() + 100_000)
    await bedside.rung(1)
    await turns(3)
    assert bedside.alarm.fd < 0 or not select([bedside.alarm.fd], [], [], 0)[0]
    bedside.alarm.close()


async def test_looked_at_it_rings_without_the_loop(kind: str) -> None:
    bedside = Bedside()
    bedside.alarm.arm(monotonic_ns() + 3_600_000 * MS)
    bedside.alarm.look()
    assert not bedside.rings
    if kind == "timerfd":
        bedside.alarm.arm(monotonic_ns() + 100_000)
        assert select([bedside.alarm.fd], [], [], 10)[0]
        bedside.alarm.look()
        assert len(bedside.rings) == 1
        assert not select([bedside.alarm.fd], [], [], 0)[0]
    bedside.alarm.close()


async def test_its_callback_may_arm_it() -> None:
    bedside = Bedside()

    def again() -> None:
        bedside.rings.append(monotonic_ns())
        if len(bedside.rings) < 5:
            alarm.arm(monotonic_ns() + 100_000)

    alarm = Alarm(asyncio.get_running_loop(), again)
    alarm.arm(monotonic_ns())
    await bedside.rung(5)
    alarm.close()


async def test_its_callback_may_close_it() -> None:
    bedside = Bedside()

    def close() -> None:
        bedside.rings.append(monotonic_ns())
        alarm.close()

    alarm = Alarm(asyncio.get_running_loop(), close)
    alarm.arm(monotonic_ns())
    await bedside.rung(1)
    await turns(20)


async def test_takes_no_descriptor_before_it_is_armed(kind: str) -> None:
    before = open_fds()
    bedside = Bedside()
    assert open_fds() == before
    bedside.alarm.arm(monotonic_ns() + 3_600_000 * MS)
    assert len(open_fds()) == len(before) + (kind == "timerfd")
    bedside.alarm.close()
    assert open_fds() == before


async def test_closed_it_is_silent_for_good() -> None:
    bedside, other = Bedside(), Bedside()
    bedside.alarm.arm(monotonic_ns())
    bedside.alarm.close()
    bedside.alarm.close()
    bedside.alarm.arm(monotonic_ns())
    other.alarm.arm(monotonic_ns() + 10 * MS)
    await other.rung(1)
    other.alarm.close()
    assert bedside.rings == []


def test_may_be_closed_after_its_loop() -> None:
    alarms = []

    async def arm() -> None:
        alarms.append(Alarm(asyncio.get_running_loop(), list))
        alarms[0].arm(monotonic_ns() + 3_600_000 * MS)

    asyncio.run(arm())
    alarms[0].close()
