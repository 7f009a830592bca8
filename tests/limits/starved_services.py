"""What publishers, engines and workers do in subjects and peers of ``starving.py``; see ``starved_kinds.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from scenes import ANYWHERE, close
from starved_queues import LATER_S, SOON_S
from starving import Subject, hear

from aioshm.engine import DPCoordinator
from aioshm.events import (
    EventBatch,
    EventSubscriber,
    KVEventBatch,
    Received,
    ThreadedEventPublisher,
    ZmqEventPublisher,
)

BATCHES = [KVEventBatch(float(number), []) for number in range(3)]


class Publishing:
    async def subject(self, subject: Subject) -> None:
        publisher = None
        with subject.starving():
            publisher = self.make()
            await self.publish(publisher, subject, SOON_S)
        if publisher is not None and subject.errors:
            await self.close(publisher)
            publisher = None
        if publisher is None:
            publisher = self.make()
            await self.publish(publisher, subject, LATER_S)
        await self.close(publisher)

    def make(self) -> Any:
        return ZmqEventPublisher(0, ANYWHERE, ANYWHERE, bind=True)

    async def close(self, publisher: Any) -> None:
        await publisher.aclose()

    async def publish(self, publisher: Any, subject: Subject, within_s: float) -> None:
        for batch in BATCHES:
            publisher.publish(EventBatch(batch.ts, batch.events))
        subject.pipe.send((publisher.endpoint, publisher.replay_endpoint))
        async with asyncio.timeout(within_s):
            assert await subject.hear() == "received"

    async def peer(self, pipe: Connection) -> None:
        with suppress(EOFError):
            while True:
                endpoints = await hear(pipe)
                async with EventSubscriber(*endpoints, check_interval=0.1) as subscriber:
                    for number in range(3):
                        received = await subscriber.receive(LATER_S)
                        assert isinstance(received, Received)
                        assert received.seq == number
                pipe.send("received")


class PublishingFromThreads(Publishing):
    def make(self) -> Any:
        return ThreadedEventPublisher(0, ANYWHERE, ANYWHERE, bind=True)

    async def close(self, publisher: Any) -> None:
        publisher.shutdown()


class Subscribing:
    async def subject(self, subject: Subject) -> None:
        endpoints = await subject.hear()
        subscriber = EventSubscriber(*endpoints, check_interval=0.1, replay_timeout=0.3)
        with subject.starving():
            await self.receive(subscriber, SOON_S)
        await subscriber.aclose()
        if subject.errors:
            async with EventSubscriber(*endpoints, check_interval=0.1) as subscriber:
                await self.receive(subscriber, LATER_S)

    async def receive(self, subscriber: EventSubscriber, within_s: float) -> None:
        subscriber.open()
        for number in range(3):
            received = await subscriber.receive(within_s)
            assert isinstance(received, Received), received
            assert received.seq == number

    async def peer(self, pipe: Connection) -> None:
        async with ZmqEventPublisher(0, ANYWHERE, ANYWHERE, bind=True) as publisher:
            for batch in BATCHES:
                publisher.publish(EventBatch(batch.ts, batch.events))
            pipe.send((publisher.endpoint, publisher.replay_endpoint))
            with suppress(EOFError):
                await hear(pipe)


class Alone:
    """What has no peer."""

    def __init__(self, work: Callable[[float], Coroutine[Any, Any, None]]) -> None:
        self.work = work

    async def subject(self, subject: Subject) -> None:
        with subject.starving():
            await self.work(5.0)
        if subject.errors:
            await self.work(LATER_S)

    async def peer(self, pipe: Connection) -> None:
        with suppress(EOFError):
            await hear(pipe)


async def coordinate(within_s: float) -> None:
    async with await DPCoordinator.start(1, timeout=within_s) as coordinator:
        assert coordinator.get_stats_publish_address()


async def play(scene: Any, within_s: float) -> None:
    """Make, use and close the ends of a scene in one process."""
    ends: list[Any] = []
    try:
        await scene.make(ends, within_s)
        await scene.use(ends, within_s)
    finally:
        await close(ends)
