"""How many CPUs this process may use, and the policy of ends that share them."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

from aioshm.config import Options
from aioshm.wait.policy import Policy
from aioshm.wait.timer import wake_up_cost

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def _apart(peers: Sequence[int]) -> bool:
    """Return whether no peer is in this process, where a spin would keep the loop, or the GIL, from the peer."""
    return os.getpid() not in peers


def policy_for(peers: Sequence[int], options: Options, *, in_threads: bool = False) -> Policy:
    """Return the policy of an end on the loop, or of threads; ``peers``: the pids of the peers, 0 where unknown."""
    apart = _apart(peers)
    own = os.getpid() if in_threads else 0  # the program's threads wait, not this thread, which is the loop's
    cpus = usable_cpus(own=own, pids=[pid for pid in peers if pid > 0])
    return Policy(
        may_spin=apart and cpus > 1,
        crowded=apart and 1 + len(peers) > cpus,
        in_threads=in_threads,
        max_spin_cpu=options.max_spin_cpu,
        mode=options.wait,
        cost=wake_up_cost,
    )


def usable_cpus(
    cgroup: Path = _CGROUP, *, own_cgroup: Path = _OWN_CGROUP, own: int = 0, pids: Iterable[int] = ()
) -> int:
    """Return how many CPUs (at least 1) the affinity of the processes and the cgroup leave."""
    try:
        together = set(os.sched_getaffinity(own))
        for pid in pids:
            with suppress(OSError):  # the process is gone, or in another pid namespace
                together |= os.sched_getaffinity(pid)
        cpus = len(together)
    except AttributeError:  # macOS has no affinity
        cpus = os.cpu_count() or 1
    return max(1, int(min(cpus, _quota(cgroup, own_cgroup, int(monotonic())))))


@functools.lru_cache(maxsize=1)
def _quota(cgroup: Path, own_cgroup: Path, _second: int) -> float:
    """Return the CPUs that the cgroup (v2) of this process and its parents grant (cgroups(7)), read once a second."""
    path = ""
    with suppress(OSError, IndexError):  # no /proc, or no cgroups: the root's quota counts
        path = own_cgroup.read_text().split("0::", 1)[1].partition("\n")[0].strip("/")
    folder = cgroup / path
    if ".." in path or not folder.is_dir():  # outside of this namespace, or not visible in this container
        folder = cgroup
    quotas = [_cpu_max(folder)]
    while folder != cgroup:
        folder = folder.parent
        quotas.append(_cpu_max(folder))
    return min(quotas)


def _cpu_max(folder: Path) -> float:
    """Return the CPUs of "cpu.max" (Documentation/admin-guide/cgroup-v2.rst)."""
    try:
        granted, period = (folder / "cpu.max").read_text().split()
        return int(granted) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no quota ("max"), or no such file
        return float("inf")
