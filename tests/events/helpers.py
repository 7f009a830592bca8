"""Helpers for the tests of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aioshm.events import BlockStored, Delivery, EventBatch, EventSubscriber, ZmqEventPublisher

ANY = "tcp://127.0.0.1:0"
PATIENCE_S = 20.0


class Ends:
    """Publishers and subscribers that are closed when the test is over."""

    def __init__(self) -> None:
        self._all: list[ZmqEventPublisher | EventSubscriber] = []

    def publisher(self, rank: int = 0, endpoint: str = ANY, replay: str | None = ANY, **options: Any) -> Any:
        options.setdefault("bind", True)
        made = ZmqEventPublisher(rank, endpoint, replay, **options)
        self._all.append(made)
        return made

    async def filled(self, count: int, events: int = 1, **options: Any) -> Any:
        """Return a publisher that has sent batches 0 to ``count`` - 1."""
        made = self.publisher(**options)
        publish_all(made, range(count), events)
        await made.flush(PATIENCE_S)
        return made

    def subscriber(self, publisher: Any, *args: Any, replay: bool = True, **options: Any) -> EventSubscriber:
        options.setdefault("check_interval", 0.1)
        options.setdefault("replay_timeout", 2.0)
        made = EventSubscriber(publisher.endpoint, publisher.replay_endpoint if replay else None, *args, **options)
        self._all.append(made)
        return made

    async def close(self) -> None:
        for end in reversed(self._all):
            await end.aclose()


def batch(number: int, events: int = 1) -> EventBatch:
    """Return a batch with a number of its own."""
    return EventBatch(
        float(number), [BlockStored([number * 1000 + i], None, [i], 1, None, "GPU") for i in range(events)]
    )


def publish_all(publisher: Any, numbers: range, events: int = 1) -> None:
    for number in numbers:
        publisher.publish(batch(number, events))


async def take(subscriber: EventSubscriber, count: int) -> list[Delivery]:
    return [await subscriber.receive(PATIENCE_S) for _ in range(count)]


async def publish_until_delivery(publisher: ZmqEventPublisher, subscriber: EventSubscriber) -> Delivery:
    """Publish again and again, for PUB cannot tell that a subscription has arrived; return the first delivery."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            publisher.publish(batch(0))
            with suppress(TimeoutError):
                return await subscriber.receive(0.02)


async def publish_until(publisher: ZmqEventPublisher, condition: Callable[[], object]) -> None:
    """Publish now and then until something holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            publisher.publish(batch(0))
            await asyncio.sleep(0.01)
