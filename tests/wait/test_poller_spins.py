"""Spin, and report: when a wait spins, what it tells about long ones, and that cancelling it leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, monotonic_ns

import pytest
from loops import turns
from support import bystander, until
from waiters import MODES, End, Told, pollers

from aioshm.config import Wait
from aioshm.wait.limits import Stall
from aioshm.wait.policy import Step, WaitMode

__all__ = ["pollers"]  # a fixture


class TestSpinning:
    @pytest.mark.parametrize(("yields", "looks"), [(False, 1), (True, 100)])
    async def test_tells_whether_the_other_tasks_have_run(self, yields: bool, looks: int) -> None:
        end = End("spin")

        def look() -> bool:
            end.looks += 1
            return end.looks > looks

        async with bystander() as other:
            assert await end.wait(look=look) is yields
            assert (other.turns > 0) is yields

    async def test_mode_adaptive_asks_the_policy(self) -> None:
        end = End(mode="adaptive")
        now = monotonic_ns()
        first, second = [Step(WaitMode.SPIN, now + 5_000_000_000)], [Step(WaitMode.SPIN, now)]
        told = end.poller.policy = Told(first, second)
        task = asyncio.ensure_future(end.poller.wait(end.look, 3, 4))
        await turns(5)
        end.ready = True
        await asyncio.wait_for(task, 10)
        assert told.learnt == [("begin", 3, 4), ("hit", False)]
        end.ready = False
        task = await end.asleep()
        assert told.learnt[2:] == [("begin", 0, 0), ("missed",)]
        end.publish()
        await task
        assert told.learnt[4:] == [("hit", True)]
        assert (end.poller.modes[WaitMode.SPIN], end.poller.stats.parks) == (2, 1)


class TestStalls:
    @pytest.mark.slow_on_uvloop
    @pytest.mark.parametrize("mode", ["adaptive", "park"])
    async def test_are_reported_again_and_again(self, mode: Wait) -> None:
        end = End(mode)
        reports: list[float] = []
        stall = Stall(0.2, lambda _: reports.append(monotonic()))
        due = stall.at
        task = asyncio.ensure_future(end.wait(stall=stall))
        await until(lambda: reports, "the report")
        assert due <= reports[0]
        for _ in range(10):
            end.poller.wake()
            await turns(3)
        assert len(reports) == 1
        await until(lambda: len(reports) == 3, "two more")
        assert reports[1] - reports[0] > 0.19 < reports[2] - reports[1]
        end.publish()
        await asyncio.wait_for(task, 10)
        assert (len(reports), end.loop.pending()) == (3, [])

    async def test_are_reported_by_a_spinning_end(self) -> None:
        end = End("spin")
        reports: list[bool] = []
        task = asyncio.ensure_future(end.wait(stall=Stall(0.01, lambda _: reports.append(True))))
        await until(lambda: reports, "the report")
        looks = end.looks
        await until(lambda: end.looks > looks + 3, "spinning on")
        end.ready = True
        await asyncio.wait_for(task, 10)
        assert reports


@pytest.mark.parametrize("mode", MODES)
async def test_cancelled_anywhere_it_leaves_nothing(mode: Wait) -> None:
    rng = random.Random(5)
    end = End(mode)
    cancel = asyncio.Event()
    outcomes = set()
    for _ in range(200):
        end.ready = False
        stall = Stall(60, lambda _: None)
        task = asyncio.ensure_future(end.wait(cancel=cancel, deadline=monotonic() + 60, stall=stall))
        actions: list[Callable[[], object]] = [task.cancel, end.poller.wake, end.publish]
        rng.shuffle(actions)
        for action in actions:
            await turns(rng.randrange(4))
            action()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, 10)
        outcomes.add(task.cancelled())
        assert end.parked[0] == 0
        assert end.loop.pending() == []
    assert outcomes == {True, False}
    await turns(5)
    assert asyncio.all_tasks() == {asyncio.current_task()}
