"""The pytest plugin: fixtures for tests of programs that use aioshm, on any plugin's event loops.

Tests that use none of the fixtures import no queue.
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

from aioshm import testing

if TYPE_CHECKING:
    from aioshm.queue.api import MessageQueue

CLEAN_TIMEOUT = "aioshm_clean_timeout"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting of `aioshm_clean`."""
    parser.addini(
        CLEAN_TIMEOUT,
        "seconds that processes and connections may take to end, for the fixture aioshm_clean",
        default="5",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Check coroutine tests with `aioshm_clean` for tasks before their loop ends."""
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and "aioshm_clean" in item.fixturenames
            and inspect.iscoroutinefunction(item.obj)
        ):
            item.obj = testing.leaving_no_task(item.obj)


@pytest.fixture
def aioshm_pair() -> Callable[..., AbstractAsyncContextManager[tuple[MessageQueue[Any], MessageQueue[Any]]]]:
    """Return `aioshm.testing.pair`, which opens a writer and its reader for a block."""
    return testing.pair


@pytest.fixture
def aioshm_readers() -> Callable[..., AbstractAsyncContextManager[tuple[MessageQueue[Any], list[MessageQueue[Any]]]]]:
    """Return `aioshm.testing.readers`, which opens a writer and several readers for a block."""
    return testing.readers


@pytest.fixture
def aioshm_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if it leaves a process, shared memory, a socket or a task behind.

    For all tests: ``pytestmark = pytest.mark.usefixtures("aioshm_clean")`` in a module, or an autouse fixture in
    ``conftest.py`` that requests this fixture.
    """
    leftovers = testing.Leftovers()
    yield
    left = leftovers.wait(float(request.config.getini(CLEAN_TIMEOUT)))
    if left:
        pytest.fail(f"the test left behind: {'; '.join(left)}", pytrace=False)


@pytest.fixture
def aioshm_runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for this test's names and socket files, so that parallel tests can use the same names."""
    directory = Path(tempfile.mkdtemp(prefix="s"))  # short, as paths of sockets have to be
    monkeypatch.setenv("AIOSHM_RUNTIME_DIR", str(directory))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
