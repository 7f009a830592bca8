"""Both ends of a queue in one event loop, and a check for leftovers of a test.

Leftovers are processes, shared memory, sockets and tasks of this process only.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from aioshm.arguments import check_int
from aioshm.queue.api import MessageQueue
from aioshm.ring.segment import orphans

READY_TIMEOUT_S = 30.0

_FIRST_PAUSE_S = 0.001
_MAX_PAUSE_S = 0.05
_LOOP_TURNS = 100
"""How often the loop runs until cancelled tasks must have ended."""


@asynccontextmanager
async def pair(**arguments: Any) -> AsyncIterator[tuple[MessageQueue[Any], MessageQueue[Any]]]:
    """Open a writer and its reader, ready; close both at the end of the block.

    Args:
        arguments: For `MessageQueue`, such as ``codec`` or ``options``; ``type`` holds for the reader, too.
    """
    async with readers(1, **arguments) as (writer, (reader,)):
        yield writer, reader


@asynccontextmanager
async def readers(count: int, **arguments: Any) -> AsyncIterator[tuple[MessageQueue[Any], list[MessageQueue[Any]]]]:
    """Open a writer and several readers, ready; close all at the end of the block.

    Args:
        count: How many readers.
        arguments: For `MessageQueue`, such as ``codec`` or ``options``; ``type`` holds for the readers, too.

    Raises:
        TypeError, ValueError: An argument is wrong; the text names it.
    """
    check_int("count", count, minimum=1)
    for name in ("n_reader", "n_local_reader"):
        if name in arguments:
            raise TypeError(f"{name} must not be given: it is the number of readers, {count}")
    async with AsyncExitStack() as stack:
        writer: MessageQueue[Any] = await stack.enter_async_context(MessageQueue(count, **arguments))
        ends: list[MessageQueue[Any]] = []
        for rank in range(count):
            reader = MessageQueue.create_from_handle(writer.export_handle(), rank, type=arguments.get("type"))
            ends.append(await stack.enter_async_context(reader))
        await asyncio.gather(*(end.wait_until_ready(READY_TIMEOUT_S) for end in (writer, *ends)))
        yield writer, ends


class Leftovers:
    """Finds the processes, segments and sockets that were added since its creation, and still exist.

    Args:
        collect: Collects garbage before `wait` searches: unreferenced objects are not left behind.
    """

    def __init__(self, collect: Callable[[], object] = gc.collect) -> None:
        self._collect = collect
        self._resources = _resources()
        self._processes = _descendants().keys()

    def find(self) -> list[str]:
        """Describe each added process, segment and socket that exists now. Does not wait."""
        found = sorted(_resources() - self._resources)
        added = sorted(item for item in _descendants().items() if item[0] not in self._processes)
        return found + [f"process {pid} ({command})" for pid, command in added]

    def wait(self, within_s: float = 5.0) -> list[str]:
        """Wait until nothing is left behind; return the leftovers after ``within_s`` seconds.

        Processes and connections take a moment to end.
        """
        self._collect()
        deadline = time.monotonic() + within_s
        pause = _FIRST_PAUSE_S
        while (left := self.find()) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)
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
    sockets: set[str] = set()
    directory = Path("/proc/self/fd")
    for fd in directory.iterdir() if directory.exists() else ():
        with suppress(OSError):  # the descriptor of the listing itself
            target = os.readlink(fd)
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
            elif target.startswith("/memfd:aioshm"):  # a ring or an overflow segment
                found.add(f"shared memory (inode {fd.stat().st_ino}), of a queue that was not closed")
    with suppress(FileNotFoundError):  # not Linux
        for line in Path("/proc/net/unix").read_bytes().splitlines()[1:]:
            fields = line.split(maxsplit=7)
            if len(fields) == 8 and b"aioshm" in fields[7] and fields[6].decode() in sockets:
                found.add(f"socket {os.fsdecode(fields[7])}")
    return found


def _descendants() -> dict[int, str]:
    """Return the command lines of running processes below this process, by pid, without multiprocessing's tracker."""
    import psutil

    found: dict[int, str] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
    return {pid: command for pid, command in found.items() if "resource_tracker" not in command}
