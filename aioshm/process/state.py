"""What the operating system says of a process, for naming who holds a queue up."""

from __future__ import annotations

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
