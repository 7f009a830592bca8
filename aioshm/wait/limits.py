"""The limits of a wait: a deadline, a cancel event, and reports of waits that last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

from aioshm.arguments import check_bool, check_timeout, shown
from aioshm.errors import QueueCancelled
from aioshm.ring.cores import FULL_FENCE, RECHECK_S

MIN_PAUSE_S = 0.1
"""Between two reports, whatever interval the options ask for."""

ANSWER_S = 1.0
"""How long a peer may take to answer, if reports come less often."""

MIN_ANSWER_S = 0.25


def deadline_after(
    timeout: float | None, cancel: Any = None, indefinite: bool = False, *, in_thread: bool = False
) -> float | None:
    """Check the arguments of a wait, on a loop or in a thread; return its deadline by ``time.monotonic()``, or None."""
    if timeout is None and cancel is None and indefinite is False:
        return None
    if in_thread and cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise TypeError(f"cancel must be a threading.Event or None, not {shown(cancel)}")
    if not in_thread and cancel is not None and not isinstance(cancel, asyncio.Event):
        raise TypeError(f"cancel must be an asyncio.Event or None, not {shown(cancel)}")
    check_bool("indefinite", indefinite)
    timeout_s = check_timeout("timeout", timeout)
    return None if timeout_s is None else monotonic() + timeout_s


class Stall:
    """Reports a long wait after every ``after_s``; consecutive waits count as one.

    ``report`` gets the seconds waited, and returns those until the next report, or None for ``after_s``. With ``ask``
    the peer is asked for a sign of life first, and has a little time to answer; False: it cannot be asked.
    """

    def __init__(
        self, after_s: float, report: Callable[[float], float | None], ask: Callable[[], bool] | None = None
    ) -> None:
        self._after_s = after_s
        self._report = report
        self._ask = ask
        self._asked = False
        self._began = monotonic()
        self._paused = self._began
        self.at: float = self._began + after_s
        self.reported: bool = False

    def restart(self) -> None:
        """Count from now, for a wait for another event."""
        self._began = monotonic()
        self.at = self._began + self._after_s

    def pause(self) -> None:
        """Stop counting until `resume`."""
        self._paused = monotonic()

    def resume(self) -> None:
        """Continue counting where the pause began."""
        gap = monotonic() - self._paused
        self._began += gap
        self.at += gap

    def check(self, now: float) -> None:
        """Ask or report if that is due."""
        if now < self.at:
            return
        self.reported = True
        answer_s = answer_within(self._after_s)
        if not self._asked and self._ask is not None and self._ask():
            self._asked = True
            again_s = answer_s
        else:
            again_s = self._report(now - self._began) or self._after_s
            if self._asked:
                again_s -= answer_s
                self._asked = False
        self.at = now + max(MIN_PAUSE_S, again_s)


def answer_within(after_s: float) -> float:
    """Return how many seconds to wait for an answer where reports come after ``after_s``."""
    return min(ANSWER_S, max(MIN_ANSWER_S, after_s))


class Limits:
    """What ends or interrupts one wait: a deadline, a cancel event, and reports of a stall."""

    __slots__ = ("_stall", "_watcher", "cancel", "deadline")

    def __init__(self, deadline: float | None, cancel: Any, stall: Stall | None) -> None:
        self.deadline: float | None = deadline
        self.cancel: Any = cancel  # an asyncio.Event, or in threads a threading.Event
        self._stall = stall
        self._watcher: asyncio.Task[bool] | None = None

    def check(self, now: float) -> None:
        """Raise if the wait is over; report if a report is due."""
        if self.cancel is not None:
            was_set = self._watcher is not None and self._watcher.done()  # even if the event was cleared since
            if was_set or self.cancel.is_set():
                raise QueueCancelled("the cancel event is set")
        if self.deadline is not None and now >= self.deadline:
            raise TimeoutError
        if self._stall is not None and now >= self._stall.at:
            self._stall.check(now)

    def due(self) -> float | None:
        """Return when to call `check` next; None: only when the cancel event is set."""
        if self._stall is None:
            return self.deadline
        if self.deadline is None:
            return self._stall.at
        return min(self.deadline, self._stall.at)

    def due_asleep(self, now: float) -> float | None:
        """Return when a parked end polls again without a wake-up; None: never."""
        at = self.due()
        if FULL_FENCE:
            return at
        recheck = now + RECHECK_S
        return recheck if at is None else min(at, recheck)

    def watch(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], object]) -> None:
        """Call ``wake`` when the cancel event is set, until `close`."""
        if self.cancel is not None and self._watcher is None:
            self._watcher = loop.create_task(self.cancel.wait())
            self._watcher.add_done_callback(lambda _: wake())

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()


async def settle(
    future: asyncio.Future[Any],
    *,
    deadline: float | None = None,
    cancel: asyncio.Event | None = None,
    stall: Stall | None = None,
) -> None:
    """Wait until a future is done, or a limit raises; the future is not cancelled."""
    limits = Limits(deadline, cancel, stall)
    sleeper: asyncio.Future[None] | None = None

    def wake(_done: object = None) -> None:
        if sleeper is not None and not sleeper.done():
            sleeper.set_result(None)

    loop = asyncio.get_running_loop()
    try:
        while not future.done():
            now = monotonic()
            limits.check(now)
            limits.watch(loop, wake)
            due = limits.due()
            sleeper = loop.create_future()
            future.add_done_callback(wake)
            timer = None if due is None else loop.call_later(max(0.0, due - now), wake)
            try:
                await sleeper
            finally:
                future.remove_done_callback(wake)
                if timer is not None:
                    timer.cancel()
    finally:
        limits.close()


def seconds(duration_s: float) -> str:
    """Format a duration, with a decimal below 10 s."""
    return f"{duration_s:.0f} s" if duration_s >= 10 else f"{duration_s:.1f} s"
