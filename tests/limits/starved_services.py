"""What publishers, engines and workers do in subjects and peers of ``starving.py``; see ``starved_kinds.py``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from starved_queues import LATER_S, SOON_S
from starving import Subject, hear

from aioshm.engine import (
    CoreEngine,
    CoreEngineProcManager,
    DPCoordinator,
    EngineClient,
    EngineStartupCoordinator,
    EngineZmqAddresses,
    WorkerGroup,
    get_engine_client_zmq_addr,
    run_engine_core,
)
from aioshm.events import (
    EventBatch,
    EventSubscriber,
    KVEventBatch,
    Received,
    ThreadedEventPublisher,
    ZmqEventPublisher,
)

ANYWHERE = "tcp://127.0.0.1:0"
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


class Echo:
    """An engine whose requests are finished with their first step."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def initialize(self, metadata: Any) -> None:
        pass

    def add_request(self, request: Any) -> None:
        self.requests.append(request)

    def abort_requests(self, ids: list[str]) -> None:
        pass

    def step(self) -> list[Any]:
        done, self.requests = self.requests, []
        return [{"request_id": each["request_id"], "finish_reason": "stop"} for each in done]


def ipc() -> str:
    return get_engine_client_zmq_addr(True, "127.0.0.1")


async def serve_front_end(handshake: str, within_s: float) -> None:
    """Start up with an engine, and have it do a request."""
    addresses = EngineZmqAddresses([ipc()], [ipc()])
    async with EngineClient(addresses, 1) as client:
        engines = [CoreEngine(0, local=True)]
        async with EngineStartupCoordinator(handshake, engines, client.addresses) as startup:
            await startup.wait(within_s)
        await client.wait_until_ready(within_s)
        async with asyncio.timeout(within_s):
            outputs = [output async for output in client.submit({"request_id": "one"})]
        assert len(outputs) == 1


async def serve_engine(handshake: str) -> None:
    """Be an engine until the front end is gone, or the task is cancelled."""
    await run_engine_core(Echo(), handshake, 0)


class FrontEnd:
    async def subject(self, subject: Subject) -> None:
        address = ipc()
        subject.pipe.send(address)
        with subject.starving():
            await serve_front_end(address, SOON_S)
        if subject.errors:
            address = ipc()
            subject.pipe.send(address)
            await serve_front_end(address, LATER_S)

    async def peer(self, pipe: Connection) -> None:
        engine = None
        try:
            while True:
                address = await hear(pipe)
                if engine is not None:
                    engine.cancel()
                    await asyncio.gather(engine, return_exceptions=True)
                engine = asyncio.ensure_future(serve_engine(address))
        except EOFError:
            if engine is not None:
                engine.cancel()
                await asyncio.gather(engine, return_exceptions=True)


class EngineCore:
    async def subject(self, subject: Subject) -> None:
        for within_s in (SOON_S, LATER_S):
            address = await subject.hear()
            if within_s == SOON_S:
                with subject.starving():
                    await self.serve(subject, address, within_s)
                if not subject.errors:
                    return
                subject.pipe.send("again")
            else:
                await self.serve(subject, address, within_s)

    async def serve(self, subject: Subject, address: str, within_s: float) -> None:
        serving = asyncio.ensure_future(serve_engine(address))
        served = asyncio.ensure_future(subject.hear())
        try:
            await asyncio.wait({serving, served}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving
            assert served.done(), "nobody was served"
            assert served.result() == "served"
        finally:
            for task in (serving, served):
                task.cancel()
            await asyncio.gather(serving, served, return_exceptions=True)

    async def peer(self, pipe: Connection) -> None:
        address = ipc()
        pipe.send(address)
        serving = asyncio.ensure_future(serve_front_end(address, LATER_S))
        again = asyncio.ensure_future(hear(pipe))
        await asyncio.wait({serving, again}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done() and not serving.exception():
            pipe.send("served")
        with suppress(EOFError):
            await again
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            address = ipc()
            pipe.send(address)
            await serve_front_end(address, LATER_S)
            pipe.send("served")
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


class Worker:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def name(self) -> int:
        return self.rank


async def work_in_group(within_s: float) -> None:
    async with WorkerGroup(Worker, 2, ready_timeout=within_s, shutdown_timeout=within_s, max_chunk_bytes=4096) as group:
        assert await group.collective_rpc("name", timeout=within_s) == [0, 1]


async def coordinate(within_s: float) -> None:
    async with await DPCoordinator.start(1, timeout=within_s) as coordinator:
        assert coordinator.get_stats_publish_address()


def sleep(**_: Any) -> None:
    time.sleep(60)


async def manage(within_s: float) -> None:
    async with CoreEngineProcManager(sleep, 2, shutdown_timeout=within_s) as manager:
        assert not manager.finished_procs()
