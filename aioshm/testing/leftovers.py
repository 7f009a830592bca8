"""What a test has left behind: processes, shared memory, sockets, tasks.

Other programs, and other processes that run tests side by side, may use the library at the same time: what they hold is
not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from aioshm.ring.segment import orphans

_HAS_LISTS_OF_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.05
_LAST_TURNS = 100
"""Of the loop, in which a task that was cancelled may end."""


class Leftovers:
    """Knows what this process holds when it is made, and finds what has been added since.

    Args:
        collect: Collects garbage before a look: what nothing refers to any more is not left behind.
    """

    def __init__(self, collect: Callable[[], object] = gc.collect) -> None:
        self._collect = collect
        self._traces, self._processes = _traces(), _descendants(os.getpid())

    def find(self) -> list[str]:
        """Return what has been added and is still there, in words. Does not wait."""
        found = sorted(_traces() - self._traces)
        for pid in sorted(_descendants(os.getpid()) - self._processes):
            if _runs(pid):
                found.append(f"process {pid} ({_command(pid)})")
        return found

    def wait(self, within_s: float = 5.0) -> list[str]:
        """Wait until nothing is left behind; return what still is when the time is over.

        Processes take a moment to end, and so do connections.

        Args:
            within_s: Seconds.
        """
        self._collect()
        deadline, pause = time.monotonic() + within_s, _FIRST_LOOK_S
        while (left := self.find()) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK_S)
        return left


def leaving_no_task(test: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return a coroutine function that does the same, and fails if it leaves a task of asyncio's behind.

    Raises:
        AssertionError: When it is awaited: the text names the tasks.
    """

    @functools.wraps(test)
    async def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            before = asyncio.all_tasks()
        except RuntimeError:  # a loop of another kind, such as trio's
            return await test(*args, **kwargs)
        result = await test(*args, **kwargs)
        for _ in range(_LAST_TURNS):  # a cancelled task needs a turn of the loop to end
            left = asyncio.all_tasks() - before
            if not left:
                return result
            await asyncio.sleep(0.001)
        raise AssertionError(f"the test left tasks behind: {left}")

    return checked


def _traces() -> set[str]:
    """Return what queues of this process, or of processes that are gone, have outside of themselves."""
    traces = {f"segment {name}" for name in orphans()}
    sockets, rings = _descriptors()
    traces.update(f"shared memory (inode {inode}), of a queue that was not closed" for inode in rings)
    for line in _unix_sockets():
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and b"aioshm" in fields[7] and fields[6].decode() in sockets:
            traces.add(f"socket {os.fsdecode(fields[7])}")
    return traces


def _unix_sockets() -> list[bytes]:
    try:
        return Path("/proc/net/unix").read_bytes().splitlines()[1:]
    except FileNotFoundError:
        return []  # no Linux


def _descriptors() -> tuple[set[str], set[int]]:
    """Return the inodes of this process' sockets, and of its rings and overflow segments that have no name."""
    sockets: set[str] = set()
    rings: set[int] = set()
    directory = "/proc/self/fd"
    for fd in os.listdir(directory) if os.path.isdir(directory) else ():
        with contextlib.suppress(OSError):  # the one that lists the directory
            target = os.readlink(f"{directory}/{fd}")
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
            elif target.startswith("/memfd:aioshm"):
                rings.add(os.stat(f"{directory}/{fd}").st_ino)
    return sockets, rings


def _descendants(ancestor: int) -> set[int]:
    """Return the processes that one has started, and those that they have.

    The kernel has lists of children (proc_pid_children(5)); looking for parents would be a look at every process of
    the machine, before and after each test. Kernels that were built without the lists leave no other way.
    """
    if not _HAS_LISTS_OF_CHILDREN:
        import psutil

        return {process.pid for process in psutil.Process(ancestor).children(recursive=True)}
    found: set[int] = set()
    parents = [ancestor]
    while parents:
        parent = parents.pop()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            for thread in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    children = Path(f"/proc/{parent}/task/{thread}/children").read_text().split()
                    parents += map(int, children)
                    found.update(map(int, children))
    return found


def _runs(pid: int) -> bool:
    """Tell whether a process runs, and is not the one that multiprocessing keeps."""
    if not _HAS_LISTS_OF_CHILDREN:
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in _command(pid)
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in (b"Z", b"X", b"") and "resource_tracker" not in _command(pid)


def _command(pid: int) -> str:
    if not _HAS_LISTS_OF_CHILDREN:
        import psutil

        with contextlib.suppress(psutil.Error):
            return " ".join(psutil.Process(pid).cmdline())
        return "gone"
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip())
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
