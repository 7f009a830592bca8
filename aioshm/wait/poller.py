"""Waits on an event loop for a byte in shared memory to change: look, spin, yield, nap, park.

Parking cannot lose a wake-up: the end raises its parked flag, fences, and looks once more before
it sleeps; the peer publishes, fences, and then looks at the flag. A wake-up is only a hint to look
again, as is an alarm of an earlier wait.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, monotonic_ns
from typing import Protocol

from aioshm.config import Wait
from aioshm.errors import QueueCancelled
from aioshm.ring.cores import FULL_FENCE, RECHECK_S, memory_fence
from aioshm.wait.alarm import Alarm
from aioshm.wait.apart import move_away
from aioshm.wait.calibration import SHORT_SLEEP_NS, calibration
from aioshm.wait.costs import LOOP_NS
from aioshm.wait.predictor import NAPS, Predictor
from aioshm.wait.rhythm import Plan
from aioshm.wait.stall import Stall

INLINE_SPIN_NS = 20_000
"""How long a spin holds the event loop before it lets other tasks run."""

SHARED_SPIN_NS = 5_000
"""How long it holds it at a time while other tasks have something to do."""

IDLE_TURN_NS = LOOP_NS
"""A turn of the loop that was shorter than this found little to do but to look at its descriptors."""

SPIN_ROUND_NS = 1_000_000_000
"""How often a spin that never gives up looks whether a report is due."""


@dataclass(slots=True)
class WaitStats:
    """The counts and times of waiting so far."""

    spins: int = 0
    # Spins that ended with a message or with room.
    hits: int = 0
    # Other tasks' turns included; the next wait adds the latest hit's.
    spin_ns: int = 0
    parks: int = 0
    # Spins in a steady rhythm, shortly before the expected message.
    windows: int = 0
    window_hits: int = 0
    # Short sleeps without a signal from the peer.
    naps: int = 0


class Flags(Protocol):
    """The interface of a byte in memory."""

    def __setitem__(self, index: int, value: int, /) -> None: ...


class Waiting:
    """One wait: its condition and its limits."""

    __slots__ = ("cancel", "deadline", "look", "stall", "watcher")

    def __init__(
        self, look: Callable[[], object], deadline: float | None, cancel: asyncio.Event | None, stall: Stall | None
    ) -> None:
        self.look: Callable[[], object] = look
        self.deadline: float | None = deadline
        self.cancel: asyncio.Event | None = cancel
        self.stall: Stall | None = stall
        self.watcher: asyncio.Task[bool] | None = None  # of the cancel event, while asleep

    def check(self, now: float) -> None:
        """Raise if it is time to give up; report if it is time to report."""
        if self.cancel is not None and (
            self.cancel.is_set() or (self.watcher is not None and self.watcher.done())  # however soon it was cleared
        ):
            raise QueueCancelled("the cancel event is set")
        if self.deadline is not None and now >= self.deadline:
            raise TimeoutError
        if self.stall is not None and now >= self.stall.at:
            self.stall.check(now)

    def due(self, now: float) -> float | None:
        """Return when it must be looked after; an idle end that reports nothing has nothing due and sets no timer."""
        due = self.deadline
        if self.stall is not None:
            due = self.stall.at if due is None else min(due, self.stall.at)
        if not FULL_FENCE:
            due = now + RECHECK_S if due is None else min(due, now + RECHECK_S)
        return due


class Poller:
    """Waits for one end of a ring."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        parked: Flags,
        predictor: Predictor,
        mode: Wait,
        spin: Callable[[int], bool],
        told: Callable[[], Sequence[int]] | None = None,
        tell: Callable[[Sequence[int]], None] | None = None,
        crowded: bool = False,
    ) -> None:
        self._loop = loop
        self._parked = parked
        self._predictor = predictor
        self._mode = mode
        self._spin_natively = spin
        self._sleeper: asyncio.Future[None] | None = None
        self._alarm = Alarm(loop, self.wake)
        self.crowded: bool = crowded
        self._yielded = False
        self._costs = predictor.costs
        # `told` returns the writer's figures for an end without any; `tell` publishes them.
        self._told, self._tell = told, tell
        if tell is not None and calibration.known is not None:
            tell(calibration.known.to_tell())
        self._before = 0  # messages, when the latest wait began
        self._slept: tuple[int, int] | None = None  # since when it had been parked, and when it had its message
        self._unpaid: tuple[int, int, int, bool] | None = None
        self._first_slice_ns = INLINE_SPIN_NS
        # How long a caller spins before it calls `wait`.
        self.inline_spin_ns = INLINE_SPIN_NS if mode == "spin" else 0
        self.stats: WaitStats = WaitStats()

    def wake(self) -> None:
        """Make the parked wait look again. Called on the loop's thread, any number of times."""
        sleeper = self._sleeper
        if sleeper is not None and not sleeper.done():
            sleeper.set_result(None)

    def close(self) -> None:
        """Give the alarm's descriptor back. Idempotent; no wait may begin, nor be left but on a loop that is closed."""
        self._alarm.close()
        self._parked = bytearray(1)  # for what such a wait does when it is collected as garbage
        if self._loop.is_closed():
            self._sleeper = None  # which nobody can wake any more

    async def wait(
        self,
        look: Callable[[], object],
        count: int,
        at_ns: int,
        *,
        deadline: float | None = None,
        cancel: asyncio.Event | None = None,
        stall: Stall | None = None,
    ) -> bool:
        """Return once ``look()`` is true: whether other tasks have run meanwhile."""
        self._yielded = False
        if look():
            return False
        if self._unpaid is not None:
            self._pay_for_hit(at_ns)
        wait = Waiting(look, deadline, cancel, stall)
        try:
            if self._mode == "adaptive":
                await self._adapt(wait, count, at_ns)
            elif self._mode == "spin":
                while not await self._spin(wait, monotonic_ns() + SPIN_ROUND_NS):
                    wait.check(monotonic())
            else:
                await self._sleep(wait)
        finally:
            if wait.watcher is not None:
                wait.watcher.cancel()
        return self._yielded

    async def _adapt(self, wait: Waiting, count: int, at_ns: int) -> None:
        predictor = self._predictor
        if self._slept is not None:
            self._learn(count, at_ns)
        self._before = count
        if predictor.weighs and (costs := calibration.costs(self._told)) is not self._costs:
            self._costs = costs
            predictor.adjust(costs)
            if self._tell is not None:
                self._tell(costs.to_tell())
        plan = predictor.plan(count, at_ns, monotonic_ns())
        self.inline_spin_ns = self._first_slice_ns if predictor.hot else 0
        if plan.spin_ns:
            hit = await self._spin(wait, monotonic_ns() + plan.spin_ns)
            predictor.spun(hit)
            if hit:
                return
        if plan.nap_ns:
            hit = await self._nap(wait, plan.nap_ns)
            predictor.spun(hit)
            if hit:
                return
        await self._follow(wait, plan)

    def _learn(self, count: int, at_ns: int) -> None:
        """Learn the cost of the latest wake-up, if the latest message caused it."""
        assert self._slept is not None
        since_ns, looked_ns = self._slept
        self._slept = None
        if count == self._before + 1 and since_ns <= at_ns <= looked_ns and at_ns - since_ns < SHORT_SLEEP_NS:
            calibration.woke(looked_ns - at_ns)

    async def _follow(self, wait: Waiting, plan: Plan) -> None:
        """Wait for the windows of a plan, one after the other; park after the last."""
        predictor = self._predictor
        while plan.wake_at_ns:
            if plan.wake_at_ns > monotonic_ns():
                if await self._sleep(wait, plan.wake_at_ns):
                    return
                self._woken(plan.wake_at_ns)
            if await self._spin(wait, plan.until_ns, window=True):
                return
            plan = predictor.after_miss(monotonic_ns())
        await self._sleep(wait)

    def _woken(self, due_ns: int) -> None:
        """Learn how late this end is for its window, which comes next."""
        self._predictor.woke(monotonic_ns() - due_ns)

    async def _spin(self, wait: Waiting, until_ns: int, *, window: bool = False) -> bool:
        """Spin until a time, with turns for other tasks; return whether ``look()`` succeeded."""
        look, spin, stats = wait.look, self._spin_natively, self.stats
        began = now = monotonic_ns()
        slice_ns, shared_cpu_ns = self._first_slice_ns, self._costs.shared_cpu_ns
        stats.spins += 1
        stats.windows += window
        hit = missed = False
        apart = not (window and slice_ns)
        try:
            while True:
                if look() or (slice_ns and now < until_ns and spin(min(slice_ns, until_ns - now))):
                    # The message first: what is done here for the first time in a period is done slowly.
                    hit = True
                    self._unpaid = (began, now, now + slice_ns, window)
                    stats.hits += 1
                    stats.window_hits += window
                    return True
                now = monotonic_ns()
                wait.check(now / 1e9)
                if now >= until_ns:
                    missed = True
                    return False
                slice_ns = await self._between_slices(now)
                turned = monotonic_ns()
                os.sched_yield()  # the other end may be waiting for this very CPU
                now = monotonic_ns()
                if not apart and now - turned > shared_cpu_ns:
                    apart = True
                    move_away()
        finally:
            if not hit:
                self._pay(window, missed, monotonic_ns() - began)

    async def _between_slices(self, now_ns: int) -> int:
        """Run the loop's other tasks; return the length of the spin's next slice."""
        self._yielded = True
        await asyncio.sleep(0)
        return INLINE_SPIN_NS if monotonic_ns() - now_ns < IDLE_TURN_NS else SHARED_SPIN_NS

    def _pay(self, window: bool, missed: bool, spent_ns: int) -> None:
        """Account for a spin, also one that was given up."""
        self.stats.spin_ns += spent_ns
        if window:
            self._predictor.watched(not missed, spent_ns)

    def _pay_for_hit(self, at_ns: int) -> None:
        """Account for the latest hit, which ended when its message was published."""
        assert self._unpaid is not None
        began, earliest, latest, window = self._unpaid
        self._unpaid = None
        self._pay(window, False, min(max(at_ns, earliest), latest) - began)

    async def _nap(self, wait: Waiting, nap_ns: int) -> bool:
        """Nap a few times, without signals from the peer; return whether that was worth it."""
        for _ in range(NAPS):
            self._sleeper = sleeper = self._loop.create_future()
            self._alarm.arm(monotonic_ns() + nap_ns)
            self.stats.naps += 1
            self._yielded = True
            try:
                await sleeper
            finally:
                self._sleeper = None
            if wait.look():
                return True
            wait.check(monotonic())
            nap_ns *= 2
        return False

    async def _sleep(self, wait: Waiting, until_ns: int = 0) -> bool:
        """Sleep until a wake-up or a time; return whether ``look()`` succeeded before that time."""
        if wait.cancel is not None and wait.watcher is None:
            wait.watcher = self._loop.create_task(wait.cancel.wait())
            wait.watcher.add_done_callback(lambda _: self.wake())
        armed = False
        now = 0.0
        try:
            while True:
                if until_ns and monotonic_ns() >= until_ns:
                    return False
                self._sleeper = sleeper = self._loop.create_future()
                self._parked[0] = 1
                memory_fence()
                if wait.look():
                    if now:
                        self._slept = int(now * 1e9), monotonic_ns()
                    return True
                now = monotonic()
                wait.check(now)
                if until_ns and not armed:
                    self._alarm.arm(until_ns)
                    armed = True
                due = wait.due(now)
                timer = None
                if due is not None and not (armed and due * 1e9 >= until_ns):  # else the alarm rings before it
                    timer = self._loop.call_later(max(0.0, due - now), self.wake)
                self.stats.parks += 1
                self._yielded = True
                try:
                    await sleeper
                finally:
                    if timer is not None:
                        timer.cancel()
        finally:
            self._parked[0] = 0
            self._sleeper = None
