"""Closing async ends whose loop runs in another thread, has stopped, or was closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from faces import Thread
from remotes import wide_writer

from aioshm import MessageQueue, QueueClosed, RoleError


class LoopThread:
    """An event loop that runs in a thread of its own."""

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.loop = new_loop()
        self._thread = Thread(self.loop.run_forever)

    def run(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(20)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.result()

    def close(self) -> None:
        if not self.loop.is_closed():
            if self.loop.is_running():
                self.stop()
            self.loop.close()


@pytest.fixture
def elsewhere() -> Any:
    threads: list[LoopThread] = []

    def new() -> LoopThread:
        threads.append(LoopThread(type(asyncio.get_running_loop())))
        return threads[-1]

    yield new
    for thread in threads:
        thread.close()


def make(remote: bool) -> MessageQueue:
    return wide_writer(1 - remote, int(remote), remote_timeout=5, connect_ip="127.0.0.1")


async def attached(writer: MessageQueue, there: LoopThread) -> MessageQueue:
    """Return the reader, which belongs to the other loop."""
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = asyncio.run_coroutine_threadsafe(reader.wait_until_ready(20), there.loop)
    await writer.wait_until_ready(20)
    await asyncio.wrap_future(ready)
    return reader


@pytest.mark.parametrize("remote", [False, True])
async def test_end_whose_loop_runs_in_another_thread_is_closed_there(elsewhere: Any, remote: bool) -> None:
    there = elsewhere()
    async with make(remote) as writer:
        reader = await attached(writer, there)
        with pytest.raises(RoleError, match="belongs to another thread"):
            await reader.aclose()
        waiting = asyncio.run_coroutine_threadsafe(reader.dequeue(), there.loop)
        await asyncio.to_thread(there.run, reader.aclose())
        with pytest.raises(QueueClosed, match="this end was closed"):
            await asyncio.wrap_future(waiting)
        assert reader.end.state.dismantled
        await reader.aclose()


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("end", ["reader", "writer"])
async def test_after_its_loop_was_closed(elsewhere: Any, end: str, waits: bool, remote: bool) -> None:
    there = elsewhere()
    if end == "reader":
        async with make(remote) as writer:
            reader = await attached(writer, there)
            if waits:
                asyncio.run_coroutine_threadsafe(reader.dequeue(), there.loop)
                await asyncio.to_thread(there.run, asyncio.sleep(0.01))
            await asyncio.to_thread(there.close)
            await reader.aclose()
            assert reader.end.state.dismantled
            with pytest.raises(QueueClosed, match="every reader has left"):
                while True:
                    await writer.enqueue(b"x", 20)
        return
    writer = make(remote)
    async with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
        ready = asyncio.ensure_future(reader.wait_until_ready(20))
        await asyncio.to_thread(there.run, writer.wait_until_ready(20))
        await ready
        for number in range(4):
            await asyncio.to_thread(there.run, writer.enqueue(number))
        if waits and not remote:
            asyncio.run_coroutine_threadsafe(writer.enqueue("never"), there.loop)
            await asyncio.to_thread(there.run, asyncio.sleep(0.01))
        await asyncio.to_thread(there.close)
        received = asyncio.ensure_future(_all(reader))
        await writer.aclose()
        assert writer.end.state.dismantled
        assert await received == [0, 1, 2, 3]


async def _all(reader: MessageQueue) -> list[Any]:
    return [obj async for obj in reader]


async def test_while_its_loop_has_stopped(elsewhere: Any) -> None:
    there = elsewhere()
    async with make(False) as writer:
        reader = await attached(writer, there)
        waiting = asyncio.run_coroutine_threadsafe(reader.dequeue(), there.loop)
        await asyncio.to_thread(there.run, asyncio.sleep(0.01))
        await asyncio.to_thread(there.stop)
        await reader.aclose()
        going_on = Thread(there.loop.run_forever)
        with pytest.raises(QueueClosed, match="this end was closed"):
            await asyncio.wrap_future(waiting)
        there.loop.call_soon_threadsafe(there.loop.stop)
        going_on.result()
        assert reader.end.state.dismantled


async def test_remote_writer_whose_loop_has_stopped_waits_for_a_silent_reader_for_remote_timeout(
    elsewhere: Any,
) -> None:
    there = elsewhere()
    writer = wide_writer(0, 1, remote_timeout=1.0, connect_ip="127.0.0.1")
    async with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
        ready = asyncio.ensure_future(reader.wait_until_ready(20))
        await asyncio.to_thread(there.run, writer.wait_until_ready(20))
        await ready
        await asyncio.to_thread(there.run, writer.enqueue("never acknowledged"))
        await asyncio.to_thread(there.stop)
        reader.end.source.link.receive = lambda _: None  # type: ignore[union-attr]  # as if its loop were held up
        await asyncio.wait_for(writer.aclose(), 10)
        assert writer.end.state.dismantled
