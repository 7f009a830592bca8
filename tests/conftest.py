"""Every async test runs on asyncio and on uvloop, and leaves nothing behind.

Several processes may run tests side by side (``-n auto``). What a test leaves behind is looked for among what its own
process has: its children, its sockets, its directory for socket files.
"""

from __future__ import annotations

import asyncio
import compileall
import gc
import importlib.util
import inspect
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from _pytest.config import create_terminal_writer
from hypothesis import settings

import aioshm
from aioshm.testing import Leftovers, leaving_no_task

pytest_plugins = ["aioshm.testing.plugin"]  # also where what is installed is older than its entry point

SLOW_COLLECTION_S = 0.01
MAX_WORKERS = 6
SAYS_NO_BYTECODE = sys.dont_write_bytecode
HAVE_TORCH = importlib.util.find_spec("torch") is not None
NEEDS_TORCH = re.compile(r"^(import torch|from (tensor_helpers|test_stateless_group) import)", re.MULTILINE)

# A deadline for each example would measure what else the machine does. What stands already, in CI, is kept.
settings.register_profile("unhurried", settings(), deadline=None)
settings.register_profile("fast", settings(), max_examples=30, deadline=None)
settings.load_profile("unhurried")


def pytest_configure(config: pytest.Config) -> None:
    """Hear Ctrl-C, which a shell has had ignored by what it runs in the background, and by its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.dont_write_bytecode = False
    if hasattr(config, "workerinput"):  # of pytest-xdist; the stacks of what hangs would go nowhere
        writer = create_terminal_writer(config, sys.__stderr__)
        config.get_terminal_writer = lambda: writer  # type: ignore[method-assign]
    else:
        # Hundreds of processes import this: with PYTHONDONTWRITEBYTECODE each of them would compile all of it.
        compileall.compile_dir(str(Path(aioshm.__file__).parent), quiet=1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(2 * cpus, MAX_WORKERS)  # half of the time is spent waiting


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the modules that need torch where torch is not installed."""
    if HAVE_TORCH or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    return True if NEEDS_TORCH.search(collection_path.read_text()) else None


def pytest_report_header() -> str | None:
    return None if HAVE_TORCH else "torch is not installed: test modules that import it are left out"


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session", autouse=True)
def no_socket_file_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let sockets that have files have them in a directory of the tests' own, and fail if any is there in the end."""
    base = tmp_path_factory.mktemp("s")  # short, as paths of sockets have to be
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(base))
        yield
    left = [path for path in base.rglob("*") if not path.is_dir()]
    shutil.rmtree(base)
    assert not left


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, a segment, a socket or a task behind."""
    if request.node.get_closest_marker("opens_nothing"):
        yield
        return
    leftovers = Leftovers(_collect_garbage)
    yield
    left = leftovers.wait(within_s=30)
    assert not left


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a directory whose path is short enough for sockets, which those named after tests need not be."""
    path = tmp_path_factory.mktemp("s")
    yield path
    shutil.rmtree(path)


def pytest_collection_finish() -> None:
    sys.dont_write_bytecode = SAYS_NO_BYTECODE  # for the tests all is as it was
    gc.collect()
    gc.freeze()  # what the imports made, so that looking for garbage after each test is quick


def _collect_garbage() -> None:
    began = time.perf_counter()
    gc.collect()
    if time.perf_counter() - began > SLOW_COLLECTION_S:
        gc.freeze()  # what later imports, and reports of tests, have made is not looked at again and again


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    again = [item for item in items if item.get_closest_marker("one_loop") and "uvloop" in item.name]
    if again:
        config.hook.pytest_deselected(items=again)
        items[:] = [item for item in items if item not in again]
    for item in items:
        if item.get_closest_marker("slow_on_uvloop") and "uvloop" in item.name:
            item.add_marker(pytest.mark.slow)
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = leaving_no_task(item.obj)
