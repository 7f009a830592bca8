"""How many CPUs this process may use, and the policy of ends that share them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from time import monotonic

from aioshm.config import Options
from aioshm.wait.policy import Policy
from aioshm.wait.timer import wake_up_cost

_CGROUP = Path("/sys/fs/cgroup")
_PLACES = Path("/proc/self/cgroup")
_MAX_BYTES = 65_536


def _apart(peers: Sequence[int]) -> bool:
    """Return whether no peer is in this process, where spinning would keep its loop, or its GIL, from it."""
    return os.getpid() not in peers


def policy_for(peers: Sequence[int], options: Options, *, in_threads: bool = False) -> Policy:
    """Return the policy of an end on the loop, or of threads; ``peers``: the other ends' pids, 0 where unknown."""
    apart = _apart(peers)
    own = os.getpid() if in_threads else 0  # it is the program's threads that wait, not this one, the loop's
    cpus = usable_cpus(own=own, pids=[pid for pid in peers if pid > 0])
    crowded = apart and 1 + len(peers) > cpus
    return Policy(
        may_spin=apart and cpus > 1,
        crowded=crowded,
        in_threads=in_threads,
        max_spin_cpu=options.max_spin_cpu,
        mode=options.wait,
        cost=wake_up_cost,
    )


def usable_cpus(cgroup: Path = _CGROUP, *, places: Path = _PLACES, own: int = 0, pids: Iterable[int] = ()) -> int:
    """Return the whole CPUs that affinity (``own``, 0: this thread's; ``pids`` too) and quotas leave, at least 1."""
    try:
        together = set(os.sched_getaffinity(own))
        for pid in pids:
            try:
                together |= os.sched_getaffinity(pid)
            except OSError:
                pass  # gone, or in another pid namespace
        cpus = len(together)
    except AttributeError:  # macOS has no affinity
        cpus = os.cpu_count() or 1
    return max(1, int(min([cpus, *_quotas(cgroup, places, int(monotonic()))])))


@functools.lru_cache(maxsize=1)
def _quotas(cgroup: Path, places: Path, _second: int) -> list[float]:
    """Return the CPUs that each cgroup of this process grants, parents included (cgroups(7)), read once a second."""
    quotas = []
    for root, place, quota_of in _own_cgroups(str(cgroup), str(places)):
        folder = f"{root}/{place}" if place else root
        while True:
            quota = quota_of(folder)
            if quota is not None:
                quotas.append(quota)
            if folder == root:
                break
            folder = os.path.dirname(folder)
    return quotas


def _own_cgroups(cgroup: str, places: str) -> Iterator[tuple[str, str, Callable[[str], float | None]]]:
    """Yield the root, this process' path below it, and the reader of each hierarchy with quotas."""
    below: dict[str, str] = {}  # by controller; "" is v2
    try:
        for line in _read(places).splitlines():
            _, controllers, place = line.split(":", 2)
            for controller in controllers.split(","):
                below[controller] = place.strip("/")
    except (OSError, ValueError):
        pass  # no /proc, or no cgroups: only what is at the roots counts
    for root, controller, quota_of in (
        (cgroup, "", _quota_v2),
        (f"{cgroup}/unified", "", _quota_v2),
        (f"{cgroup}/cpu", "cpu", _quota_v1),
        (f"{cgroup}/cpu,cpuacct", "cpu", _quota_v1),
    ):
        place = below.get(controller, "")
        # A path that leads out of this namespace, or that a container does not see, is of no use here.
        yield root, place if place and ".." not in place and os.path.isdir(f"{root}/{place}") else "", quota_of


def _quota_v2(folder: str) -> float | None:
    """Return the CPUs of "cpu.max" (Documentation/admin-guide/cgroup-v2.rst)."""
    try:
        granted, period = _read(f"{folder}/cpu.max").split()
    except (OSError, ValueError):
        return None
    return _share(granted, period)


def _quota_v1(folder: str) -> float | None:
    """Return the CPUs of "cpu.cfs_quota_us" (Documentation/scheduler/sched-bwc.rst)."""
    try:
        granted = _read(f"{folder}/cpu.cfs_quota_us").strip()
        period = _read(f"{folder}/cpu.cfs_period_us").strip()
    except (OSError, ValueError):
        return None
    return _share(granted, period)


def _share(granted: str, period: str) -> float | None:
    if granted in {"max", "-1"}:
        return None
    try:
        return int(granted) / int(period)
    except (ValueError, ZeroDivisionError):
        return None


def _read(path: str) -> str:
    """Return a small file's content, faster than `pathlib`: attaching readers wait for six."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _MAX_BYTES).decode()
    finally:
        os.close(fd)
