"""The pytest plugin: fixtures for tests of programs that use aioshm, on any plugin's event loops.

Nothing is imported, and nothing costs anything, in tests that do not ask for one of the fixtures.
"""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from aioshm.queue.api import MessageQueue

CLEAN_TIMEOUT = "aioshm_clean_timeout"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting that `aioshm_clean` has."""
    parser.addini(
        CLEAN_TIMEOUT,
        "seconds that processes and connections may take to end, for the fixture aioshm_clean",
        default="5",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let coroutine tests that ask for `aioshm_clean` look for tasks before their loop is over."""
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and "aioshm_clean" in item.fixturenames
            and inspect.iscoroutinefunction(item.obj)
        ):
            from aioshm.testing.leftovers import leaving_no_task

            item.obj = leaving_no_task(item.obj)


@pytest.fixture
def aioshm_pair() -> Callable[..., AbstractAsyncContextManager[tuple[MessageQueue[Any], MessageQueue[Any]]]]:
    """Return what gives a writer and its reader to a block, ready: `aioshm.testing.pair`."""
    from aioshm.testing.ends import pair

    return pair


@pytest.fixture
def aioshm_readers() -> Callable[..., AbstractAsyncContextManager[tuple[MessageQueue[Any], list[MessageQueue[Any]]]]]:
    """Return what gives a writer and several readers in one loop to a block, ready: `aioshm.testing.readers`."""
    from aioshm.testing.ends import readers

    return readers


@pytest.fixture
def aioshm_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if it leaves a process, shared memory, a socket or a task behind.

    For all tests: ``pytestmark = pytest.mark.usefixtures("aioshm_clean")`` in a module, or an autouse fixture that asks
    for it in ``conftest.py``.
    """
    from aioshm.testing.leftovers import Leftovers

    leftovers = Leftovers()
    yield
    left = leftovers.wait(float(request.config.getini(CLEAN_TIMEOUT)))
    if left:
        pytest.fail(f"the test left behind: {'; '.join(left)}", pytrace=False)


@pytest.fixture
def aioshm_runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of the test's own for names and socket files, so that tests side by side may use the same names."""
    directory = Path(tempfile.mkdtemp(prefix="s"))  # short, as paths of sockets have to be
    monkeypatch.setenv("AIOSHM_RUNTIME_DIR", str(directory))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
