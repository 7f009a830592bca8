"""Look, and park: what a wait does when nothing is there yet, how it gives up, and that no wake-up is lost."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest
from support import bystander, until
from waiters import End, pollers

from aioshm.errors import QueueCancelled
from aioshm.wait import limits as limits_module

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
