"""Every async test runs on asyncio and on uvloop, and leaves nothing behind.

Several processes may run tests side by side (``-n auto``). What a test leaves behind is looked for among what its own
process has: its children, its sockets, its directory for socket files.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from _pytest.config import create_terminal_writer
from hypothesis import settings
from support import eventually

from aioshm.ring.refusals import SHM_DIR
from aioshm.ring.segment import NAME_PREFIX, orphans

SLOW_COLLECTION_S = 0.01
MAX_WORKERS = 6
HAS_LISTS_OF_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()

# A deadline for each example would measure what else the machine does. What stands already, in CI, is kept.
settings.register_profile("unhurried", settings(), deadline=None)
settings.register_profile("fast", settings(), max_examples=30, deadline=None)
settings.load_profile("unhurried")


def pytest_configure(config: pytest.Config) -> None:
    """Hear Ctrl-C, which a shell has had ignored by what it runs in the background, and by its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):  # of pytest-xdist; the stacks of what hangs would go nowhere
        writer = create_terminal_writer(config, sys.__stderr__)
        config.get_terminal_writer = lambda: writer  # type: ignore[method-assign]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus + 1, MAX_WORKERS)  # a third of the time is spent waiting


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def _own_traces() -> set[str]:
    """Return what queues of this process, or of processes that are gone, have outside of themselves.

    Other programs may use the library at the same time: what they hold is not counted.
    """
    has_segments = any(name.startswith(NAME_PREFIX) for name in os.listdir(SHM_DIR))
    traces = {f"segment {name}" for name in orphans()} if has_segments else set()
    for line in Path("/proc/net/unix").read_bytes().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and b"aioshm" in fields[7] and fields[6] in _own_sockets():
            traces.add(f"socket {os.fsdecode(fields[7])}")
    return traces


def _own_sockets() -> set[bytes]:
    """Return the inodes of this process' sockets."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists the directory
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1].encode())
    return inodes


def _children_besides(others: set[int]) -> set[int]:
    """Return the processes that this one has started, and those that they have, besides some that need no look."""
    return {pid for pid in _descendants(os.getpid()) - others if _is_worth_a_look(pid)}


def _descendants(ancestor: int) -> set[int]:
    """Return the processes that one has started, and those that they have.

    The kernel has lists of children (proc_pid_children(5)); looking for parents would be a look at every process of
    the machine, before and after each test. Kernels that were built without the lists leave no other way.
    """
    if not HAS_LISTS_OF_CHILDREN:
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


def _is_worth_a_look(pid: int) -> bool:
    """Say whether a process runs, and is not the one that multiprocessing keeps."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
        return state not in (b"Z", b"X", b"") and b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="session", autouse=True)
def no_socket_file_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let sockets that have files have them in a directory of the tests' own, and fail if any is there in the end.

    What a run that was killed leaves there is removed by a later one, as pytest does with its directories.
    """
    base = tmp_path_factory.mktemp("s")  # short, as paths of sockets have to be
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(base))
        yield
    left = [path for path in base.rglob("*") if not path.is_dir()]
    shutil.rmtree(base)
    assert not left


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a segment, a socket or a task behind."""
    traces, processes = _own_traces(), _descendants(os.getpid())
    yield
    _collect_garbage()
    eventually(lambda: not _children_besides(processes), "the end of every child process")
    if left := _own_traces() - traces:
        eventually(lambda: not _own_traces() - traces, f"the end of {left}")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what the imports made, so that looking for garbage after each test is quick


def _collect_garbage() -> None:
    began = time.perf_counter()
    gc.collect()
    if time.perf_counter() - began > SLOW_COLLECTION_S:
        gc.freeze()  # what later imports, and reports of tests, have made is not looked at again and again


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow_on_uvloop") and "uvloop" in item.name:
            item.add_marker(pytest.mark.slow)
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _leaving_no_task(item.obj)


def _leaving_no_task(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    @functools.wraps(test)
    async def checked(*args: Any, **kwargs: Any) -> None:
        before = asyncio.all_tasks()
        await test(*args, **kwargs)
        for _ in range(100):  # a cancelled task needs a turn of the loop to end
            left = asyncio.all_tasks() - before
            if not left:
                return
            await asyncio.sleep(0.001)
        pytest.fail(f"the test left tasks behind: {left}")

    return checked
