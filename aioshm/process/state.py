"""What the operating system says of a process, for naming who holds a queue up."""

from __future__ import annotations

import signal
from pathlib import Path

_PF_EXITING = 0x4  # linux/sched.h

SUSPECT_STATES = frozenset({"stopped", "tracing-stop", "zombie", "dead", "gone", "disk-sleep"})
"""States in which a process does nothing for its queue."""


def process_state(pid: int) -> str:
    """Return "running", "sleeping", "stopped", "gone"...; a pid of 0 is in another pid namespace."""
    if pid <= 0:
        return "not visible from here"
    try:
        import psutil  # costs 12 ms: whoever holds nothing up does without
    except (ImportError, OSError):  # without a descriptor to read it
        return "not visible from here"
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"
    except (psutil.Error, OSError):  # the latter without /proc, or without a descriptor to read it
        return "not visible from here"


def is_dying(pid: int) -> bool:
    """Return whether a process is being ended, but has not closed all of its files yet (Linux; see proc(5))."""
    if pid <= 0:
        return False
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    pending = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    state, flags, threads = fields[0], int(fields[6]), int(fields[17])
    if state in "ZX" and threads <= 1:
        return False  # it has: whatever is open still is another process'
    return bool(flags & _PF_EXITING) or any(signals >> (signal.SIGKILL - 1) & 1 for signals in pending)
