"""A timer exact to microseconds, by timerfd_create(2), and the cost of a wake-up that such timers measure."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import sys
import time
from collections.abc import Callable
from time import monotonic_ns

from aioshm.wait.policy import WakeUpCost

HAVE_TIMERFD = sys.platform == "linux"

LOOP_NS = 40_000
"""About how long an event loop takes from the kernel's wake-up to the end's poll, cold caches included."""

_MEASURED_NS = 100_000  # sleep of a measured timer: about as long as the gaps for which the cost matters
_ENOUGH_NS = 1_000_000  # no further timer is tried after this: the machine is busy, and so is the loop
_POLL_MS = 20
_COARSE_S = 0.002

# Python has these calls from 3.13 on. PyDLL: they are too short to release the GIL for.
_libc = ctypes.PyDLL(None, use_errno=True)
_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1


class _ItimerSpec(ctypes.Structure):
    _fields_ = (("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2))


def timerfd_create() -> int:
    """Return the descriptor of a new timer on CLOCK_MONOTONIC, nonblocking and closed on exec."""
    fd = int(_libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def timerfd_settime(fd: int, at_ns: int, /) -> None:
    """Arm a timer for a time of CLOCK_MONOTONIC in nanoseconds; 0 disarms it."""
    if at_ns < 0:
        at_ns = 1
    seconds, nanoseconds = divmod(at_ns, 1_000_000_000)
    when = _ItimerSpec((0, 0), (seconds, nanoseconds))
    if _libc.timerfd_settime(fd, _TFD_TIMER_ABSTIME, ctypes.byref(when), None) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def open_timer() -> int:
    """Return the descriptor of a new timer; -1 if no descriptor is left, or the system has no timerfd."""
    if not HAVE_TIMERFD:
        return -1
    try:
        return timerfd_create()
    except OSError:  # also in a sandbox that forbids the call
        return -1


class Timer:
    """Calls back once on an event loop, never early; uses the loop's timer if there is no descriptor."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._callback = callback
        self._fd: int | None = None  # None: not opened yet; -1: there is none
        self._handle: asyncio.TimerHandle | None = None
        self._closed = False
        self._at_ns = 0

    def arm(self, at_ns: int) -> None:
        """Call back at a time in nanoseconds of CLOCK_MONOTONIC; this replaces an earlier time."""
        if self._closed:
            return
        if self._fd is None:
            self._fd = open_timer()
            if self._fd >= 0:
                self._loop.add_reader(self._fd, self._readable)
        self._at_ns = max(1, at_ns)  # 0 would disarm the timer
        if self._fd >= 0:
            timerfd_settime(self._fd, self._at_ns)
            return
        if self._handle is not None:
            self._handle.cancel()
        # Loops round to a millisecond, and count from the beginning of their iteration.
        delay_s = max(0, self._at_ns - monotonic_ns()) / 1e9 + _COARSE_S
        self._handle = self._loop.call_later(delay_s, self._callback)

    def close(self) -> None:
        """Disarm the timer and close its descriptor. Idempotent; needs no running loop."""
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()
        if self._fd is not None and self._fd >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _readable(self) -> None:
        # The first call leaves the expired descriptor readable, which saves the wait that follows a system call: `arm`
        # rearms it, or the loop calls here again.
        assert self._fd is not None
        if not self._at_ns:
            timerfd_settime(self._fd, 0)
        elif monotonic_ns() >= self._at_ns:  # else `arm` was called since it expired
            self._at_ns = 0
            self._callback()


def measure_wake_up(timers: int = 3) -> int:
    """Return the ns of a wake-up: how late the second best of some timers is, plus one iteration of the loop."""
    late = sorted(timer_lateness(timers))
    return late[min(1, len(late) - 1)] + LOOP_NS


def timer_lateness(amount: int) -> list[int]:
    """Return the lateness in nanoseconds of ``amount`` timers, or of fewer on a busy machine."""
    fd = open_timer()
    late: list[int] = []
    try:
        poller = select.poll()
        if fd >= 0:
            poller.register(fd, select.POLLIN)
        began_ns = monotonic_ns()
        while len(late) < amount and (not late or monotonic_ns() - began_ns < _ENOUGH_NS):
            due_ns = monotonic_ns() + _MEASURED_NS
            if fd >= 0:
                timerfd_settime(fd, due_ns)
                poller.poll(_POLL_MS)
            else:
                time.sleep(_MEASURED_NS / 1e9)
            late.append(monotonic_ns() - due_ns)
    finally:
        if fd >= 0:
            os.close(fd)
    return late


wake_up_cost: WakeUpCost = WakeUpCost(measure_wake_up)
"""The cost of a wake-up of this process."""
