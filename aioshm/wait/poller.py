"""How an event loop waits for a byte in shared memory to change: look, spin, yield, park.

Parking cannot lose a wake-up: the end raises its parked flag, fences, and looks once more before it sleeps; the other
end publishes, fences, and then looks at the flag (see ``ring/buffer.py``). What wakes a parked end is only a hint:
it looks at the ring again, and infers nothing from how often it was woken.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, monotonic_ns

from aioshm.config import Wait
from aioshm.errors import QueueCancelled
from aioshm.ring.atomics import RECHECK_S, STRONG_ORDER, memory_fence
from aioshm.wait.predictor import Predictor

INLINE_SPIN_NS = 20_000
"""How long a spin holds the event loop before it lets other tasks run between its looks."""

SPIN_ROUND_NS = 1_000_000_000
"""How often a spin that never gives up looks whether a report is due."""

_LOOKS = 8  # between two readings of the clock


@dataclass(slots=True)
class WaitStats:
    """What waiting has cost so far.

    Attributes:
        spins: Waits that spun.
        hits: Spins that ended with what was waited for.
        spin_ns: Time spent spinning, other tasks' turns included.
        parks: Times the end went to sleep.
    """

    spins: int = 0
    hits: int = 0
    spin_ns: int = 0
    parks: int = 0


class Stall:
    """A report that is due when one wait has lasted for ``after_s`` seconds; made once per wait."""

    def __init__(self, after_s: float, report: Callable[[], None]) -> None:
        self.at = monotonic() + after_s
        self._report = report
        self.made = False

    def check(self, now: float) -> None:
        """Report, if it is time and has not been done."""
        if not self.made and now >= self.at:
            self.made = True
            self._report()


class Poller:
    """Waits for one end of a ring.

    Args:
        loop: The end's event loop.
        parked: This end's parked flags: one byte for each end that it stands for.
        predictor: Decides between spinning and parking.
        mode: ``"adaptive"``, ``"spin"`` or ``"park"``.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, parked: memoryview, predictor: Predictor, mode: Wait) -> None:
        self._loop = loop
        self._parked = parked
        self._predictor = predictor
        self._mode = mode
        self._sleeper: asyncio.Future[None] | None = None
        self._yielded = False
        self.stats = WaitStats()

    def wake(self) -> None:
        """Let the parked wait look again. Called on the loop's thread, at any time, any number of times."""
        sleeper = self._sleeper
        if sleeper is not None and not sleeper.done():
            sleeper.set_result(None)

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
        """Return as soon as ``look()`` is true: whether the loop's other tasks have run meanwhile.

        One wait at a time; cancelling it leaves nothing behind.

        Args:
            look: Cheap, without side effects.
            count: Messages that have passed so far (for the predictor).
            at_ns: When the latest of them was published.
            deadline: When to give up, by ``time.monotonic()``.
            cancel: Ends the wait once set.
            stall: What to report when the wait lasts long.

        Raises:
            TimeoutError: The deadline has passed.
            QueueCancelled: ``cancel`` is set.
        """
        self._yielded = False
        if look():
            return False
        if not await self._spin_first(look, count, at_ns, deadline, cancel, stall):
            await self._park(look, deadline, cancel, stall)
        return self._yielded

    async def _spin_first(
        self,
        look: Callable[[], object],
        count: int,
        at_ns: int,
        deadline: float | None,
        cancel: asyncio.Event | None,
        stall: Stall | None,
    ) -> bool:
        """Spin as the mode wants it; return whether that was enough."""
        if self._mode == "park":
            return False
        if self._mode == "spin":
            while not await self._spin(look, monotonic_ns() + SPIN_ROUND_NS, deadline, cancel):
                if stall is not None:
                    stall.check(monotonic())
            return True
        budget_ns = self._predictor.budget_ns(count, at_ns)
        if not budget_ns:
            return False
        hit = await self._spin(look, monotonic_ns() + budget_ns, deadline, cancel)
        self._predictor.spun(hit)
        return hit

    async def _spin(
        self,
        look: Callable[[], object],
        until_ns: int,
        deadline: float | None,
        cancel: asyncio.Event | None,
    ) -> bool:
        began = monotonic_ns()
        inline_until = began + INLINE_SPIN_NS
        stats = self.stats
        stats.spins += 1
        try:
            while True:
                for _ in range(_LOOKS):
                    if look():
                        stats.hits += 1
                        return True
                now = monotonic_ns()
                _give_up(now / 1e9, deadline, cancel)
                if now >= until_ns:
                    return False
                if now >= inline_until:
                    self._yielded = True
                    await asyncio.sleep(0)
                    os.sched_yield()  # the other end may be waiting for this very CPU
        finally:
            stats.spin_ns += monotonic_ns() - began

    async def _park(
        self,
        look: Callable[[], object],
        deadline: float | None,
        cancel: asyncio.Event | None,
        stall: Stall | None,
    ) -> None:
        cancelled = None if cancel is None else self._loop.create_task(cancel.wait())
        if cancelled is not None:
            cancelled.add_done_callback(lambda _: self.wake())
        try:
            while True:
                self._sleeper = sleeper = self._loop.create_future()
                self._parked[0] = 1
                memory_fence()
                if look():
                    return
                now = monotonic()
                _give_up(now, deadline, cancel)
                if cancelled is not None and cancelled.done():
                    raise QueueCancelled("the cancel event was set")  # however soon it was cleared again
                if stall is not None:
                    stall.check(now)
                alarm = self._alarm(now, deadline, stall)
                self.stats.parks += 1
                self._yielded = True
                try:
                    await sleeper
                finally:
                    if alarm is not None:
                        alarm.cancel()
        finally:
            self._parked[0] = 0
            self._sleeper = None
            if cancelled is not None:
                cancelled.cancel()

    def _alarm(self, now: float, deadline: float | None, stall: Stall | None) -> asyncio.TimerHandle | None:
        """Arrange to be woken for whatever is due first; an idle end has nothing due and sets no timer."""
        due = [] if deadline is None else [deadline]
        if stall is not None and not stall.made:
            due.append(stall.at)
        if not STRONG_ORDER:
            due.append(now + RECHECK_S)
        return self._loop.call_later(max(0.0, min(due) - now), self.wake) if due else None


def _give_up(now: float, deadline: float | None, cancel: asyncio.Event | None) -> None:
    if cancel is not None and cancel.is_set():
        raise QueueCancelled("the cancel event is set")
    if deadline is not None and now >= deadline:
        raise TimeoutError
