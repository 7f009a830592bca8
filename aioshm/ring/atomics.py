"""What the ring needs to know of the processor's memory model, and the fence it builds on.

A byte store or load through a ``memoryview`` compiles to one plain machine instruction. x86 keeps stores in order and
loads in order (Intel SDM vol. 3, 9.2); all it may do is let a load overtake an earlier store. Arm promises neither.
"""

from __future__ import annotations

import platform
import threading

STRONG_ORDER = platform.machine().lower() in {"x86_64", "amd64", "i686", "i386", "x86"}
"""Whether stores stay in order among themselves, and loads among themselves."""

RECHECK_S = 0.005
"""How long a parked end sleeps at most where `memory_fence` is no full fence."""

_lock = threading.Lock()


def memory_fence() -> None:
    """Let no earlier store pass a later load.

    A lock round trip holds a locked instruction, which is a full fence on x86. Elsewhere it orders as acquire and
    release only, so an end that parks there looks again every `RECHECK_S` seconds.
    """
    with _lock:
        pass
