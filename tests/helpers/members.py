"""Process groups of one's own: `meet` makes one of threads, `FileGroup` one of processes that share a directory."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


class Member:
    """One rank of a group whose ranks are threads of one process.

    Attributes:
        before: Called before each collective with the number of those that this rank has begun; it may wait, or raise.
        calls: How many collectives this rank has begun.
    """

    def __init__(self, rank: int, table: list[bytes], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world_size = len(table)
        self.before: Callable[[int], None] = lambda number: None
        self.calls = 0
        self._table = table
        self._barrier = barrier

    def all_gather_obj(self, obj: Any) -> list[Any]:
        number, self.calls = self.calls, self.calls + 1
        self.before(number)
        self._table[self.rank] = pickle.dumps(obj)
        self._barrier.wait()
        everybody = [pickle.loads(sent) for sent in self._table]
        self._barrier.wait()
        return everybody

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        return self.all_gather_obj(obj)[src]

    def break_off(self) -> None:
        """Break the group, and raise what a broken connection might."""
        self._barrier.abort()
        raise ConnectionResetError("the network is down")


def meet(world_size: int, timeout: float = 20.0) -> list[Member]:
    """Return the ranks of a new group."""
    table = [b""] * world_size
    barrier = threading.Barrier(world_size, timeout=timeout)
    return [Member(rank, table, barrier) for rank in range(world_size)]


def each(ranks: Sequence[Any], call: Callable[[Any], Any]) -> list[Any]:
    """Make a call at every rank at once; return the results, or errors, by rank."""

    def attempt(rank: Any) -> Any:
        try:
            return call(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(attempt, ranks))


class FileGroup:
    """One rank of a group whose ranks see one directory, whatever else of the machine each of them sees."""

    def __init__(self, directory: str, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._directory = Path(directory)
        self._calls = 0

    def all_gather_obj(self, obj: Any) -> list[Any]:
        self._calls += 1
        mine = self._path(self.rank)
        mine.with_suffix(".new").write_bytes(pickle.dumps(obj))
        os.replace(mine.with_suffix(".new"), mine)
        return [pickle.loads(self._await(self._path(rank))) for rank in range(self.world_size)]

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        return self.all_gather_obj(obj)[src]

    def _path(self, rank: int) -> Path:
        return self._directory / f"{self._calls}-{rank}.obj"

    def _await(self, path: Path) -> bytes:
        deadline = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < deadline, f"{path} did not come"
            time.sleep(0.002)
        return path.read_bytes()


def probe_sockets() -> set[str]:
    """Return where this process' probes listen: paths, or names with an ``@``. Other programs' do not count."""
    own = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(fd))
        except FileNotFoundError:  # the one that lists the directory, or another thread's
            continue
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {line[-1] for line in lines if ".probe" in line[-1] and f"socket:[{line[6]}]" in own}


def traces_of_probes() -> set[str]:
    """Return the sockets, mappings and threads that probes have in this process now."""
    maps = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "aioshm" in line}
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("aioshm-")}
    return probe_sockets() | {name for name in maps if "_native" not in name} | threads
