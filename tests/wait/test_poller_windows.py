"""Sleep until shortly before the message, then spin; or nap: what a wait does as its predictor has planned."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, monotonic_ns

import pytest
from loops import open_fds, turns
from support import until
from waiters import End, Told, pollers

from aioshm.errors import QueueCancelled
from aioshm.ring import memory_fence
from aioshm.wait import apart
from aioshm.wait.poller import INLINE_SPIN_NS
from aioshm.wait.predictor import NAPS, Predictor
from aioshm.wait.rhythm import Plan
from aioshm.wait.stall import Stall

__all__ = ["pollers"]  # a fixture

MS = 1_000_000
LONG = 3_600_000 * MS


def planned(*plans: Plan, after_miss: tuple[Plan, ...] = ()) -> tuple[End, Told]:
    end = End("adaptive")
    told = Told(*plans, after_miss=after_miss)
    end.poller._predictor = told
    return end, told


def window(begins_in_ns: int, lasts_ns: int) -> Plan:
    now = monotonic_ns()
    return Plan(wake_at_ns=now + begins_in_ns, until_ns=now + begins_in_ns + lasts_ns)


class TestWindows:
    async def test_the_end_sleeps_and_then_spins_with_its_flag_down(self) -> None:
        end, told = planned(window(100 * MS, LONG))
        task = await end.asleep()
        await until(lambda: end.poller.stats.spins, "the window")
        assert told.late[0] > 0, "the timer is never early"
        await turns(5)
        assert end.parked[0] == 0, "the other end need not signal"
        end.ready = True
        await asyncio.wait_for(task, 10)
        stats = end.poller.stats
        assert (stats.windows, stats.window_hits, stats.hits) == (1, 1, 1)
        assert told.learnt == [("plan", 0, 0)]
        end.ready = False
        task = await end.asleep()
        assert told.learnt[1:] == [("watched", True), ("plan", 0, 0)], "the account is settled before the next plan"
        end.publish()
        await asyncio.wait_for(task, 10)

    async def test_a_message_that_comes_early_wakes_it(self) -> None:
        end, told = planned(window(LONG, MS))
        task = await end.asleep()
        end.publish()
        assert await asyncio.wait_for(task, 10) is True
        assert (end.poller.stats.windows, end.parked[0], told.late) == (0, 0, [])

    async def test_after_one_in_vain_it_asks_again_and_then_parks(self) -> None:
        end, told = planned(window(MS, 100_000), after_miss=(window(3 * MS, 100_000),))
        task = asyncio.ensure_future(end.wait())
        await until(lambda: told.learnt.count(("after miss",)) == 2, "two windows")
        await until(lambda: end.parked[0], "parking")
        assert end.poller.stats.windows == 2
        looks = end.looks
        await asyncio.sleep(0.02)
        assert end.looks == looks, "it sleeps for good"
        end.publish()
        await asyncio.wait_for(task, 10)
        assert end.poller.stats.window_hits == 0

    async def test_one_that_has_begun_is_spun_through_at_once(self) -> None:
        end, told = planned(window(-MS, LONG))
        task = asyncio.ensure_future(end.wait())
        await until(lambda: end.poller.stats.spins, "the window")
        assert (told.late, end.poller.stats.parks) == ([], 0)
        end.ready = True
        await asyncio.wait_for(task, 10)

    async def test_wakes_for_nothing_do_not_begin_one(self) -> None:
        end, _ = planned(window(LONG, MS))
        task = await end.asleep()
        for number in range(2, 10):
            end.poller.wake()
            await until(lambda parks=number: end.poller.stats.parks == parks, "parking again")
        assert end.poller.stats.spins == 0
        end.publish()
        await asyncio.wait_for(task, 10)

    async def test_other_tasks_run_meanwhile(self) -> None:
        end, _ = planned(window(-MS, LONG))
        task = asyncio.ensure_future(end.wait())
        await turns(200)
        assert not task.done()
        end.ready = True
        assert await asyncio.wait_for(task, 10) is True

    async def test_the_alarm_of_an_earlier_wait_is_only_a_hint(self) -> None:
        end, _ = planned(window(200 * MS, MS))
        task = await end.asleep()
        end.publish()
        await asyncio.wait_for(task, 10)
        end.ready = False
        task = await end.asleep()
        parks = end.poller.stats.parks
        await until(lambda: end.poller.stats.parks > parks, "the stale ring")
        assert not task.done()
        assert end.parked[0] == 1
        end.publish()
        await asyncio.wait_for(task, 10)

    async def test_reports_and_deadlines_are_kept(self) -> None:
        end, told = planned(window(5 * MS, LONG))
        reports: list[bool] = []
        stall = Stall(0.001, lambda _: reports.append(True))
        with pytest.raises(TimeoutError):
            await end.wait(stall=stall, deadline=monotonic() + 0.05)
        assert (reports, end.parked[0], end.loop.pending()) == ([True], 0, [])
        assert end.poller.stats.windows == 1
        assert told.learnt == [("plan", 0, 0), ("watched", True)], "paid for, but not missed"

    async def test_one_that_begins_before_they_are_due_needs_no_timer_of_the_loop(self) -> None:
        end, _ = planned(window(LONG, MS))
        two_hours_s = 2 * LONG / 1e9
        task = await end.asleep(stall=Stall(two_hours_s, lambda _: None), deadline=monotonic() + two_hours_s)
        assert end.loop.timers == []
        end.publish()
        assert await asyncio.wait_for(task, 10) is True

    async def test_after_one_in_vain_they_are_due_as_before(self) -> None:
        end, told = planned(window(5 * MS, 100_000))
        reports: list[bool] = []
        task = asyncio.ensure_future(end.wait(stall=Stall(0.1, lambda _: reports.append(True))))
        await until(lambda: reports, "the report")
        assert told.learnt[-1] == ("after miss",), "it parks"
        end.publish()
        await asyncio.wait_for(task, 10)
        assert (end.parked[0], end.loop.pending()) == (0, [])

    async def test_a_deadline_before_one_is_kept(self) -> None:
        end, told = planned(window(LONG, MS))
        with pytest.raises(TimeoutError):
            await end.wait(stall=Stall(3600, lambda _: None), deadline=monotonic() + 0.02)
        assert (told.learnt, end.parked[0], end.loop.pending()) == ([("plan", 0, 0)], 0, [])


class TestNaps:
    async def test_find_what_came_without_a_signal(self) -> None:
        end, told = planned(Plan(nap_ns=20 * MS))
        task = asyncio.ensure_future(end.wait())
        await until(lambda: end.poller.stats.naps, "the nap")
        assert end.parked[0] == 0
        end.ready = True  # and nobody wakes it
        assert await asyncio.wait_for(task, 10) is True
        assert told.learnt == [("plan", 0, 0), ("spun", True)]
        assert (end.poller.stats.parks, end.poller.stats.naps, end.poller.stats.spins) == (0, 1, 0)

    async def test_in_vain_end_in_parking(self) -> None:
        end, told = planned(Plan(nap_ns=50_000))
        task = await end.asleep()
        assert end.poller.stats.naps == NAPS
        assert told.learnt == [("plan", 0, 0), ("spun", False)]
        end.publish()
        await asyncio.wait_for(task, 10)

    async def test_hold_nothing_up(self) -> None:
        end, _ = planned(Plan(nap_ns=LONG))
        task = asyncio.ensure_future(end.wait())
        await until(lambda: end.poller.stats.naps, "the nap")
        end.ready = True
        end.poller.wake()
        await asyncio.wait_for(task, 10)

    async def test_end_with_the_deadline_and_the_event(self) -> None:
        end, _ = planned(Plan(nap_ns=MS), Plan(nap_ns=5 * MS))
        with pytest.raises(TimeoutError):
            await end.wait(deadline=monotonic())
        cancel = asyncio.Event()
        task = asyncio.ensure_future(end.wait(cancel=cancel))
        await until(lambda: end.poller.stats.naps >= 2, "the nap")
        cancel.set()
        with pytest.raises(QueueCancelled):
            await asyncio.wait_for(task, 10)


class TestInlineSpin:
    async def test_is_worth_it_in_mode_spin_alone_before_anything_is_known(self) -> None:
        assert End("spin").poller.inline_spin_ns == INLINE_SPIN_NS
        assert End("adaptive").poller.inline_spin_ns == 0
        assert End("park").poller.inline_spin_ns == 0

    @pytest.mark.parametrize("gap_ns", [5_000, 5 * MS])
    async def test_is_worth_it_in_a_stream(self, gap_ns: int) -> None:
        end = End("adaptive")
        end.spin = lambda ns: end.ready  # type: ignore[method-assign]
        for count in range(1, 40):
            at_ns = monotonic_ns() - LONG + count * gap_ns
            looks = iter([False])
            await end.poller.wait(lambda looks=looks: next(looks, True), count, at_ns)
        assert end.poller.inline_spin_ns == (INLINE_SPIN_NS if gap_ns < MS else 0)


async def test_a_steady_stream_is_met_in_windows() -> None:
    """The end that publishes is a thread; what is asserted holds on a busy machine too."""
    end = End("adaptive")
    loop = asyncio.get_running_loop()
    published: list[int] = []
    stop = threading.Event()

    def publish_all() -> None:
        while not stop.wait(0.005):
            published.append(monotonic_ns())
            memory_fence()
            if end.parked[0]:
                loop.call_soon_threadsafe(end.poller.wake)

    end.poller._spin_natively = lambda ns: False  # what a thread does needs the interpreter
    thread = threading.Thread(target=publish_all)
    thread.start()
    try:
        deadline = monotonic() + 30
        while end.poller.stats.window_hits < 10:
            count = len(published)
            look = lambda count=count: len(published) > count  # noqa: E731
            await end.poller.wait(look, count, published[-1] if published else 0, deadline=deadline)
    finally:
        stop.set()
        thread.join()
    assert end.poller.stats.windows >= 10


async def test_cancelled_anywhere_it_leaves_nothing() -> None:
    rng = random.Random(8)
    end, told = planned()
    outcomes = set()
    for _ in range(400):
        end.ready = False
        told.plans = [rng.choice([window(100_000, 300_000), window(-MS, 5 * MS), Plan(nap_ns=30_000), Plan(100_000)])]
        told.more = [window(200_000, 100_000)]
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
        for _ in range(600):
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
        for number in range(1, 601):
            told.plans = [rng.choice([window(50_000, 50_000), window(-MS, MS + 50_000), Plan(nap_ns=10_000)])]
            go.release()
            await end.poller.wait(lambda expected=number: published >= expected, number, 0, deadline=monotonic() + 20)
    finally:
        go.release(600)
        thread.join()


async def test_a_closed_poller_has_given_its_descriptor_back() -> None:
    before = open_fds()
    end, _ = planned(window(LONG, MS))
    task = await end.asleep()
    end.publish()
    await asyncio.wait_for(task, 10)
    end.poller.close()
    end.poller.close()
    assert open_fds() == before


def test_moving_away_leaves_the_thread_with_the_cpus_it_had() -> None:
    if not hasattr(os, "sched_getaffinity"):
        assert not apart.move_away()
        return
    allowed = os.sched_getaffinity(0)
    for _ in range(20):
        assert apart.move_away() == (len(allowed) > 1)
        assert os.sched_getaffinity(0) == allowed


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="there is no affinity on this system")
def test_a_thread_that_has_one_cpu_stays_there() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert not apart.move_away()
        assert os.sched_getaffinity(0) == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)


def test_an_end_that_may_not_spin_has_no_rhythm() -> None:
    predictor = Predictor(may_spin=False)
    predictor.woke(5)
    predictor.watched(True, 5)
    assert not predictor.after_miss(5).wake_at_ns
