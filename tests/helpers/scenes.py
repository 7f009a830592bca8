"""Ends of every kind in one process: made, used and closed by the tests of limits and of forks.

A scene appends its ends to a list as they are made, so that the list can be closed whatever goes wrong.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from members import meet

import aioshm.blocking
import aioshm.queue.groups.factory
import aioshm.queue.local.overflow_sockets
import aioshm.queue.remote.readers
import aioshm.queue.remote.source  # not when there is no descriptor left to read the file
from aioshm import LimitReached, MessageQueue, Options, QueueRestarted, merge
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
    Received,
    ThreadedEventPublisher,
    ZmqEventPublisher,
)

ANYWHERE = "tcp://127.0.0.1:0"
MESSAGES = ("small", bytes(300_000), "last")
"""The second one is sent over the network without a copy, and through a segment of its own to local readers."""

THREADS = ThreadPoolExecutor(2)
"""For blocking calls."""


async def warm_up() -> None:
    """Start the threads for blocking calls."""
    both = threading.Barrier(2)
    await together(in_thread(both.wait), in_thread(both.wait))


async def in_thread(call: Callable[..., Any], *arguments: Any) -> Any:
    """Run a call in a thread; poll for its end, as a forked child may have taken the loop's wake-ups away."""
    done = THREADS.submit(call, *arguments)
    while not done.done():
        await asyncio.sleep(0.002)
    return done.result()


async def together(*calls: Awaitable[Any]) -> None:
    """Wait for all calls; raise the error of one, rather that of a limit."""
    done = await asyncio.gather(*calls, return_exceptions=True)
    errors = [each for each in done if isinstance(each, BaseException)]
    if errors:
        raise min(errors, key=lambda error: not isinstance(error, LimitReached))


async def close(ends: list[Any]) -> None:
    while ends:
        end = ends.pop()
        if isinstance(end, aioshm.blocking.MessageQueue):
            await in_thread(end.close)
        elif hasattr(end, "aclose"):
            await end.aclose()
        else:
            end.shutdown()


class Scene:
    """Ends of one kind."""

    goes_on = False
    """Whether the same ends can be used again after an error."""

    starts_processes = False
    """These may lack descriptors, too, and take a second."""

    async def make(self, ends: list[Any], within_s: float) -> None: ...

    async def use(self, ends: list[Any], within_s: float) -> None:
        raise NotImplementedError


def new_writer(api: Any, remote: bool, overflow: Any = "segments", **named: Any) -> Any:
    return api(
        1,
        0 if remote else 1,
        max_chunk_bytes=4096,
        max_chunks=4,
        slots=4,
        connect_ip="127.0.0.1",
        options=Options(remote_timeout=4.0, overflow=overflow),
        **named,
    )


class Queue(Scene):
    """A writer and its reader."""

    goes_on = True

    def __init__(self, *, remote: bool = False, overflow: str = "segments") -> None:
        self.remote = remote
        self.overflow = overflow

    async def make(self, ends: list[Any], within_s: float) -> None:
        writer = new_writer(MessageQueue, self.remote, self.overflow)
        ends.append(writer)
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        ends.append(reader)
        await together(writer.wait_until_ready(within_s), reader.wait_until_ready(within_s))

    async def use(self, ends: list[Any], within_s: float) -> None:
        writer, reader = ends
        while reader.stats().messages < writer.stats().messages:  # after an error of the reader
            await reader.dequeue(within_s)
        for message in MESSAGES:
            await writer.enqueue(message, within_s)
            assert await reader.dequeue(within_s) == message


class BlockingQueue(Scene):
    """The same for threads."""

    goes_on = True

    def __init__(self, *, remote: bool = False) -> None:
        self.remote = remote

    async def make(self, ends: list[Any], within_s: float) -> None:
        def make() -> None:
            ends.append(new_writer(aioshm.blocking.MessageQueue, self.remote))
            ends.append(aioshm.blocking.MessageQueue.create_from_handle(ends[0].export_handle(), 0))

        await in_thread(make)
        await together(*(in_thread(end.wait_until_ready, within_s) for end in ends))

    async def use(self, ends: list[Any], within_s: float) -> None:
        writer, reader = ends
        while reader.stats().messages < writer.stats().messages:
            await in_thread(reader.dequeue, within_s)
        received: list[Any] = []
        for message in MESSAGES:
            await together(
                in_thread(writer.enqueue, message, within_s),
                in_thread(lambda: received.append(reader.dequeue(within_s))),
            )
        assert received == [*MESSAGES]


class Merge(Scene):
    """Two local readers and a remote one, read together."""

    async def make(self, ends: list[Any], within_s: float) -> None:
        for remote in (False, False, True):
            writer = new_writer(MessageQueue, remote)
            ends.append(writer)
            # After that time a remote one tells why it has no connection.
            options = Options(remote_timeout=within_s)
            ends.append(MessageQueue.create_from_handle(writer.export_handle(), 0, options=options))

    async def use(self, ends: list[Any], within_s: float) -> None:
        await together(self.receive(ends[1::2], within_s), *(self.send(writer, within_s) for writer in ends[::2]))

    async def send(self, writer: MessageQueue, within_s: float) -> None:
        for number in range(2):
            await writer.enqueue(number, 2 * within_s)

    async def receive(self, readers: list[MessageQueue], within_s: float) -> None:
        received = []
        async with merge(dict(enumerate(readers))) as merged, asyncio.timeout(3 * within_s):
            async for item in merged:
                received.append(item)
                if len(received) == 2 * len(readers):
                    break
        assert sorted(received) == [(rank, number) for rank in range(len(readers)) for number in range(2)]


class Group(Scene):
    """A queue between the two ranks of a process group."""

    async def use(self, ends: list[Any], within_s: float) -> None:
        await together(*(self.be_rank(member, within_s) for member in meet(2, timeout=3 * within_s)))

    async def be_rank(self, member: Any, within_s: float) -> None:
        async with await MessageQueue.create_from_process_group(member, 4096, 4, blocking=False) as queue:
            await queue.wait_until_ready(within_s)
            if member.rank == 0:
                await queue.enqueue("text", within_s)
            else:
                assert await queue.dequeue(within_s) == "text"


class ComeBack(Scene):
    """Two writers of one name, or of one identity, one after the other, and the reader that goes on."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    async def use(self, ends: list[Any], within_s: float) -> None:
        name = f"again-{os.getpid()}"
        identity = str(Path(tempfile.gettempdir(), name))
        remote = self.kind == "identity"

        async def write(message: str) -> None:
            named = {"identity": identity} if remote else {"name": name}
            async with new_writer(MessageQueue, remote, **named) as writer:
                handles.append(writer.export_handle())
                begun.set()
                await writer.enqueue(message, within_s)

        async def read() -> None:
            await asyncio.wait_for(begun.wait(), within_s)
            if remote:
                reader = MessageQueue.create_from_handle(handles[0], 0, reconnect=True)
            else:
                reader = MessageQueue.attach(name, 0, reconnect=True)
            ends.append(reader)
            assert await reader.dequeue(within_s) == "first"

        async def read_on() -> None:
            try:
                raise AssertionError(await ends[0].dequeue(within_s))
            except QueueRestarted:
                pass
            assert await ends[0].dequeue(within_s) == "second"

        begun = asyncio.Event()
        handles: list[Any] = []
        try:
            await together(write("first"), read())
            await together(write("second"), read_on())
        finally:
            Path(identity).unlink(missing_ok=True)


class Events(Scene):
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


class Engine(Scene):
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


class Coordinator(Scene):
    starts_processes = True

    async def make(self, ends: list[Any], within_s: float) -> None:
        ends.append(await DPCoordinator.start(1, timeout=5 * within_s))

    async def use(self, ends: list[Any], within_s: float) -> None:
        assert ends[0].get_stats_publish_address()


def sleep(**_: Any) -> None:
    time.sleep(60)


class Worker:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def name(self) -> int:
        return self.rank


class Workers(Scene):
    """A worker group, and engine processes."""

    starts_processes = True

    async def make(self, ends: list[Any], within_s: float) -> None:
        group = WorkerGroup(Worker, 1, ready_timeout=5 * within_s, shutdown_timeout=5, max_chunk_bytes=4096)
        await group.__aenter__()
        ends.append(group)
        ends.append(CoreEngineProcManager(sleep, 1, shutdown_timeout=0))

    async def use(self, ends: list[Any], within_s: float) -> None:
        assert await ends[0].collective_rpc("name", timeout=5 * within_s) == [0]
        assert not ends[1].finished_procs()


SCENES: dict[str, Scene] = {
    "local": Queue(),
    "overflow-zmq": Queue(overflow="zmq"),
    "remote": Queue(remote=True),
    "blocking-local": BlockingQueue(),
    "blocking-remote": BlockingQueue(remote=True),
    "merge": Merge(),
    "group": Group(),
    "name": ComeBack("name"),
    "identity": ComeBack("identity"),
    "events": Events(ZmqEventPublisher),
    "threaded-events": Events(ThreadedEventPublisher),
    "engine": Engine(),
    "coordinator": Coordinator(),
    "workers": Workers(),
}
