"""Look, and park: what a wait does when nothing is there yet, how it gives up, and that no wake-up is lost."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest
from loops import turns
from support import bystander, until
from waiters import MODES, End, pollers

from aioshm.config import Wait
from aioshm.errors import QueueCancelled
from aioshm.wait import limits as limits_module
from aioshm.wait.limits import Stall
from aioshm.wait.policy import WaitMode

__all__ = ["pollers"]  # a fixture


class TestLooking:
    @pytest.mark.parametrize("mode", MODES)
    async def test_what_is_there_needs_no_turn_of_the_loop(self, mode: Wait) -> None:
        end = End(mode)
        end.ready = True
        with pytest.raises(StopIteration) as returned:
            end.wait(deadline=0.0).send(None)
        assert returned.value.value is False, "no other task has run"
        assert (end.looks, end.poller.modes, end.parked[0], end.loop.timers) == (1, {}, 0, [])


class TestGivingUp:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("seconds", [-1.0, 0.0, 0.02])
    async def test_at_the_deadline(self, mode: Wait, seconds: float) -> None:
        end = End(mode)
        deadline = monotonic() + seconds
        with pytest.raises(TimeoutError):
            await end.wait(deadline=deadline)
        assert monotonic() >= deadline
        assert (end.parked[0], end.loop.pending()) == (0, [])

    @pytest.mark.parametrize("mode", MODES)
    async def test_when_the_event_is_set_before_or_meanwhile(self, mode: Wait) -> None:
        end = End(mode)
        cancel = asyncio.Event()
        task = asyncio.ensure_future(end.wait(cancel=cancel))
        await until(lambda: end.poller.modes[WaitMode.SPIN] + end.poller.stats.parks, "the wait")
        assert not task.done()
        cancel.set()
        for wait in (task, end.wait(cancel=cancel)):
            with pytest.raises(QueueCancelled):
                await asyncio.wait_for(wait, 10)
            assert (end.parked[0], end.loop.pending()) == (0, [])

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
