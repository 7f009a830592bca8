"""Ends of every kind in one process: made, used and closed by the tests of forks.

A scene appends its ends to a list as they are made, so that the list can be closed whatever goes wrong.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aioshm.blocking
import aioshm.queue.groups.factory
import aioshm.queue.local.overflow_sockets
import aioshm.queue.remote.readers
import aioshm.queue.remote.source  # not when there is no descriptor left to read the file
from aioshm import LimitReached, MessageQueue, Options
from aioshm.engine import (
    CoreEngine,
    CoreEngineProcManager,
    EngineClient,
    EngineStartupCoordinator,
    EngineZmqAddresses,
    WorkerGroup,
    get_engine_client_zmq_addr,
    run_engine_core,
)
from aioshm.events import EventBatch, EventSubscriber, Received, ThreadedEventPublisher, ZmqEventPublisher

ANYWHERE = "tcp://127.0.0.1:0"
MESSAGES = ("small", bytes(300_000), "last")
"""The second one is sent over the network without a copy, and through a segment of its own to local readers."""

THREAD_COUNT = 2
THREADS = ThreadPoolExecutor(THREAD_COUNT)
"""For blocking calls."""


async def in_thread(call: Callable[..., Any], *arguments: Any) -> Any:
    """Run a call in a thread; poll for its end, as a forked child may have taken the loop's wake-ups away."""
    done = THREADS.submit(call, *arguments)
    while not done.done():
        await asyncio.sleep(0.002)
    return done.result()


async def start_threads() -> None:
    """Start the threads for blocking calls."""
    meeting = threading.Barrier(THREAD_COUNT)
    await asyncio.gather(*(in_thread(meeting.wait) for _ in range(THREAD_COUNT)))


async def all_of(*calls: Awaitable[Any]) -> None:
    """Await all calls; of their errors, one that names a limit is raised first."""
    done = await asyncio.gather(*calls, return_exceptions=True)
    for error in sorted(filter(None, done), key=lambda error: not isinstance(error, LimitReached)):
        raise error


async def call(end: Any, method: str, *arguments: Any) -> Any:
    """Await a method of either API."""
    if isinstance(end, aioshm.blocking.MessageQueue):
        return await in_thread(getattr(end, method), *arguments)
    return await getattr(end, method)(*arguments)


async def close(ends: list[Any]) -> None:
    while ends:
        end = ends.pop()
        if isinstance(end, aioshm.blocking.MessageQueue):
            await in_thread(end.close)
        elif hasattr(end, "aclose"):
            await end.aclose()
        else:
            end.shutdown()


def new_writer(api: Any, remote: bool, overflow: Any = "segments") -> Any:
    return api(
        1,
        0 if remote else 1,
        max_chunk_bytes=4096,
        max_chunks=4,
        slots=4,
        connect_ip="127.0.0.1",
        options=Options(remote_timeout=4.0, overflow=overflow),
    )


class Queue:
    """A writer and its reader, of either API."""

    def __init__(self, api: Any = MessageQueue, *, remote: bool = False, overflow: str = "segments") -> None:
        self.api = api
        self.remote = remote
        self.overflow = overflow

    async def make(self, ends: list[Any], within_s: float) -> None:
        def make() -> None:
            ends.append(new_writer(self.api, self.remote, self.overflow))
            ends.append(self.api.create_from_handle(ends[0].export_handle(), 0))

        if self.api is MessageQueue:
            make()
        else:
            await in_thread(make)
        await all_of(*(call(end, "wait_until_ready", within_s) for end in ends))

    async def use(self, ends: list[Any], within_s: float) -> None:
        writer, reader = ends
        for message in MESSAGES:
            sending = call(writer, "enqueue", message, within_s)
            _, received = await asyncio.gather(sending, call(reader, "dequeue", within_s))
            assert received == message


class Events:
    """A publisher and a subscriber."""

    def __init__(self, publisher: Any) -> None:
        self.publisher = publisher

    async def make(self, ends: list[Any], within_s: float) -> None:
        publisher = self.publisher(0, ANYWHERE, ANYWHERE, bind=True)
        ends.append(publisher)
        subscriber = EventSubscriber(
            publisher.endpoint, publisher.replay_endpoint, check_interval=0.1, replay_timeout=0.3
        )
        ends.append(subscriber)
        subscriber.open()
        publisher.publish(EventBatch(0.0, []))
        assert isinstance(await subscriber.receive(within_s), Received)
        # A child that leaves through uvloop's running loop takes away what a thread of its parent wakes that loop
        # with, if it is on its way during the fork: then no thread can wake it any more.
        await asyncio.sleep(0.1)

    async def use(self, ends: list[Any], within_s: float) -> None:
        publisher, subscriber = ends
        for number in range(3):
            publisher.publish(EventBatch(float(number), []))
            assert isinstance(await subscriber.receive(within_s), Received)


class Echo:
    """An engine whose requests are finished with their first step."""

    def initialize(self, metadata: Any) -> None:
        self.requests: list[Any] = []

    def add_request(self, request: Any) -> None:
        self.requests.append(request)

    def abort_requests(self, ids: list[str]) -> None: ...

    def step(self) -> list[Any]:
        done = self.requests
        self.requests = []
        return [{"request_id": each["request_id"], "finish_reason": "stop"} for each in done]


class Serving:
    """An engine in a task, closed by cancelling it."""

    def __init__(self, handshake: str) -> None:
        self.task = asyncio.ensure_future(run_engine_core(Echo(), handshake, 0))
        self._pid = os.getpid()

    async def during(self, call: Coroutine[Any, Any, Any]) -> None:
        """Wait for a call, or for the engine's error."""
        calling = asyncio.ensure_future(call)
        await asyncio.wait({self.task, calling}, return_when=asyncio.FIRST_COMPLETED)
        if not calling.done():
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            await self.task
        await calling

    async def aclose(self) -> None:
        if os.getpid() == self._pid:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)


class Engine:
    """A front end and its engine."""

    async def make(self, ends: list[Any], within_s: float) -> None:
        handshake, inputs, outputs = (get_engine_client_zmq_addr(True, "") for _ in range(3))
        client = EngineClient(EngineZmqAddresses([inputs], [outputs]), 1)
        ends.append(client)
        client.open()
        startup = EngineStartupCoordinator(handshake, [CoreEngine(0, local=True)], client.addresses)
        ends.append(startup)
        startup.open()
        serving = Serving(handshake)
        ends.append(serving)
        await serving.during(startup.wait(within_s))
        await serving.during(client.wait_until_ready(within_s))

    async def use(self, ends: list[Any], within_s: float) -> None:
        for name in ("one", "two"):
            async with asyncio.timeout(within_s):
                assert len([each async for each in ends[0].submit({"request_id": name})]) == 1


def sleep(**_: Any) -> None:
    time.sleep(60)


class Worker:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def name(self) -> int:
        return self.rank


class Workers:
    """A worker group, and engine processes."""

    async def make(self, ends: list[Any], within_s: float) -> None:
        group = WorkerGroup(Worker, 1, ready_timeout=5 * within_s, shutdown_timeout=5, max_chunk_bytes=4096)
        await group.__aenter__()
        ends.append(group)
        ends.append(CoreEngineProcManager(sleep, 1, shutdown_timeout=0))

    async def use(self, ends: list[Any], within_s: float) -> None:
        assert await ends[0].collective_rpc("name", timeout=5 * within_s) == [0]
        assert not ends[1].finished_procs()


SCENES: dict[str, Any] = {
    "local": Queue(),
    "overflow-zmq": Queue(overflow="zmq"),
    "remote": Queue(remote=True),
    "blocking-local": Queue(aioshm.blocking.MessageQueue),
    "blocking-remote": Queue(aioshm.blocking.MessageQueue, remote=True),
    "events": Events(ZmqEventPublisher),
    "threaded-events": Events(ThreadedEventPublisher),
    "engine": Engine(),
    "workers": Workers(),
}
