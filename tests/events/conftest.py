"""No test leaves a task, a thread or an open socket behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest_asyncio

from .helpers import Ends


@pytest_asyncio.fixture
async def nothing_left() -> AsyncIterator[None]:
    """Fail where a task or a thread of this library outlives the test."""
    yield
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others, f"tasks left: {others}"
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("aioshm-events")]
    assert not threads, f"threads left: {threads}"


@pytest_asyncio.fixture
async def ends(nothing_left: None) -> AsyncIterator[Ends]:
    made = Ends()
    yield made
    await made.close()
