"""Limits of waits: deadlines, cancel events, reports of waits that last."""

from __future__ import annotations

import asyncio

import pytest
from loops import turns

from aioshm.errors import QueueCancelled
from aioshm.wait import limits as module
from aioshm.wait.limits import Stall, seconds, settle


class Clock:
    """A monotonic clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


class TestStall:
    @pytest.mark.parametrize(
        ("again_s", "expected"),
        [((None,), [60, 120, 180]), ((1.0, 59.0), [60, 61, 120, 121, 180, 181])],
        ids=["every interval", "when the report says so"],
    )
    def test_reports_again(self, clock: Clock, again_s: tuple[float | None, ...], expected: list[float]) -> None:
        reports: list[float] = []

        def report(waited: float) -> float | None:
            reports.append(waited)
            return again_s[(len(reports) - 1) % len(again_s)]

        stall = Stall(60, report)
        for tenths in range(10_000, 12_000):
            stall.check(tenths / 10)
        assert reports == expected

    def test_counts_waits_that_follow_each_other_as_one(self, clock: Clock) -> None:
        reports: list[float] = []
        stall = Stall(60, reports.append)
        for _ in range(5):  # 25 s of waiting, and 100 s of something else
            clock.now += 25
            stall.check(clock.now)
            stall.pause()
            clock.now += 100
            stall.resume()
        assert reports == [75]
        assert stall.at - clock.now == 60 - 50

    def test_begins_anew_for_another_wait(self, clock: Clock) -> None:
        reports: list[float] = []
        stall = Stall(60, reports.append)
        clock.now += 50
        stall.restart()
        stall.check(clock.now + 59)
        assert (reports, stall.reported) == ([], False)
        stall.check(clock.now + 61)
        assert (reports, stall.reported) == ([61], True)


async def test_cancel_event_ends_a_wait_for_a_future_and_leaves_the_future() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    cancel = asyncio.Event()
    task = asyncio.ensure_future(settle(future, cancel=cancel))
    await turns(5)
    assert not task.done()
    cancel.set()
    for wait in (task, settle(future, cancel=cancel)):
        with pytest.raises(QueueCancelled):
            await asyncio.wait_for(wait, 10)
    assert not future.done()


@pytest.mark.parametrize(
    ("duration", "text"), [(0.2, "0.2 s"), (0.26, "0.3 s"), (9.94, "9.9 s"), (10, "10 s"), (3600.4, "3600 s")]
)
def test_durations_are_for_people(duration: float, text: str) -> None:
    assert seconds(duration) == text
