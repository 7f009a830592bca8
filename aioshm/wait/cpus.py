"""How many CPUs this process may really use."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus(cgroup: Path = _CGROUP, *, pids: Iterable[int] = ()) -> int:
    """Return the number of whole CPUs that affinity and cgroup quota leave, at least 1.

    Args:
        cgroup: Where the cgroup's files are.
        pids: Other processes, whose CPUs count too: ends that are pinned to one CPU each still have several together.
            Those that cannot be seen from here do not count.
    """
    try:
        together = set(os.sched_getaffinity(0))
        for pid in pids:
            try:
                together |= os.sched_getaffinity(pid)
            except OSError:
                pass  # gone, or in another pid namespace
        cpus = len(together)
    except AttributeError:  # macOS has no affinity
        cpus = os.cpu_count() or 1
    quota = _quota(cgroup)
    return max(1, min(cpus, int(quota)) if quota is not None else cpus)


def _quota(cgroup: Path) -> float | None:
    """Return the CPUs that the cgroup grants: v2 "cpu.max", or v1 (Documentation/scheduler/sched-bwc.rst)."""
    try:
        granted, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            granted = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if granted in {"max", "-1"}:
        return None
    try:
        return int(granted) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
