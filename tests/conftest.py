"""Every async test runs on asyncio and on uvloop, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

_SHM = Path("/dev/shm")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def eventually(condition: Callable[[], object], what: str = "the condition", within_s: float = 10.0) -> None:
    """Wait until something holds; fail, naming it, if it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {within_s} s"
        time.sleep(0.005)


def _own_traces() -> set[str]:
    """Return what this user's queues could leave behind outside of processes."""
    traces = {f"segment {path.name}" for path in _SHM.glob("aioshm-*")} if _SHM.is_dir() else set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        name = line.split(maxsplit=7)[7:]
        if name and "aioshm" in name[0]:
            traces.add(f"socket {name[0]}")
    return traces


def _children() -> set[int]:
    names = {}
    for child in psutil.Process().children(recursive=True):
        try:
            if "resource_tracker" not in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                names[child.pid] = child.name()
        except psutil.NoSuchProcess:
            continue
    return set(names)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a segment, a socket or a task behind."""
    traces, children = _own_traces(), _children()
    yield
    gc.collect()
    eventually(lambda: not _children() - children, "the end of every child process")
    eventually(lambda: not _own_traces() - traces, f"the end of {_own_traces() - traces}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
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
