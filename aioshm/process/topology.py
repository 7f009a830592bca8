"""The CPUs, sockets and NUMA nodes of this machine, as Linux lists them in /sys."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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


def show_cpus(cpus: Collection[int]) -> str:
    """Return a list such as "0-3,8"; "none" without CPUs."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs) or "none"


def _memory(file: Path) -> dict[str, int]:
    """Return the bytes of a node's "meminfo", by name: lines such as "Node 0 MemTotal: 4096 kB"."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    return {name.rstrip(":"): int(size) * 1024 for _, _, name, size, *unit in map(str.split, lines) if unit == ["kB"]}
