"""Every async test runs on asyncio and on uvloop, and leaves nothing behind.

Several processes may run tests side by side (``-n auto``). What a test leaves behind is looked for among what its own
process has: its children, its sockets, its directory for socket files.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
import shutil
import signal
import sys
import tempfile
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

from aioshm.ring.segment import orphans

SLOW_COLLECTION_S = 0.01
MAX_WORKERS = 6

settings.register_profile("fast", max_examples=30)


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
    traces = {f"segment {name}" for name in orphans()}
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:  # the one that lists the directory
            continue
        if target.startswith("socket:["):
            traces.add(target[8:-1])
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and "aioshm" in fields[7] and fields[6] in traces:
            traces.add(f"socket {fields[7]}")
    return {trace for trace in traces if not trace.isdigit()}


def _children_besides(others: set[int]) -> set[int]:
    """Return the processes that this one has started, and those that they have, besides some that need no look."""
    children = set()
    for pid in set(psutil.pids()) - others:
        try:
            process = psutil.Process(pid)
            is_ours = any(parent.pid == os.getpid() for parent in process.parents())
            if not is_ours or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if "resource_tracker" not in " ".join(process.cmdline()):
                children.add(pid)
        except psutil.NoSuchProcess:
            continue
    return children


@pytest.fixture(scope="session", autouse=True)
def no_socket_file_left_behind() -> Iterator[None]:
    """Let sockets that have files have them in a directory of the tests' own, and fail if any is there in the end."""
    base = Path(tempfile.mkdtemp(prefix="aioshm-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(base))
        yield
    left = [path for path in base.rglob("*") if not path.is_dir()]
    shutil.rmtree(base)
    assert not left


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a segment, a socket or a task behind."""
    traces, processes = _own_traces(), set(psutil.pids())
    yield
    _collect_garbage()
    eventually(lambda: not _children_besides(processes), "the end of every child process")
    eventually(lambda: not _own_traces() - traces, f"the end of {_own_traces() - traces}")


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
