"""Timers of the kernel with a descriptor, timerfd_create(2), which Python has from 3.13 on."""

from __future__ import annotations

import ctypes
import os
import sys

HAVE_TIMERFD = sys.platform == "linux"

if sys.platform == "linux":
    _libc = ctypes.PyDLL(None, use_errno=True)  # the calls are too short to release the GIL for
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
        """Let a timer ring at a moment of CLOCK_MONOTONIC, in nanoseconds; 0 disarms it."""
        if not -1 << 31 <= fd < 1 << 31:
            raise OverflowError("no descriptor is that large")
        seconds, nanoseconds = divmod(1 if at_ns < 0 else at_ns, 1_000_000_000)
        when = _ItimerSpec((0, 0), (seconds, nanoseconds))
        if _libc.timerfd_settime(fd, _TFD_TIMER_ABSTIME, ctypes.byref(when), None) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

else:

    def timerfd_create() -> int:
        """Refuse: see `HAVE_TIMERFD`."""
        raise NotImplementedError("there is no timerfd on this system")

    def timerfd_settime(fd: int, at_ns: int, /) -> None:
        """Arm a timer for a moment of CLOCK_MONOTONIC, in nanoseconds; 0 disarms it."""
        raise NotImplementedError("there is no timerfd on this system")
