"""Where a process runs: its environment variables, CPUs and NUMA node, by its rank; and the nodes of this machine."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from aioshm.arguments import check_int, check_type, shown

Environment: TypeAlias = Mapping[str, str | None]


class Place(NamedTuple):
    """The placement of one rank; ``cpus`` are checked, and lie in the NUMA node, if there is one."""

    env: Environment
    cpus: tuple[int, ...] = ()  # empty: those of the starting thread
    numa_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Environment variables, CPUs and NUMA node of each process, by its rank.

        Placement(env=lambda rank: {"CUDA_VISIBLE_DEVICES": str(rank)}, numa_node=lambda rank: rank // 4)

    Each attribute is a value for all ranks, or a callable that gets the rank and returns the value. The callable runs
    in the process that starts the ranks, once for each rank: a restarted process gets the same values. The values take
    effect before the new process imports anything except the standard library.

    Attributes:
        env: Environment variables, on top of those of this process; None as the value of a variable unsets it.
        cpus: The numbers of the CPUs that the process may use, among those of the starting thread; None: as the thread.
        numa_node: The number of a NUMA node. The process uses the CPUs of the node, and with ``cpus`` those that are in
            both. New memory comes from the node while the node has some, then from other nodes; without the system's
            permission (``set_mempolicy``, which containers often forbid) only the CPUs are set. None: as this process.

    Raises:
        TypeError, ValueError: A value is invalid. The text names it. Results of callables, and the CPUs, are checked
            before a process is started; then the text also names the rank, and the CPUs that are allowed. ``cpus`` and
            ``numa_node`` need Linux.
    """

    env: Environment | Callable[[int], Environment | None] | None = None
    cpus: Collection[int] | Callable[[int], Collection[int] | None] | None = None
    numa_node: int | Callable[[int], int | None] | None = None
    _places: dict[int, Place] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None and not callable(value):
                object.__setattr__(self, name, check(f"placement.{name}", value))

    @property
    def depends_on_rank(self) -> bool:
        """Whether a value is a callable."""
        return any(callable(getattr(self, name)) for name in _CHECKS)

    def of(self, rank: int) -> Place:
        """Return the placement of a rank; raise TypeError or ValueError if it is invalid, or not possible now."""
        if rank not in self._places:
            env = self._value("env", rank)
            self._places[rank] = Place(env or {}, self._value("cpus", rank) or (), self._value("numa_node", rank))
        place = self._places[rank]
        if place.cpus or place.numa_node is not None:
            return place._replace(cpus=_usable(place, rank))
        return place

    def _value(self, name: str, rank: int) -> Any:
        value = getattr(self, name)
        if not callable(value):
            return value
        where = f"placement.{name} of rank {rank}"
        try:
            value = value(rank)
        except Exception as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{where} failed: {type(error).__name__}: {error}") from error
        return None if value is None else _CHECKS[name](where, value)


def check_placement(value: object, ranks: Iterable[int] = ()) -> Placement | None:
    """Return ``value`` if it is None, or a `Placement` that is possible for these ranks now."""
    placement = check_type("placement", value, Placement)
    for rank in ranks:
        place_of(placement, rank)
    return placement


def place_of(placement: Placement | None, rank: int) -> Place | None:
    """Return the placement of a rank, if there is a placement."""
    if placement is None:
        return None
    return placement.of(rank)


def _usable(place: Place, rank: int) -> tuple[int, ...]:
    """Return the CPUs of a place that this process may use; raise ValueError if a given CPU is not one of them."""
    allowed = allowed_cpus()
    if not allowed:
        raise ValueError(
            f"placement of rank {rank}: {sys.platform} has no CPU affinity, which cpus and numa_node need; env works"
        )
    wrong = set(place.cpus) - allowed
    if wrong:
        raise ValueError(
            f"placement.cpus of rank {rank}: {show_ranges(wrong)} cannot be used here; "
            f"allowed are {show_ranges(allowed)}"
        )
    if place.numa_node is None:
        return place.cpus
    nodes = numa_nodes()
    where = f"placement.numa_node of rank {rank}: node {place.numa_node}"
    if place.numa_node not in nodes:
        raise ValueError(f"{where} does not exist; the nodes are {show_ranges(nodes)}")
    inside = nodes[place.numa_node].cpus
    cpus = inside & (set(place.cpus) or allowed)
    if not cpus:
        among = f"those allowed here, {show_ranges(allowed)}"
        if place.cpus:
            among = f"placement.cpus, {show_ranges(place.cpus)}"
        raise ValueError(f"{where} has CPUs {show_ranges(inside)}, and none of them is among {among}")
    return tuple(sorted(cpus))


def _check_env(where: str, value: object) -> Environment:
    if not isinstance(value, Mapping):
        raise TypeError(f"{where} must be a mapping of names to strings or None, not {shown(value)}")
    for name, text in value.items():
        if not isinstance(name, str) or not isinstance(text, str | None):
            raise TypeError(f"{where} must map names to strings or None, not {shown(name)} to {shown(text)}")
        if not name or "=" in name or "\0" in name or "\0" in (text or ""):
            raise ValueError(f"{where} cannot set {shown(name)} to {shown(text)}: names have no '=', and none a NUL")
    return dict(value)


def _check_cpus(where: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        raise TypeError(f"{where} must be a collection of ints, not {shown(value)}")
    if not value:
        raise ValueError(f"{where} must not be empty")
    return tuple(sorted({check_int(f"{where}: a CPU", cpu, minimum=0) for cpu in value}))


def _check_node(where: str, value: object) -> int:
    return check_int(where, value, minimum=0)


_CHECKS: Mapping[str, Callable[[str, object], Any]] = {
    "env": _check_env,
    "cpus": _check_cpus,
    "numa_node": _check_node,
}


# The machine, as Linux lists its parts in /sys

_SYSTEM = Path("/sys/devices/system")


class NumaNode(NamedTuple):
    """A NUMA node; the memory in bytes, None where the system does not say."""

    cpus: frozenset[int]
    memory_bytes: int | None = None
    free_bytes: int | None = None


def allowed_cpus() -> frozenset[int]:
    """Return the CPUs that the calling thread may use; empty where the system has no affinity (macOS)."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    return frozenset(os.sched_getaffinity(0))


def numa_nodes(system: Path = _SYSTEM) -> dict[int, NumaNode]:
    """Return the NUMA nodes with their online CPUs, by number; empty where the system lists none."""
    nodes = {}
    for folder in system.glob("node/node[0-9]*"):
        with suppress(OSError, ValueError):  # a node may go offline at any time
            memory = _memory(folder / "meminfo")
            number = int(folder.name.removeprefix("node"))
            cpus = parse_cpus((folder / "cpulist").read_text())
            nodes[number] = NumaNode(cpus, memory.get("MemTotal"), memory.get("MemFree"))
    return dict(sorted(nodes.items()))


def sockets(system: Path = _SYSTEM) -> dict[int, frozenset[int]]:
    """Return the online CPUs of each socket (package); empty where the system lists none."""
    found: dict[int, set[int]] = {}
    for file in system.glob("cpu/cpu[0-9]*/topology/physical_package_id"):
        with suppress(OSError, ValueError):
            cpu = int(file.parent.parent.name.removeprefix("cpu"))
            found.setdefault(int(file.read_text()), set()).add(cpu)
    return {number: frozenset(cpus) for number, cpus in sorted(found.items())}


def parse_cpus(text: str) -> frozenset[int]:
    """Return the CPUs of a list such as "0-3,8"; raise ValueError for any other text."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def show_ranges(numbers: Collection[int]) -> str:
    """Return a list such as "0-3,8"; "none" without numbers."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs) or "none"


def _memory(file: Path) -> dict[str, int]:
    """Return the bytes of a node's "meminfo", by name: lines such as "Node 0 MemTotal: 4096 kB"."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    return {name.rstrip(":"): int(size) * 1024 for _, _, name, size, *unit in map(str.split, lines) if unit == ["kB"]}


# The CPUs that cgroups leave

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


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
