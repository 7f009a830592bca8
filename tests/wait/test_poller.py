"""Look, spin, park: what a wait does, and that nothing of it stays behind."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, monotonic_ns
from typing import Any

import pytest
from loops import WatchedLoop, turns, until

from aioshm.config import Wait
from aioshm.errors import QueueCancelled
from aioshm.ring import memory_fence
from aioshm.wait import poller as poller_module
from aioshm.wait.poller import Poller, Stall
from aioshm.wait.predictor import Predictor

MODES: list[Wait] = ["adaptive", "spin", "park"]


class End:
    """One end: a flag for what is waited for, a parked flag, a poller and the loop that it sees."""

    def __init__(self, mode: Wait = "park", *, may_spin: bool = True) -> None:
        self.ready = False
        self.looks = 0
        self.parked = bytearray(1)
        self.loop = WatchedLoop()
        self.predictor = Predictor(may_spin=may_spin)
        self.poller = Poller(self.loop, memoryview(self.parked), self.predictor, mode)  # type: ignore[arg-type]

    def look(self) -> bool:
        self.looks += 1
        return self.ready

    def wait(self, **kwargs: Any) -> Any:
        return self.poller.wait(kwargs.pop("look", self.look), 0, 0, **kwargs)

    async def asleep(self, **kwargs: Any) -> asyncio.Task[bool]:
        """Start a wait and return it once it has parked."""
        parks = self.poller.stats.parks
        task = asyncio.ensure_future(self.wait(**kwargs))
        await until(lambda: self.poller.stats.parks > parks or task.done(), "parking")
        assert self.parked[0] == 1
        return task

    def publish(self) -> None:
        """Do what the other end does: publish, fence, and wake this one if it is parked."""
        self.ready = True
        memory_fence()
        if self.parked[0]:
            self.poller.wake()


class TestLooking:
    @pytest.mark.parametrize("mode", MODES)
    async def test_what_is_there_needs_no_turn_of_the_loop(self, mode: Wait) -> None:
        end = End(mode)
        end.ready = True
        with pytest.raises(StopIteration) as returned:
            end.wait(deadline=0.0).send(None)
        assert returned.value.value is False, "no other task has run"
        stats = end.poller.stats
        assert (end.looks, stats.spins, stats.parks, end.parked[0], end.loop.timers) == (1, 0, 0, 0, [])

    async def test_what_is_there_comes_before_a_cancel_event_and_a_deadline(self) -> None:
        end = End()
        end.ready = True
        cancel = asyncio.Event()
        cancel.set()
        await end.wait(cancel=cancel, deadline=0.0)
        assert end.looks == 1


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
    async def test_when_the_event_was_set_before(self, mode: Wait) -> None:
        end = End(mode)
        cancel = asyncio.Event()
        cancel.set()
        with pytest.raises(QueueCancelled):
            await end.wait(cancel=cancel)
        assert (end.parked[0], end.loop.pending()) == (0, [])

    @pytest.mark.parametrize("mode", MODES)
    async def test_when_the_event_is_set_meanwhile(self, mode: Wait) -> None:
        end = End(mode)
        cancel = asyncio.Event()
        task = asyncio.ensure_future(end.wait(cancel=cancel))
        await until(lambda: end.poller.stats.spins + end.poller.stats.parks, "the wait")
        assert not task.done()
        cancel.set()
        with pytest.raises(QueueCancelled):
            await asyncio.wait_for(task, 10)
        assert (end.parked[0], end.loop.pending()) == (0, [])

    async def test_when_the_event_was_set_for_a_moment(self) -> None:
        end = End()
        cancel = asyncio.Event()
        task = await end.asleep(cancel=cancel)
        cancel.set()
        cancel.clear()
        with pytest.raises(QueueCancelled):
            await asyncio.wait_for(task, 2)

    async def test_not_because_of_an_event_that_is_not_set(self) -> None:
        end = End()
        task = await end.asleep(cancel=asyncio.Event(), deadline=monotonic() + 60)
        end.publish()
        await asyncio.wait_for(task, 10)
        assert end.loop.pending() == []


class TestParking:
    async def test_the_flag_is_up_while_asleep(self) -> None:
        end = End()
        assert end.parked[0] == 0
        task = await end.asleep()
        assert end.parked[0] == 1
        end.publish()
        await asyncio.wait_for(task, 10)
        assert end.parked[0] == 0
        assert end.poller.stats.parks == 1

    async def test_it_tells_that_the_other_tasks_have_run(self) -> None:
        end = End()
        task = await end.asleep()
        end.publish()
        assert await asyncio.wait_for(task, 10) is True

    async def test_the_flag_is_down_after_a_cancellation(self) -> None:
        end = End()
        task = await end.asleep(cancel=asyncio.Event(), deadline=monotonic() + 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (end.parked[0], end.loop.pending()) == (0, [])

    async def test_the_flag_is_down_after_an_error_in_the_look(self) -> None:
        end = End()
        task = await end.asleep(look=lambda: 1 / 0 if end.ready else False, deadline=monotonic() + 60)
        end.publish()
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(task, 10)
        assert (end.parked[0], end.loop.pending()) == (0, [])

    async def test_an_idle_end_sets_no_timer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(poller_module, "STRONG_ORDER", True)
        end = End()
        task = await end.asleep()
        for _ in range(5):
            end.poller.wake()
            await turns(3)
        assert end.loop.timers == []
        looks = end.looks
        await turns(100)
        assert end.looks == looks, "it is asleep"
        end.publish()
        await task

    async def test_one_that_has_a_deadline_sets_one_timer(self) -> None:
        end = End()
        task = await end.asleep(deadline=monotonic() + 60)
        assert len(end.loop.pending()) == 1
        end.poller.wake()
        await until(lambda: end.poller.stats.parks == 2, "parking again")
        assert len(end.loop.pending()) == 1
        end.publish()
        await task
        assert end.loop.pending() == []

    async def test_where_the_fence_is_weak_it_looks_again_unasked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(poller_module, "STRONG_ORDER", False)
        end = End()
        task = await end.asleep()
        end.ready = True  # and nobody wakes it
        await asyncio.wait_for(task, 10)
        assert end.parked[0] == 0

    async def test_spurious_wakes(self) -> None:
        end = End()
        task = await end.asleep()
        for number in range(2, 30):
            end.poller.wake()
            end.poller.wake()
            await until(lambda parks=number: end.poller.stats.parks == parks, "parking again")
            assert not task.done()
            assert end.parked[0] == 1
        end.publish()
        await asyncio.wait_for(task, 10)
        assert end.parked[0] == 0

    async def test_a_wake_that_nobody_waits_for_is_harmless(self) -> None:
        end = End()
        end.poller.wake()
        task = await end.asleep()
        end.publish()
        end.poller.wake()
        await task
        end.poller.wake()
        end.ready = False
        task = await end.asleep()
        assert not task.done()
        end.publish()
        await task

    async def test_the_flag_may_have_been_lowered_by_the_one_who_wakes(self) -> None:
        end = End()
        task = await end.asleep()
        end.parked[0] = 0
        end.poller.wake()
        await until(lambda: end.poller.stats.parks == 2, "parking again")
        assert end.parked[0] == 1
        end.publish()
        await task


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

    async def test_woken_between_two_sleeps(self) -> None:
        end = End()
        task = await end.asleep()
        end.poller.wake()  # for nothing
        end.publish()  # before the first wake-up has had any effect
        await asyncio.wait_for(task, 10)

    @pytest.mark.parametrize("mode", ["park", "adaptive"])
    async def test_by_a_thread_at_any_moment(self, mode: Wait) -> None:
        """The other end publishes whenever it likes, and wakes only whom it finds parked."""
        end = End(mode)
        loop = asyncio.get_running_loop()
        published = 0
        go = threading.Semaphore(0)
        rng = random.Random(4)

        def publish_all() -> None:
            nonlocal published
            for _ in range(1000):
                go.acquire()
                for _ in range(rng.randrange(300)):
                    pass
                published += 1
                memory_fence()
                if end.parked[0]:
                    loop.call_soon_threadsafe(end.poller.wake)

        thread = threading.Thread(target=publish_all)
        thread.start()
        try:
            for number in range(1, 1001):
                go.release()
                await end.poller.wait(
                    lambda expected=number: published >= expected, number, monotonic_ns(), deadline=monotonic() + 20
                )
        finally:
            go.release(1000)
            thread.join()
        assert end.poller.stats.parks + end.poller.stats.hits > 0


class TestSpinning:
    @pytest.mark.parametrize(("yields", "looks"), [(False, 20), (True, 100_000)])
    async def test_tells_whether_the_other_tasks_have_run(self, yields: bool, looks: int) -> None:
        end = End("spin")
        turns_of_others = 0

        async def other() -> None:
            nonlocal turns_of_others
            while True:
                turns_of_others += 1
                await asyncio.sleep(0)

        def look() -> bool:
            end.looks += 1
            return end.looks > looks

        task = asyncio.ensure_future(other())
        assert await end.wait(look=look) is yields
        assert (turns_of_others > 0) is yields
        task.cancel()

    async def test_lets_the_other_tasks_run(self) -> None:
        end = End("spin")
        task = asyncio.ensure_future(end.wait())
        await turns(200)
        assert not task.done()
        assert end.parked[0] == 0
        end.ready = True
        await asyncio.wait_for(task, 10)
        assert (end.poller.stats.parks, end.poller.stats.hits) == (0, 1)

    async def test_mode_park_never_does(self) -> None:
        end = End("park")
        for _ in range(5):
            end.ready = False
            task = await end.asleep()
            end.publish()
            await task
        assert (end.poller.stats.spins, end.poller.stats.parks) == (0, 5)

    async def test_mode_adaptive_asks_the_predictor(self) -> None:
        end = End(may_spin=True, mode="adaptive")
        learnt = []

        class Told(Predictor):
            def budget_ns(self, count: int, at_ns: int) -> int:
                learnt.append((count, at_ns))
                return 5_000_000_000 if len(learnt) == 1 else 200_000

            def spun(self, hit: bool) -> None:
                learnt.append(hit)

        end.poller._predictor = Told(may_spin=True)
        task = asyncio.ensure_future(end.poller.wait(end.look, 3, 4))
        await turns(5)
        end.ready = True
        await asyncio.wait_for(task, 10)
        assert learnt == [(3, 4), True]
        end.ready = False
        task = await end.asleep()
        assert learnt[2:] == [(0, 0), False]
        end.publish()
        await task
        stats = end.poller.stats
        assert (stats.spins, stats.hits, stats.parks) == (2, 1, 1)
        assert stats.spin_ns >= 200_000

    async def test_not_where_the_predictor_forbids_it(self) -> None:
        end = End("adaptive", may_spin=False)
        task = await end.asleep()
        end.publish()
        await task
        assert end.poller.stats.spins == 0


class TestStalls:
    @pytest.mark.parametrize("mode", ["adaptive", "park"])
    async def test_are_reported_once(self, mode: Wait) -> None:
        end = End(mode)
        reports: list[float] = []
        stall = Stall(0.01, lambda: reports.append(monotonic()))
        task = asyncio.ensure_future(end.wait(stall=stall))
        await until(lambda: reports, "the report")
        assert reports[0] >= stall.at
        for _ in range(10):
            end.poller.wake()
            await turns(3)
        assert end.loop.pending() == [], "nothing is due any more"
        end.publish()
        await asyncio.wait_for(task, 10)
        assert len(reports) == 1

    async def test_are_reported_once_by_a_spinning_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(poller_module, "SPIN_ROUND_NS", 1_000_000)
        end = End("spin")
        reports: list[bool] = []
        task = asyncio.ensure_future(end.wait(stall=Stall(0.01, lambda: reports.append(True))))
        await until(lambda: reports, "the report")
        spins = end.poller.stats.spins
        await until(lambda: end.poller.stats.spins > spins + 3, "spinning on")
        end.ready = True
        await asyncio.wait_for(task, 10)
        assert len(reports) == 1

    async def test_are_none_while_things_move(self) -> None:
        end = End()
        reports: list[bool] = []
        for _ in range(5):
            end.ready = False
            task = await end.asleep(stall=Stall(60, lambda: reports.append(True)))
            assert len(end.loop.pending()) == 1
            end.publish()
            await task
        assert reports == []
        assert end.loop.pending() == []

    async def test_do_not_end_the_wait_for_its_deadline(self) -> None:
        end = End()
        reports: list[bool] = []
        with pytest.raises(TimeoutError):
            await end.wait(stall=Stall(0.005, lambda: reports.append(True)), deadline=monotonic() + 0.05)
        assert reports == [True]


@pytest.mark.parametrize("mode", MODES)
async def test_cancelled_anywhere_it_leaves_nothing(mode: Wait) -> None:
    rng = random.Random(5)
    end = End(mode)
    cancel = asyncio.Event()
    outcomes = set()
    for _ in range(400):
        end.ready = False
        stall = Stall(60, lambda: None)
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
