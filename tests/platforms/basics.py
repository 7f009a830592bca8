"""The basics, on any platform: every module imports, and each part does its work once, between processes too.

python -W error tests/platforms/basics.py                # as CI does on macOS
python -W error tests/platforms/basics.py --like-macos   # on Linux, without what only Linux has
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import pkgutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

# Before the platform changes: these look at it when they are imported, and would look for what is not there.
import psutil
import zmq.asyncio

if "--like-macos" in sys.argv or "AIOSHM_LIKE_MACOS" in os.environ:
    os.environ["AIOSHM_LIKE_MACOS"] = "1"  # the children of this process, too
    import macos_like

    macos_like.pretend()

import aioshm
import aioshm.blocking
from aioshm import Handle, MessageQueue, Options, PeerDied
from aioshm.engine import StartupOptions, WorkerGroup, launch_core_engines, run_engine_core
from aioshm.events import AllBlocksCleared, EventBatch, EventSubscriber, Received, ZmqEventPublisher

TIMEOUT_S = 30.0
LARGE = b"o" * 10_000
EXTRAS = {"numpy", "pytest", "ray", "rich", "torch", "typer", "uvloop", "vllm"}
assert psutil
assert zmq.asyncio


def every_module() -> None:
    """Import all that is there, as far as no extra is missing for it."""
    for module in pkgutil.walk_packages(aioshm.__path__, "aioshm."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as missing:
            if missing.name not in EXTRAS:
                raise


@asynccontextmanager
async def ready(n_local: int = 1, **arguments: Any) -> AsyncIterator[tuple[MessageQueue, MessageQueue]]:
    """Give a writer and its one reader to the block."""
    writer = MessageQueue(1, n_local, max_chunk_bytes=4096, **arguments)
    async with writer, MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
        await asyncio.gather(writer.wait_until_ready(TIMEOUT_S), reader.wait_until_ready(TIMEOUT_S))
        yield writer, reader


@contextmanager
def raises(error: type[Exception]) -> Iterator[None]:
    try:
        yield
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


async def one_loop() -> None:
    """Both ends on one loop: a reader that sleeps, a large message, a lease, and messages with a steady period."""
    async with ready() as (writer, reader):
        waiting = asyncio.ensure_future(reader.dequeue(TIMEOUT_S))
        while not reader.stats().parks and not waiting.done():
            await asyncio.sleep(0.001)
        await writer.enqueue("woken")
        assert await waiting == "woken"
        await writer.enqueue(LARGE)
        assert await reader.dequeue(TIMEOUT_S) == LARGE
        await writer.enqueue(LARGE[:4000])
        async with reader.lease() as leased:
            assert leased == LARGE[:4000]
        for number in range(20):
            waiting = asyncio.ensure_future(reader.dequeue(TIMEOUT_S))
            await asyncio.sleep(0.005)
            await writer.enqueue(number)
            assert await waiting == number


async def named() -> None:
    """A reader that finds its writer by name, in the runtime directory, and goes on with the next one."""
    async with MessageQueue.attach("steps", 0, reconnect=True) as reader:
        for incarnation in range(2):
            async with MessageQueue(1, 1, max_chunk_bytes=4096, name="steps") as writer:
                with raises(aioshm.NameTaken):
                    aioshm.blocking.MessageQueue(1, 1, name="steps")
                sending = asyncio.ensure_future(writer.enqueue(incarnation, TIMEOUT_S))
                if incarnation:
                    with raises(aioshm.QueueRestarted):
                        await reader.dequeue(TIMEOUT_S)
                assert await reader.dequeue(TIMEOUT_S) == incarnation
                await sending


async def over_tcp() -> None:
    """A remote reader, encrypted."""
    async with ready(0, connect_ip="127.0.0.1") as (writer, reader):
        await writer.enqueue(LARGE)
        assert await reader.dequeue(TIMEOUT_S) == LARGE


def threads() -> None:
    """Two threads without a loop."""
    writer = aioshm.blocking.MessageQueue(1, 1, max_chunk_bytes=4096)
    received = []

    def read() -> None:
        with aioshm.blocking.MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            received.extend(reader)

    thread = threading.Thread(target=read)
    thread.start()
    with writer:
        for message in ("first", LARGE):
            writer.enqueue(message, TIMEOUT_S)
    thread.join()
    assert received == ["first", LARGE]


def _read(handle: Handle) -> None:
    async def read() -> None:
        async with MessageQueue.create_from_handle(handle, 0) as reader:
            assert [message async for message in reader] == [*range(1000), LARGE]

    asyncio.run(read())


async def processes() -> None:
    """A reader in another process, which ends in order."""
    writer = MessageQueue(1, 1, max_chunk_bytes=4096)
    process = multiprocessing.get_context("spawn").Process(target=_read, args=(writer.export_handle(),))
    process.start()
    async with writer:
        await writer.wait_until_ready(TIMEOUT_S)
        for message in (*range(1000), LARGE):
            await writer.enqueue(message, TIMEOUT_S)
    process.join(TIMEOUT_S)
    assert process.exitcode == 0


def _hang(handle: Handle) -> None:
    async def attach() -> None:
        async with MessageQueue.create_from_handle(handle, 0) as reader:
            await reader.wait_until_ready(TIMEOUT_S)
            await asyncio.sleep(1000)

    asyncio.run(attach())


async def a_death() -> None:
    """A reader that is killed, which its writer is told."""
    writer = MessageQueue(1, 1)
    process = multiprocessing.get_context("spawn").Process(target=_hang, args=(writer.export_handle(),))
    process.start()
    async with writer:
        await writer.wait_until_ready(TIMEOUT_S)
        process.kill()
        async with asyncio.timeout(TIMEOUT_S):
            try:
                while True:
                    await writer.enqueue(None)
            except PeerDied as died:
                rank = died.rank
        assert rank == 0
    process.join()
    assert process.exitcode == -signal.SIGKILL


class _Engine:
    def __init__(self) -> None:
        self._pending: list[str] = []

    def initialize(self, _metadata: Any) -> dict[str, Any]:
        return {"num_gpu_blocks": 1}

    def add_request(self, request: Any) -> None:
        self._pending.append(request["request_id"])

    def abort_requests(self, ids: list[str]) -> None:
        self._pending = [each for each in self._pending if each not in ids]

    def step(self) -> list[dict[str, Any]]:
        done, self._pending = self._pending, []
        return [{"request_id": each, "new_token_ids": [1], "finish_reason": "stop"} for each in done]


def _serve(handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    del local_dp_rank
    asyncio.run(run_engine_core(_Engine(), handshake_address, dp_rank))


async def engines() -> None:
    """Two engines with a coordinator: started, asked, stopped."""
    async with launch_core_engines(_serve, 2, startup=StartupOptions(progress_timeout=TIMEOUT_S)) as launch:
        for number in range(4):
            outputs = [output async for output in launch.client.submit({"request_id": str(number)})]
            assert len(outputs) == 1


class _Worker:
    def __init__(self, *, rank: int) -> None:
        self._rank = rank

    def double(self, number: int) -> int:
        return 2 * number + self._rank


async def workers() -> None:
    """Two workers, called together."""
    async with WorkerGroup(_Worker, 2) as group:
        assert await group.collective_rpc("double", (4,), timeout=TIMEOUT_S) == [8, 9]


async def events() -> None:
    """A batch of events, replayed to who comes late, and one that is live."""
    publisher = ZmqEventPublisher(3, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", bind=True)
    async with publisher:
        publisher.publish(EventBatch(1.0, [AllBlocksCleared()]))
        async with EventSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
            for number in range(2):
                received = await subscriber.receive(TIMEOUT_S)
                assert isinstance(received, Received), received
                assert (received.seq, received.batch.events) == (number, [AllBlocksCleared()])
                publisher.publish(EventBatch(1.0, [AllBlocksCleared()]))


def main() -> None:
    """Do everything once; leave nothing behind."""
    every_module()
    options = Options()
    print(f"{sys.platform}, Python {sys.version.split()[0]}, native core: {aioshm.native_core},", end=" ")
    print(f"backing={options.backing!r}, lifeline={options.lifeline!r}")
    with tempfile.TemporaryDirectory(prefix="aioshm-") as base:
        os.environ["AIOSHM_RUNTIME_DIR"] = f"{base}/run"
        for basic in (one_loop, named, over_tcp, threads, processes, a_death, engines, workers, events):
            began = time.perf_counter()
            if asyncio.iscoroutinefunction(basic):
                asyncio.run(basic())
            else:
                basic()
            print(f"{basic.__name__}: {time.perf_counter() - began:.2f} s", flush=True)
        left = [*Path(base).rglob("*.*"), *multiprocessing.active_children()]
        assert not left, f"left behind: {left}"


if __name__ == "__main__":
    main()
