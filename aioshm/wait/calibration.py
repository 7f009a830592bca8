"""The costs of waking on this machine: measured at the first wait, then learned.

Timers are measured, since a wake-up by a process costs about the same. Parked ends learn the rest
from messages. The writer publishes its figures in the ring's header for processes without figures.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic_ns

from aioshm.wait.costs import LOOP_NS, WAKE_UP_BOUNDS_NS, Costs
from aioshm.wait.timerfd import HAVE_TIMERFD, timerfd_create, timerfd_settime

AHEAD_NS = 100_000
"""How long a timer sleeps that is measured: about as long as the gaps in which it is worth knowing."""

TIMERS = 3
YIELDS = 5

ENOUGH_NS = 1_000_000
"""After so long no further timer is tried: the machine is busy, and the loop has others to serve."""

SHORT_SLEEP_NS = 2_000_000
"""After a longer sleep, the CPU's and the caches' own make a wake-up dearer than where spinning is the alternative."""

_STEP = 1 / 32  # by which an estimate follows one wake-up: it tends to the median, so no single one moves it further
_CHANGE = 1 / 8  # that is worth planning anew
_POLL_MS = 20


class Calibration:
    """The figures of the machine as one process knows them."""

    def __init__(self, measure: Callable[[], Costs] | None = None) -> None:
        self._measure = measure or measured
        self._costs: Costs | None = None
        self._wake_up_ns = 0.0

    @property
    def known(self) -> Costs | None:
        """The figures, or None: there are none yet."""
        return self._costs

    def costs(self, told: Callable[[], Sequence[int]] | None = None) -> Costs:
        """Return the figures, the same object until they change; ``told`` is not trusted."""
        if self._costs is None:
            costs = None if told is None else Costs.told(told())
            if costs is None:
                costs = self._measure().within_bounds()
            self._wake_up_ns = float(costs.wake_up_ns)
            self._costs = costs
        return self._costs

    def woke(self, late_ns: int) -> None:
        """Learn how long after its message was published an end looked that had been parked for it."""
        costs = self._costs
        if costs is None:
            return
        least, most = WAKE_UP_BOUNDS_NS
        step = self._wake_up_ns * _STEP
        self._wake_up_ns = min(max(self._wake_up_ns + (step if late_ns > self._wake_up_ns else -step), least), most)
        if abs(self._wake_up_ns - costs.wake_up_ns) > _CHANGE * costs.wake_up_ns:
            self._costs = replace(costs, wake_up_ns=int(self._wake_up_ns))


def measured(timers: int = TIMERS, yields: int = YIELDS) -> Costs:
    """Measure; use the second best of each figure, since the best may be luck."""
    timer_ns = _second(timer_lateness(timers))
    return Costs(timer_ns + LOOP_NS, timer_ns, _second(yield_times(yields)))


def timer_lateness(amount: int) -> list[int]:
    """Return how late so many timers woke this thread; fewer where that takes too long."""
    try:
        fd = timerfd_create() if HAVE_TIMERFD else -1
    except OSError:  # no descriptor left, or a sandbox that has no timerfd
        fd = -1
    late: list[int] = []
    try:
        poller = select.poll()
        if fd >= 0:
            poller.register(fd, select.POLLIN)
        began = monotonic_ns()
        while len(late) < amount and (not late or monotonic_ns() - began < ENOUGH_NS):
            due = monotonic_ns() + AHEAD_NS
            if fd >= 0:
                timerfd_settime(fd, due)
                poller.poll(_POLL_MS)
            else:
                time.sleep(AHEAD_NS / 1e9)
            late.append(monotonic_ns() - due)
    finally:
        if fd >= 0:
            os.close(fd)
    return late


def yield_times(amount: int) -> list[int]:
    """Return how long so many calls of `sched_yield` took."""
    times = []
    for _ in range(amount):
        began = monotonic_ns()
        os.sched_yield()
        times.append(monotonic_ns() - began)
    return times


def _second(values: list[int]) -> int:
    return sorted(values)[min(1, len(values) - 1)]


calibration: Calibration = Calibration()
"""This process' own."""
