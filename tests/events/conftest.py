"""Every async test runs on asyncio and on uvloop, and none leaves a task, a thread or an open socket
behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest_asyncio
import uvloop

from aioshm.events import (
    BlockRemoved,
    BlockStored,
    Delivery,
    EventBatch,
    EventSubscriber,
    ZmqEventPublisher,
)

ANY = "tcp://127.0.0.1:0"
PATIENCE_S = 20.0


def pytest_asyncio_loop_factories(
    config: Any, item: Any
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture
async def nothing_left() -> AsyncIterator[None]:
    """Fail where a task or a thread of this library outlives the test."""
    yield
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others, f"tasks left: {others}"
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("aioshm-events")]
    assert not threads, f"threads left: {threads}"


class Ends:
    """Publishers and subscribers that are closed when the test is over."""

    def __init__(self) -> None:
        self._all: list[ZmqEventPublisher | EventSubscriber] = []

    def publisher(self, rank: int = 0, endpoint: str = ANY, replay: str | None = ANY, **options: Any) -> Any:
        options.setdefault("bind", True)
        made = ZmqEventPublisher(rank, endpoint, replay, **options)
        self._all.append(made)
        return made

    def subscriber(self, publisher: Any, *args: Any, replay: bool = True, **options: Any) -> EventSubscriber:
        options.setdefault("check_interval", 0.1)
        options.setdefault("replay_timeout", 2.0)
        made = EventSubscriber(
            publisher.endpoint, publisher.replay_endpoint if replay else None, *args, **options
        )
        self._all.append(made)
        return made

    async def close(self) -> None:
        for end in reversed(self._all):
            await end.aclose()


@pytest_asyncio.fixture
async def ends(nothing_left: None) -> AsyncIterator[Ends]:
    made = Ends()
    yield made
    await made.close()


def batch(number: int, events: int = 1) -> EventBatch:
    """Return a batch that says which one it is."""
    return EventBatch(
        float(number), [BlockStored([number * 1000 + i], None, [i], 1, None, "GPU") for i in range(events)]
    )


def removed(number: int) -> EventBatch:
    return EventBatch(float(number), [BlockRemoved([number * 1000], "GPU")])


async def until(condition: Callable[[], bool], timeout: float = PATIENCE_S) -> None:
    """Wait for a condition that no event announces."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.002)


async def take(subscriber: EventSubscriber, count: int) -> list[Delivery]:
    return [await subscriber.receive(PATIENCE_S) for _ in range(count)]


async def within(work: Awaitable[Any], timeout: float = PATIENCE_S) -> Any:
    return await asyncio.wait_for(work, timeout)
