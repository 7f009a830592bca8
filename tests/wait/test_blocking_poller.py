"""Waiting in place, on a private loop: nothing that the loop has to do is put off for good."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from aioshm.errors import QueueCancelled
from aioshm.lifeline.bell import HAVE_EVENTFD, Bell
from aioshm.wait.blocking import NEVER_NS, BlockingLoop, BlockingPoller, WindowBegins
from aioshm.wait.predictor import FAILURES, PROBE, Predictor
from aioshm.wait.rhythm import PARK, Plan
from aioshm.wait.stall import Stall

LONG_S = 30.0
MS = 1_000_000


class End:
    """One end whose calls block: a flag for what is waited for, a parked flag, a bell, a loop of its own."""

    def __init__(self, mode: Any = "park", *, crowded: bool = False) -> None:
        self.ready = False
        self.spins: list[int] = []
        self.parked = bytearray(1)
        self.loop = BlockingLoop()
        self.bell = Bell.create() if HAVE_EVENTFD else None
        if self.bell is not None:
            self.loop.add_reader(self.bell.fd, self.rung)
        self.predictor = Predictor(may_spin=True, crowded=crowded, yields=True)
        self.poller = BlockingPoller(
            self.loop, memoryview(self.parked), self.predictor, mode, self.spin, self.bell, crowded=crowded
        )

    def spin(self, ns: int) -> bool:
        self.spins.append(ns)
        return self.ready

    def rung(self) -> None:
        assert self.bell is not None
        self.bell.drain()
        self.poller.wake()

    def wake(self) -> None:
        if self.bell is not None:
            self.bell.ring()
        else:
            self.loop.call_soon_threadsafe(self.poller.wake)

    def publish(self) -> None:
        self.ready = True
        self.wake()

    def wait(self, **kwargs: Any) -> bool:
        return self.loop.run_until_complete(self.poller.wait(lambda: self.ready, 0, 0, **kwargs))

    def in_thread(self, action: Any) -> threading.Thread:
        """Start a thread that acts once this end is parked."""

        def act() -> None:
            deadline = time.monotonic() + LONG_S
            while not (self.parked[0] and self.poller.stats.parks) and time.monotonic() < deadline:
                time.sleep(0.001)
            action()

        thread = threading.Thread(target=act)
        thread.start()
        return thread


@pytest.fixture
def end() -> Iterator[End]:
    it = End()
    yield it
    close(it)


def close(end: End) -> None:
    end.poller.close()
    if end.bell is not None:
        end.loop.remove_reader(end.bell.fd)
        end.bell.close()
    end.loop.close()


class TestSleeping:
    def test_the_bell_wakes_it(self, end: End) -> None:
        thread = end.in_thread(end.publish)
        end.wait()
        thread.join()
        assert end.parked[0] == 0

    def test_rings_for_nothing_leave_it_asleep(self, end: End) -> None:
        rings = iter([end.wake, end.wake])

        def ring() -> None:
            for one in rings:
                parks = end.poller.stats.parks
                one()
                while end.poller.stats.parks == parks:
                    time.sleep(0.001)
            end.publish()

        thread = end.in_thread(ring)
        end.wait()
        thread.join()
        assert end.poller.stats.parks == 3

    def test_a_deadline_ends_it(self, end: End) -> None:
        with pytest.raises(TimeoutError):
            end.wait(deadline=time.monotonic() + 0.02)
        assert end.parked[0] == 0

    def test_a_cancel_event_ends_it(self, end: End) -> None:
        cancel = asyncio.Event()
        end.loop.call_later(0.01, cancel.set)
        with pytest.raises(QueueCancelled):
            end.wait(cancel=cancel)

    def test_a_timer_of_the_loop_runs_meanwhile(self, end: End) -> None:
        end.loop.call_later(0.01, lambda: setattr(end, "ready", True))
        end.wait()

    def test_what_a_timer_leads_to_is_done_before_it_sleeps_again(self, end: End) -> None:
        async def steps() -> None:
            for _ in range(3):
                await asyncio.sleep(0.002)
                await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0.001))
            end.ready = True

        task = end.loop.create_task(steps())
        end.wait(deadline=time.monotonic() + LONG_S)
        end.loop.run_until_complete(task)

    def test_what_the_loop_was_to_do_is_done_first(self, end: End) -> None:
        end.loop.call_soon(lambda: setattr(end, "ready", True))
        end.wait()
        assert end.poller.stats.parks == 0

    def test_another_thread_reaches_the_loop(self, end: End) -> None:
        thread = end.in_thread(lambda: end.loop.call_soon_threadsafe(lambda: setattr(end, "ready", True)))
        end.wait()
        thread.join()

    def test_a_descriptor_of_the_loop_is_served_meanwhile(self, end: End) -> None:
        ours, theirs = os.pipe()

        def readable() -> None:
            end.loop.remove_reader(ours)
            end.ready = True

        end.loop.add_reader(ours, readable)
        thread = end.in_thread(lambda: os.write(theirs, b"x"))
        end.wait()
        thread.join()
        os.close(ours)
        os.close(theirs)

    def test_a_stall_is_reported_once(self, end: End) -> None:
        reports: list[None] = []
        end.loop.call_later(0.05, end.publish)
        end.wait(stall=Stall(0.01, lambda _: reports.append(None)))
        assert reports == [None]

    def test_cancelling_the_call_ends_it(self, end: End) -> None:
        task = end.loop.create_task(end.poller.wait(lambda: False, 0, 0))
        thread = end.in_thread(lambda: end.loop.call_soon_threadsafe(task.cancel))
        with pytest.raises(asyncio.CancelledError):
            end.loop.run_until_complete(task)
        thread.join()
        assert end.parked[0] == 0

    def test_a_window_is_woken_for(self) -> None:
        it = End("adaptive")
        due = time.monotonic_ns() + 20 * MS
        plans = iter([Plan(wake_at_ns=due, until_ns=due + 2_000 * MS)])
        it.predictor.plan = lambda *_: next(plans)  # type: ignore[method-assign]
        it.loop.call_later(0.03, lambda: setattr(it, "ready", True))
        it.wait()
        assert it.poller.stats.window_hits == 1
        close(it)


class TestLeavingForAWindow:
    """The call leaves its loop before the message comes, and not after."""

    @staticmethod
    def leave(it: End, lasts_ns: int) -> None:
        due = time.monotonic_ns() + 2 * MS
        it.predictor.plan = lambda *_: Plan(wake_at_ns=due, until_ns=due + lasts_ns)  # type: ignore[method-assign]
        it.poller.leaves = True
        with pytest.raises(WindowBegins):
            it.wait(deadline=time.monotonic() + LONG_S)

    @pytest.mark.parametrize("crowded", [True, False])
    def test_it_is_left_and_the_message_seen(self, crowded: bool) -> None:
        it, woken, watched = End("adaptive", crowded=crowded), list[int](), list[tuple[bool, int]]()
        it.predictor.woke = woken.append  # type: ignore[method-assign]
        it.predictor.watched = lambda *told: watched.append(told)  # type: ignore[method-assign]
        self.leave(it, 60_000 * MS)
        assert (it.parked[0], woken, it.poller.stats.windows) == (0, [], 0)
        looks = iter([False, False, True])
        assert it.poller.watch(lambda: next(looks), NEVER_NS)
        assert (it.poller.stats.windows, it.poller.stats.window_hits) == (1, 1)
        assert len(woken) == 1  # how late it was includes the leaving
        it.predictor.plan = lambda *_: PARK  # type: ignore[method-assign]
        it.loop.call_later(0.01, it.publish)
        it.loop.run_until_complete(it.poller.wait(lambda: it.ready, 1, time.monotonic_ns()))
        assert [hit for hit, _ in watched] == [True]
        close(it)

    def test_a_window_in_vain_is_followed_by_what_follows_one(self) -> None:
        it, asked = End("adaptive", crowded=True), list[int]()
        self.leave(it, MS)
        it.predictor.plan = lambda *_: pytest.fail("it began anew")  # type: ignore[method-assign]
        it.predictor.after_miss = lambda now: asked.append(now) or PARK  # type: ignore[method-assign,func-returns-value]
        assert not it.poller.watch(lambda: False, NEVER_NS)
        it.loop.call_later(0.01, it.publish)
        it.wait()
        assert len(asked) == 1
        assert it.poller.stats.window_hits == 0
        close(it)

    def test_a_window_ends_with_the_callers_time(self) -> None:
        it = End("adaptive", crowded=True)
        self.leave(it, 60_000 * MS)
        assert not it.poller.watch(lambda: False, time.monotonic_ns() + MS)
        close(it)


class TestCrowdedSpins:
    def test_a_spin_holds_no_cpu(self) -> None:
        it = End("adaptive", crowded=True)
        it.predictor.plan = lambda *_: Plan(spin_ns=2_000 * MS)  # type: ignore[method-assign]
        it.loop.call_later(0.01, lambda: setattr(it, "ready", True))
        it.wait()
        assert it.poller.stats.hits == 1
        assert it.spins == []
        close(it)

    def test_one_with_cpus_to_spare_does(self) -> None:
        it = End("adaptive")
        it.predictor.plan = lambda *_: Plan(spin_ns=2_000 * MS)  # type: ignore[method-assign]
        it.loop.call_later(0.01, lambda: setattr(it, "ready", True))
        it.wait()
        assert it.spins
        close(it)


class TestTimers:
    def test_past_ones_do_not_count(self) -> None:
        loop = BlockingLoop()
        now = loop.time()
        loop.call_at(now - 1, print)
        loop.call_at(now + 5, print)
        loop.call_at(now + 9, print)
        assert loop.due(now) == now + 5
        loop.close()

    def test_none_is_due(self) -> None:
        loop = BlockingLoop()
        assert loop.due(loop.time()) is None
        loop.close()


class TestAnswers:
    """A caller that asks seldom and is answered at once."""

    @staticmethod
    def plans(gap_ns: int, answer_ns: int, *, yields: bool) -> list[int]:
        predictor = Predictor(may_spin=True, crowded=yields, yields=yields)
        at_ns, spins = 1_000 * MS, []
        for count in range(1, 60 + PROBE):
            began = at_ns + gap_ns - answer_ns
            spins.append(predictor.plan(count, at_ns, began).spin_ns)
            at_ns += gap_ns
            if spins[-1]:
                predictor.spun(answer_ns <= spins[-1])
        return spins[20 + PROBE :]

    def test_are_spun_for_where_calls_block(self) -> None:
        assert all(self.plans(20 * MS, MS // 3, yields=True))

    def test_may_take_longer_where_they_are_seldom(self) -> None:
        assert all(self.plans(20 * MS, 3 * MS, yields=True))

    def test_that_take_most_of_the_time_are_not_spun_for(self) -> None:
        assert sum(map(bool, self.plans(4 * MS, 3 * MS, yields=True))) <= 1 + FAILURES

    def test_what_was_looked_for_before_the_wait_counts(self) -> None:
        predictor = Predictor(may_spin=True, crowded=True, yields=True)
        at_ns, hot = 1_000 * MS, []
        for count in range(1, 60):
            began = at_ns + 10 * MS
            predictor.looked(began)
            predictor.plan(count, at_ns, began + 9 * MS)  # a millisecond before it comes
            hot.append(predictor.hot)
            predictor.spun(True)
            at_ns += 20 * MS
        assert not any(hot[20:])

    def test_are_not_elsewhere(self) -> None:
        assert not any(self.plans(20 * MS, MS // 3, yields=False))

    def test_late_ones_are_not(self) -> None:
        assert sum(map(bool, self.plans(20 * MS, 15 * MS, yields=True))) <= 1 + FAILURES
