"""Waits: look, park, sleep until shortly before a message, spin or nap; no wake-up is lost."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, monotonic_ns

import pytest
from loops import turns
from support import bystander, until
from waiters import End, Told, pollers

from aioshm.errors import QueueCancelled
from aioshm.ring import memory_fence
from aioshm.wait import limits as limits_module
from aioshm.wait.limits import Stall
from aioshm.wait.policy import Step, WaitMode

__all__ = ["pollers"]  # a fixture


class TestGivingUp:
    async def test_when_the_event_was_set_for_a_moment(self) -> None:
        end = End()
        cancel = asyncio.Event()
        task = await end.asleep(cancel=cancel)
        cancel.set()
        cancel.clear()
        with pytest.raises(QueueCancelled):
            await asyncio.wait_for(task, 2)


class TestParking:
    async def test_flag_is_up_while_asleep_and_down_however_the_wait_ends(self) -> None:
        end = End()
        assert end.parked[0] == 0
        for outcome in ("message", "cancelled", "error"):
            end.ready = False
            look = (lambda: 1 / 0 if end.ready else False) if outcome == "error" else end.look
            task = await end.asleep(look=look, cancel=asyncio.Event(), deadline=monotonic() + 60)
            if outcome == "cancelled":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif outcome == "error":
                end.publish()
                with pytest.raises(ZeroDivisionError):
                    await asyncio.wait_for(task, 10)
            else:
                end.publish()
                assert await asyncio.wait_for(task, 10) is True, "other tasks have run"
            assert (end.parked[0], end.loop.pending()) == (0, [])

    async def test_where_the_fence_is_weak_it_looks_again_unasked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits_module, "FULL_FENCE", False)
        end = End()
        task = await end.asleep()
        end.ready = True  # and nobody wakes it
        await asyncio.wait_for(task, 10)
        assert end.parked[0] == 0

    async def test_spurious_wakes_park_the_end_again(self) -> None:
        end = End()
        end.poller.wake()
        task = await end.asleep()
        for number in range(2, 10):
            end.parked[0] = number % 2
            end.poller.wake()
            end.poller.wake()
            await until(lambda parks=number: end.poller.stats.parks == parks, "parking again")
            assert not task.done()
            assert end.parked[0] == 1
        end.publish()
        await asyncio.wait_for(task, 10)
        end.poller.wake()
        assert end.parked[0] == 0


class TestNoWakeUpIsLost:
    async def test_published_between_the_first_look_and_the_flag(self) -> None:
        """The other end has seen the flag down and wakes nobody: the look after the flag must find it."""
        end = End()
        await asyncio.wait_for(end.wait(look=lambda: end.parked[0] == 1), 10)
        assert end.poller.stats.parks == 0

    async def test_woken_between_the_flag_and_the_sleep(self) -> None:
        end = End()

        def look() -> bool:
            if end.parked[0] and end.looks == 0:
                end.looks += 1
                end.poller.wake()
                return False  # it looked just before
            return end.looks > 0

        await asyncio.wait_for(end.wait(look=look), 10)
        assert end.poller.stats.parks == 1


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


MS = 1_000_000
LONG = 3_600_000 * MS


def planned(*waits: list[Step]) -> tuple[End, Told]:
    end = End("adaptive")
    end.poller.policy = told = Told(*waits)
    return end, told


def window(begins_in_ns: int, lasts_ns: int) -> list[Step]:
    begins_ns = monotonic_ns() + begins_in_ns
    return [Step(WaitMode.SLEEP, begins_ns), Step(WaitMode.WINDOW, begins_ns + lasts_ns)]


def begun(lasts_ns: int) -> list[Step]:
    return [Step(WaitMode.WINDOW, monotonic_ns() + lasts_ns)]


def nap(*lengths_ns: int) -> list[Step]:
    return [Step(WaitMode.NAP, monotonic_ns() + length_ns) for length_ns in lengths_ns]


class TestWindows:
    async def test_the_end_sleeps_and_then_spins_with_its_flag_down(self) -> None:
        steps = window(100 * MS, LONG)
        begins_ns = steps[0].until_ns
        end, told = planned(steps)
        task = asyncio.ensure_future(end.wait())
        await until(lambda: end.poller.modes[WaitMode.WINDOW], "the window")
        assert monotonic_ns() >= begins_ns
        assert end.poller.modes[WaitMode.SLEEP] == 1
        assert told.learnt == [("begin", 0, 0), ("missed",)]
        await turns(5)
        assert end.parked[0] == 0, "the other end need not signal"
        end.ready = True
        await asyncio.wait_for(task, 10)
        assert (end.poller.modes[WaitMode.WINDOW], end.poller.modes[WaitMode.SPIN]) == (1, 0)
        assert told.learnt == [("begin", 0, 0), ("missed",), ("hit", False)]

    async def test_a_message_that_comes_early_wakes_it(self) -> None:
        end, told = planned(window(LONG, MS))
        task = await end.asleep()
        end.publish()
        assert await asyncio.wait_for(task, 10) is True
        assert (end.poller.modes[WaitMode.WINDOW], end.parked[0]) == (0, 0)
        assert told.learnt == [("begin", 0, 0), ("hit", True)]

    async def test_reports_and_deadlines_are_kept(self) -> None:
        end, told = planned(window(5 * MS, LONG))
        reports: list[bool] = []
        stall = Stall(0.001, lambda _: reports.append(True))
        with pytest.raises(TimeoutError):
            await end.wait(stall=stall, deadline=monotonic() + 0.05)
        assert (reports, end.parked[0], end.loop.pending()) == ([True], 0, [])
        assert end.poller.modes[WaitMode.WINDOW] == 1
        assert told.learnt == [("begin", 0, 0), ("missed",), ("stopped",)]


class TestNaps:
    async def test_find_what_came_without_a_signal(self) -> None:
        end, told = planned(nap(300 * MS))
        task = asyncio.ensure_future(end.wait())
        await until(lambda: end.poller.stats.naps, "the nap")
        assert end.parked[0] == 0
        end.ready = True  # and nobody wakes it
        assert await asyncio.wait_for(task, 10) is True
        assert told.learnt == [("begin", 0, 0), ("hit", False)]
        assert (end.poller.stats.parks, end.poller.stats.naps, end.poller.modes[WaitMode.SPIN]) == (0, 1, 0)

    async def test_end_with_the_deadline_and_the_event(self) -> None:
        end, _ = planned(nap(MS), nap(*range(MS, 400 * MS, 5 * MS)))
        with pytest.raises(TimeoutError):
            await end.wait(deadline=monotonic())
        cancel = asyncio.Event()
        task = asyncio.ensure_future(end.wait(cancel=cancel))
        await until(lambda: end.poller.stats.naps >= 2, "the nap")
        cancel.set()
        with pytest.raises(QueueCancelled):
            await asyncio.wait_for(task, 10)


async def test_cancelled_anywhere_it_leaves_nothing() -> None:
    rng = random.Random(8)
    end, told = planned()
    outcomes = set()
    for _ in range(70):
        end.ready = False
        spin = [Step(WaitMode.SPIN, monotonic_ns() + 100_000)]
        first = rng.choice([window(100_000, 300_000), begun(5 * MS), nap(30_000), spin])
        told.waits = [[*first, *window(500_000, 100_000)]]
        cancel = asyncio.Event()
        task = asyncio.ensure_future(end.wait(cancel=cancel, deadline=monotonic() + 60))
        actions: list[Callable[[], object]] = [task.cancel, end.poller.wake, end.publish, lambda: None]
        rng.shuffle(actions)
        for action in actions:
            await (turns(rng.randrange(4)) if rng.random() < 0.5 else asyncio.sleep(rng.choice([0, 0.0002, 0.001])))
            action()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, 10)
        outcomes.add(task.cancelled())
        assert (end.parked[0], end.loop.pending()) == (0, [])
    assert outcomes == {True, False}


async def test_no_wake_up_is_lost_by_a_thread_at_any_moment() -> None:
    """The other end publishes whenever it likes, and wakes only whom it finds parked."""
    end, told = planned()
    loop = asyncio.get_running_loop()
    rng = random.Random(9)
    published = 0
    go = threading.Semaphore(0)

    def publish_all() -> None:
        nonlocal published
        for _ in range(100):
            go.acquire()
            for _ in range(rng.randrange(6000)):
                pass
            published += 1
            memory_fence()
            if end.parked[0]:
                loop.call_soon_threadsafe(end.poller.wake)

    end.poller._spin_natively = lambda ns: False
    thread = threading.Thread(target=publish_all)
    thread.start()
    try:
        for number in range(1, 101):
            told.waits = [rng.choice([window(50_000, 50_000), begun(50_000), nap(10_000), []])]
            go.release()
            await end.poller.wait(lambda expected=number: published >= expected, number, 0, deadline=monotonic() + 20)
    finally:
        go.release(100)
        thread.join()
