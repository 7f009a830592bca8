"""Sleeping inside of a task's step, on the event loop's own descriptors, while the loop has nobody else to serve.

Handing a wait back to the loop takes two of its turns: one finds the bell and calls back, the next one goes on with the
task. Where processes ask and answer each other and have to share their CPUs, that is a third of a step. A loop that
would only sleep can be slept for: on its own selector, so that whatever would wake it wakes this, and no longer than
until its next timer. Whatever else than the bell comes is left where it is, and the loop gets its turn.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Sequence
from time import monotonic
from typing import Any, NoReturn

from aioshm.lifeline.bell import Bell
from aioshm.wait.alarm import Alarm

MOST_S = 0.05
"""A sleep that lasts longer goes on in the loop, where it costs nobody anything and where signals find it."""

BACK_OFF = 32
"""So many waits are left to the loop once it had something else to do than the bell."""


class InPlace:
    """Sleeps for an event loop; see `of`.

    Args:
        loop: One of asyncio's own.
        bells: What the sleep is for.
    """

    def __init__(self, loop: Any, bells: Sequence[Bell]) -> None:
        self._loop = loop
        self._select = loop._selector.select
        self._bells = bells
        self._left_out = 0

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop, bells: Sequence[Bell]) -> InPlace | None:
        """Return what sleeps for a loop; None where it does not show what it would do, as uvloop, or there is no bell.

        Only exactly asyncio's own loop and selector, of which it is known that nothing else can wake them.
        """
        if not bells or type(loop) is not asyncio.SelectorEventLoop:
            return None
        if type(getattr(loop, "_selector", None)) is not getattr(selectors, "EpollSelector", None):
            return None
        shown = all(hasattr(loop, name) for name in ("_ready", "_scheduled", "_stopping", "_debug"))
        return cls(loop, bells) if shown else None

    def alone(self) -> bool:
        """Return whether the loop has nobody else to serve; called by a task of it."""
        if self._left_out:
            self._left_out -= 1
            return False
        loop = self._loop
        return not (loop._ready or loop._stopping or loop._debug)  # debugging warns of steps that last

    def sleep(self, until: float, alarm: Alarm) -> bool:
        """Block until something wakes the loop, or its next timer is due; return whether it was nothing but a bell.

        Args:
            until: When to stop in any case, by ``time.monotonic()``.
            alarm: Counts as a bell.
        """
        loop = self._loop
        if loop._scheduled:
            until = min(until, loop._scheduled[0]._when)
        try:
            ready = self._select(max(0.0, until - monotonic()))
        except (KeyboardInterrupt, SystemExit) as error:  # of a signal's handler: it ends the loop's run, not the task
            loop.call_soon(_raise, error)
            return False
        only = bool(ready)
        for key, _ in ready:
            fd = key.fd
            for bell in self._bells:
                if bell.fd == fd:
                    bell.drain()
                    break
            else:
                if fd == alarm.fd:
                    alarm.look()
                else:
                    only = False
                    self._left_out = BACK_OFF
        return only


def _raise(error: BaseException) -> NoReturn:
    raise error
