"""Finds processes, shared memory, sockets and tasks that a test left behind.

Those of other programs, and of other test processes, are not counted.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from aioshm.ring.segment import orphans

_HAS_LISTS_OF_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.05
_LOOP_TURNS = 100
"""How often the loop runs until cancelled tasks must have ended."""


class Leftovers:
    """Finds the processes, segments and sockets that were added since this was made, and still exist.

    Args:
        collect: Collects garbage before `wait` searches: unreferenced objects are not left behind.
    """

    def __init__(self, collect: Callable[[], object] = gc.collect) -> None:
        self._collect = collect
        self._resources = _resources()
        self._processes = _descendants().keys()

    def find(self) -> list[str]:
        """Describe what was added and still exists. Does not wait."""
        found = sorted(_resources() - self._resources)
        added = sorted(item for item in _descendants().items() if item[0] not in self._processes)
        return found + [f"process {pid} ({command})" for pid, command in added]

    def wait(self, within_s: float = 5.0) -> list[str]:
        """Wait until nothing is left behind; return what still is after ``within_s`` seconds.

        Processes and connections take a moment to end.
        """
        self._collect()
        deadline, pause = time.monotonic() + within_s, _FIRST_PAUSE_S
        while (left := self.find()) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)
        return left


def leaving_no_task(test: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Wrap a coroutine function: it raises `AssertionError` if it leaves asyncio tasks behind."""

    @functools.wraps(test)
    async def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            before = asyncio.all_tasks()
        except RuntimeError:  # another kind of loop, such as trio's
            return await test(*args, **kwargs)
        result = await test(*args, **kwargs)
        for _ in range(_LOOP_TURNS):
            left = asyncio.all_tasks() - before
            if not left:
                return result
            await asyncio.sleep(0.001)
        raise AssertionError(f"the test left tasks behind: {left}")

    return checked


def _resources() -> set[str]:
    """Return the shared memory and the sockets of this process's queues, and segments of processes that are gone."""
    found = {f"segment {name}" for name in orphans()}
    sockets, rings = _descriptors()
    found.update(f"shared memory (inode {inode}), of a queue that was not closed" for inode in rings)
    for line in _unix_sockets():
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and b"aioshm" in fields[7] and fields[6].decode() in sockets:
            found.add(f"socket {os.fsdecode(fields[7])}")
    return found


def _unix_sockets() -> list[bytes]:
    try:
        return Path("/proc/net/unix").read_bytes().splitlines()[1:]
    except FileNotFoundError:
        return []  # no Linux


def _descriptors() -> tuple[set[str], set[int]]:
    """Return the inodes of this process's sockets, and of its rings and overflow segments that have no name."""
    sockets: set[str] = set()
    rings: set[int] = set()
    directory = "/proc/self/fd"
    for fd in os.listdir(directory) if os.path.isdir(directory) else ():
        with suppress(OSError):  # the descriptor of the listing itself
            target = os.readlink(f"{directory}/{fd}")
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
            elif target.startswith("/memfd:aioshm"):
                rings.add(os.stat(f"{directory}/{fd}").st_ino)
    return sockets, rings


def _descendants() -> dict[int, str]:
    """Return the command lines of running processes below this one, by pid, without multiprocessing's tracker.

    The kernel's lists of children (proc_pid_children(5)) save a search through all processes of the machine before and
    after each test. Some kernels, and macOS, have no such lists.
    """
    found: dict[int, str] = {}
    if not _HAS_LISTS_OF_CHILDREN:
        import psutil

        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = " ".join(process.cmdline())
    parents = [os.getpid()] if _HAS_LISTS_OF_CHILDREN else []
    while parents:
        parent = parents.pop()
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended
            for thread in os.listdir(f"/proc/{parent}/task"):
                with suppress(FileNotFoundError, ProcessLookupError):
                    children = Path(f"/proc/{parent}/task/{thread}/children").read_text().split()
                    parents += map(int, children)
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{parent}/stat").read_bytes().rpartition(b") ")[2][:1] not in b"ZX":
                command = Path(f"/proc/{parent}/cmdline").read_bytes().replace(b"\0", b" ").strip()
                found[parent] = os.fsdecode(command)
    found.pop(os.getpid(), None)
    return {pid: command for pid, command in found.items() if "resource_tracker" not in command}
