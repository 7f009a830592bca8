"""Processes that have ends, fork, and look how the child ends and whether their own ends go on.

``python forking.py KIND LOOP-HOW...``, where HOW is what the child does: ``exit`` and ``aclose`` after the loop has
stopped, ``inside`` to leave through the running loop, ``mp`` as a child of ``multiprocessing``, ``del`` to forget them.
Each LOOP-HOW has a process of its own, forked from this one before it has threads and sockets: it says what the child
said, how it ended, and "the parent goes on". What came of it is written as a line of JSON.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import uvloop

import aioshm.blocking
from aioshm import MessageQueue, RoleError
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
from aioshm.events import (
    EventBatch,
    EventSubscriber,
    Received,
    ThreadedEventPublisher,
    ZmqEventPublisher,
)

AT_A_TIME = 2  # so many processes: most of the time is spent waiting
ENDS_WITHIN_S = 15.0
HUNG_S = 30.0
AT_ONCE_S = 5.0  # on a machine that has much else to do; what hung, hung for ever
ANYWHERE = "tcp://127.0.0.1:0"


async def queue(remote: bool) -> list[Any]:
    writer = MessageQueue(1, 0 if remote else 1, max_chunk_bytes=4096, connect_ip="127.0.0.1")
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    await asyncio.gather(writer.wait_until_ready(10), reader.wait_until_ready(10))
    return [reader, writer]


async def check_queue(ends: list[Any]) -> None:
    reader, writer = ends
    for number in range(20):
        await writer.enqueue((number, bytes(100_000)), 10)
        assert await reader.dequeue(10) == (number, bytes(100_000))


async def blocking(remote: bool) -> list[Any]:
    face = aioshm.blocking.MessageQueue
    writer = face(1, 0 if remote else 1, max_chunk_bytes=4096, connect_ip="127.0.0.1")

    def attach() -> Any:
        reader = face.create_from_handle(writer.export_handle(), 0)
        reader.wait_until_ready(10)
        return reader

    readers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: readers.append(attach())),
        threading.Thread(target=writer.wait_until_ready, args=(10,)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [*readers, writer]


async def check_blocking(ends: list[Any]) -> None:
    reader, writer = ends
    for number in range(20):
        received: list[Any] = []
        reading = threading.Thread(target=lambda into=received: into.append(reader.dequeue(10)))
        sending = threading.Thread(target=writer.enqueue, args=(number, 10))
        for thread in (reading, sending):
            thread.start()
        for thread in (reading, sending):
            thread.join()
        assert received == [number]
    for end in ends:
        closing = threading.Thread(target=end.close)
        closing.start()
        closing.join()
    ends.clear()


async def events() -> list[Any]:
    publisher: Any = ZmqEventPublisher(0, ANYWHERE, ANYWHERE, bind=True)
    subscriber = EventSubscriber(publisher.endpoint, publisher.replay_endpoint, check_interval=0.1)
    subscriber.open()
    publisher.publish(EventBatch(0.0, []))
    assert isinstance(await subscriber.receive(10), Received)
    # A child that leaves through uvloop's running loop takes away what a thread of its parent wakes that loop with, if
    # it is on its way during the fork: then no thread can wake it any more.
    await asyncio.sleep(0.5)
    return [subscriber, publisher]


async def threaded() -> list[Any]:
    publisher = ThreadedEventPublisher(0, ANYWHERE, ANYWHERE, bind=True)
    subscriber = EventSubscriber(publisher.endpoint, publisher.replay_endpoint, check_interval=0.1)
    subscriber.open()
    return [subscriber, publisher]


async def check_events(ends: list[Any]) -> None:
    subscriber, publisher = ends
    for number in range(3):
        publisher.publish(EventBatch(float(number), []))
        assert isinstance(await subscriber.receive(10), Received)


class Echo:
    def initialize(self, metadata: Any) -> None:
        self.requests: list[Any] = []

    def add_request(self, request: Any) -> None:
        self.requests.append(request)

    def abort_requests(self, ids: list[str]) -> None:
        pass

    def step(self) -> list[Any]:
        done, self.requests = self.requests, []
        return [{"request_id": each["request_id"], "finish_reason": "stop"} for each in done]


class Serving:
    """An engine in a task, closed by cancelling it."""

    def __init__(self, handshake: str) -> None:
        self._task = asyncio.ensure_future(run_engine_core(Echo(), handshake, 0))
        self._pid = os.getpid()

    async def aclose(self) -> None:
        if os.getpid() == self._pid:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


async def engine() -> list[Any]:
    handshake, addresses = (get_engine_client_zmq_addr(True, ""), EngineZmqAddresses([], []))
    addresses.inputs.append(get_engine_client_zmq_addr(True, ""))
    addresses.outputs.append(get_engine_client_zmq_addr(True, ""))
    client = EngineClient(addresses, 1)
    client.open()
    startup = EngineStartupCoordinator(handshake, [CoreEngine(0, local=True)], client.addresses)
    startup.open()
    serving = Serving(handshake)
    await startup.wait(10)
    await client.wait_until_ready(10)
    return [client, startup, serving]


async def check_engine(ends: list[Any]) -> None:
    for name in ("one", "two"):
        assert len([each async for each in ends[0].submit({"request_id": name})]) == 1


def sleep(**_: Any) -> None:
    time.sleep(60)


class Worker:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def name(self) -> int:
        return self.rank


async def group() -> list[Any]:
    group = WorkerGroup(Worker, 1, max_chunk_bytes=4096)
    await group.__aenter__()
    return [group, CoreEngineProcManager(sleep, 1, shutdown_timeout=0)]


async def check_group(ends: list[Any]) -> None:
    assert await ends[0].collective_rpc("name", timeout=10) == [0]
    assert not ends[1].finished_procs()


KINDS: dict[str, tuple[Callable[[], Any], Callable[[list[Any]], Any]]] = {
    "local": (lambda: queue(False), check_queue),
    "remote": (lambda: queue(True), check_queue),
    "blocking-local": (lambda: blocking(False), check_blocking),
    "blocking-remote": (lambda: blocking(True), check_blocking),
    "events": (events, check_events),
    "threaded": (threaded, check_events),
    "engine": (engine, check_engine),
    "group": (group, check_group),
}


async def close(ends: list[Any]) -> None:
    for end in ends:
        closing = end.aclose() if hasattr(end, "aclose") else end.shutdown()
        if closing is not None:
            await closing


async def close_in_child(ends: list[Any]) -> None:
    for end in ends:
        try:
            await close([end])
        except RoleError as error:
            if "process" not in str(error):
                raise


def be_child(ends: list[Any], how: str) -> None:
    began = time.monotonic()
    if how.startswith("aclose") and isinstance(ends[0], aioshm.blocking.MessageQueue):
        for end in ends:
            try:
                end.close()
            except RoleError as error:
                if "forked" not in str(error):
                    raise
    elif how.startswith("aclose"):
        asyncio.run(close_in_child(ends))
    elif how.startswith("del"):
        ends.clear()
        gc.collect()
    print(f"the child is done within {AT_ONCE_S} s: {time.monotonic() - began < AT_ONCE_S}", flush=True)
    sys.exit(0)


def wait_for(pid: int) -> None:
    deadline = time.monotonic() + ENDS_WITHIN_S
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            print("the child hangs", flush=True)
            return
        time.sleep(0.005)
    print("the child ended with", os.waitstatus_to_exitcode(ended[1]), flush=True)


async def fork_inside(ends: list[Any], how: str) -> None:
    if how.endswith("-mp"):
        process = multiprocessing.get_context("fork").Process(target=be_child, args=(ends, how))
        process.start()
        assert process.pid is not None
        wait_for(process.pid)
        return
    pid = os.fork()
    if pid == 0:
        be_child(ends, how)  # SystemExit goes through the loop
    wait_for(pid)


def run_one(kind: str, loop: str, how: str) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # other threads run
    make, check = KINDS[kind]
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop)
    ends = runner.run(make())
    if how in ("inside", "exit-mp", "aclose-mp"):
        runner.run(fork_inside(ends, how))
    else:
        pid = os.fork()
        if pid == 0:
            be_child(ends, how)
        wait_for(pid)
    runner.run(check(ends))
    print("the parent goes on", flush=True)
    runner.run(close(ends))
    runner.close()


class Case:
    """A process of its own for one way, and what it says.

    Raises:
        SystemExit: In that process, when it is done: it ends as any program does.
    """

    def __init__(self, kind: str, case: str) -> None:
        self._case = case
        self._deadline = time.monotonic() + HUNG_S
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 -- `result` closes them
        self._pid = os.fork()
        if self._pid == 0:
            for standard, file in enumerate(self._files, 1):
                os.dup2(file.fileno(), standard)
            faulthandler.register(signal.SIGUSR1)  # no thread of its own, which its child would wait for in vain
            try:
                run_one(kind, *case.split("-", 1))
            except Exception:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(3)
            sys.exit(0)

    def result(self) -> dict[str, Any] | None:
        """Return what came of it, or None while it runs; what hangs is killed."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid:
            if time.monotonic() > self._deadline:
                os.kill(self._pid, signal.SIGUSR1)
                time.sleep(0.5)
                os.kill(self._pid, signal.SIGKILL)
                self._deadline += HUNG_S
            return None
        texts = []
        for file in self._files:
            with file:
                file.seek(0)
                texts.append(file.read().decode())
        code = os.waitstatus_to_exitcode(status)
        return {"case": self._case, "code": code, "said": texts[0].splitlines(), "complaints": texts[1]}


def main(kind: str, *cases: str) -> None:
    multiprocessing.resource_tracker.ensure_running()  # one for all; it would last as long as each of the processes
    gc.collect()
    gc.freeze()
    waiting, running = [*cases], []
    while waiting or running:
        while waiting and len(running) < AT_A_TIME:
            running.append(Case(kind, waiting.pop(0)))
        for case in [*running]:
            if (result := case.result()) is not None:
                running.remove(case)
                print(json.dumps(result), flush=True)
        time.sleep(0.005)


if __name__ == "__main__":
    main(*sys.argv[1:])
