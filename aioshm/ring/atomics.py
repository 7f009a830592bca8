"""Ordered access to shared memory: from the native core where that was built, else from its Python twin.

A byte store or load of the twin, through a ``memoryview``, compiles to one plain machine instruction. x86 keeps stores
in order and loads in order (Intel SDM vol. 3, 9.2); all it may do is let a load overtake an earlier store. Arm promises
neither, so there the twin has fences between its steps.
"""

from __future__ import annotations

import importlib
import sys

from aioshm.config import native_wanted
from aioshm.ring import _portable
from aioshm.ring._portable import STRONG_ORDER

__all__ = [
    "ELSEWHERE",
    "FULL_FENCE",
    "HAVE_TIMERFD",
    "NOTHING",
    "RECHECK_S",
    "STRONG_ORDER",
    "Calls",
    "ReaderCore",
    "WriterCore",
    "memory_fence",
    "native_core",
    "timerfd_create",
    "timerfd_settime",
]

HAVE_TIMERFD = sys.platform == "linux"

RECHECK_S = 0.005
"""How long a parked end sleeps at most where there is no `FULL_FENCE`."""


def _load() -> bool:
    if not native_wanted():
        return False
    try:
        importlib.import_module("aioshm.ring._native")
    except ImportError:  # it was not built: no compiler, or not for this machine
        return False
    return True


native_core: bool = _load()
"""Whether the native core runs."""

FULL_FENCE = native_core or STRONG_ORDER
"""Whether `memory_fence` is a full one, so that no wake-up can be lost."""

if native_core:
    from aioshm.ring._native import (
        ELSEWHERE,
        NOTHING,
        Calls,
        ReaderCore,
        WriterCore,
        memory_fence,
    )
else:
    from aioshm.ring._portable import ELSEWHERE, NOTHING, Calls, memory_fence

    if STRONG_ORDER:
        from aioshm.ring._portable import ReaderCore, WriterCore
    else:
        from aioshm.ring._portable import OrderedReaderCore as ReaderCore
        from aioshm.ring._portable import OrderedWriterCore as WriterCore

if HAVE_TIMERFD:
    if native_core:
        from aioshm.ring._native import timerfd_create, timerfd_settime
    else:
        timerfd_create, timerfd_settime = _portable.timerfd_create, _portable.timerfd_settime
else:

    def timerfd_create() -> int:
        """Refuse: see `HAVE_TIMERFD`."""
        raise NotImplementedError("there is no timerfd on this system")

    def timerfd_settime(fd: int, at_ns: int, /) -> None:
        """Refuse: see `HAVE_TIMERFD`."""
        raise NotImplementedError("there is no timerfd on this system")
