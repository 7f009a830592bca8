"""No test leaves a task, a thread or an open socket behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio

from .helpers import PATIENCE_S, Ends
from .raw import Raw


@pytest_asyncio.fixture
async def nothing_left() -> AsyncIterator[None]:
    """Fail where a task or a thread of this library outlives the test."""
    yield
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others, f"tasks left: {others}"
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("aioshm-events")]
    for thread in threads:
        thread.join(PATIENCE_S)  # where opening a publisher has failed, nobody waits for its end
        assert not thread.is_alive(), f"{thread.name} was left"


@pytest_asyncio.fixture
async def ends(nothing_left: None) -> AsyncIterator[Ends]:
    made = Ends()
    yield made
    await made.close()


@pytest.fixture
def raw() -> Iterator[Callable[..., Raw]]:
    made: list[Raw] = []

    def make(*arguments: Any, **options: Any) -> Raw:
        made.append(Raw(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.socket.close()
