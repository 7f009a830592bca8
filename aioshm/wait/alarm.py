"""A timer for event loops, exact to microseconds where the kernel has timerfd_create(2)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from time import monotonic_ns

from aioshm.wait.timerfd import HAVE_TIMERFD, timerfd_create, timerfd_settime


class Alarm:
    """Calls back once, never early; uses the loop's timer if no descriptor is left."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._callback = callback
        self._fd = -1
        self._timer: asyncio.TimerHandle | None = None
        self._exact = HAVE_TIMERFD
        self._closed = False
        self._at_ns = 0

    def arm(self, at_ns: int) -> None:
        """Call back at a time, by CLOCK_MONOTONIC in nanoseconds; this replaces an earlier time."""
        if self._closed:
            return
        if self._fd < 0 and self._exact:
            self._open()
        self._at_ns = max(1, at_ns)  # zero would disarm it
        if self._fd >= 0:
            timerfd_settime(self._fd, self._at_ns)
        else:
            if self._timer is not None:
                self._timer.cancel()
            self._start_timer()

    @property
    def fd(self) -> int:
        """The descriptor that is readable once it rings; -1 where there is none."""
        return self._fd

    def look(self) -> None:
        """Call back if the time has come, without waiting for the loop, and let the descriptor not be readable then."""
        if self._fd >= 0:
            if self._at_ns:
                self._readable()
            if not self._at_ns:
                self._silence()

    def close(self) -> None:
        """Disarm it for good and give the descriptor back. Idempotent; needs no running loop."""
        self._closed = True
        self._at_ns = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._fd >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        try:
            self._fd = timerfd_create()
        except OSError:  # no descriptor left, or a sandbox that has no timerfd
            self._exact = False
        else:
            self._loop.add_reader(self._fd, self._readable)

    def _start_timer(self) -> None:
        # Up to two milliseconds late: these loops round to one, and count from when their turn began.
        delay = max(0, self._at_ns - monotonic_ns()) / 1e9 + 0.001
        self._timer = self._loop.call_later(delay, self._timer_rung)

    def _timer_rung(self) -> None:
        if monotonic_ns() < self._at_ns:
            self._start_timer()
        else:
            self._timer = None
            self._at_ns = 0
            self._callback()

    def _readable(self) -> None:
        # It stays readable when it rings, which spares a wait that is late already a system call: `arm` ends that, or
        # the loop, which calls here again.
        if not self._at_ns:
            self._silence()
        elif monotonic_ns() >= self._at_ns:  # else it was armed anew since the loop was told
            self._at_ns = 0
            self._callback()

    def _silence(self) -> None:
        timerfd_settime(self._fd, 0)
