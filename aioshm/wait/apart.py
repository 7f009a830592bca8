"""Moves a thread away from the CPU that its peer needs."""

from __future__ import annotations

import ctypes
import os
import sys

_sched_getcpu = getattr(ctypes.CDLL(None), "sched_getcpu", None) if sys.platform == "linux" else None


def move_away() -> bool:
    """Move this thread to another of its CPUs; return whether it moved. Its affinity stays."""
    if _sched_getcpu is None:
        return False
    allowed = os.sched_getaffinity(0)
    others = allowed - {_sched_getcpu()}
    if not others:
        return False
    try:
        os.sched_setaffinity(0, others)
    except OSError:  # a sandbox forbids it, or these CPUs have been taken away
        return False
    try:
        os.sched_setaffinity(0, allowed)
    except OSError:
        pass  # taken away meanwhile: the kernel has chosen what is left
    return True
