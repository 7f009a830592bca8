"""Ordered access to shared memory: the C cores where they were built, else the Python cores.

For the memory order on x86 and Arm see docs/explanation/platform-notes.md, "Memory ordering".
"""

from __future__ import annotations

import importlib

from aioshm.config import native_wanted
from aioshm.ring.reference import STRONG_ORDER

__all__ = [
    "EMPTY",
    "FULL_FENCE",
    "RECHECK_S",
    "SLOW_PATH",
    "STRONG_ORDER",
    "Calls",
    "ReaderBase",
    "WriterBase",
    "memory_fence",
    "native_core",
]

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
    from aioshm.ring._native import EMPTY, SLOW_PATH, Calls, ReaderBase, WriterBase, memory_fence
else:
    from aioshm.ring.reference import EMPTY, SLOW_PATH, Calls, memory_fence

    if STRONG_ORDER:
        from aioshm.ring.reference import ReaderBase, WriterBase
    else:
        from aioshm.ring.reference import OrderedReaderBase as ReaderBase
        from aioshm.ring.reference import OrderedWriterBase as WriterBase
