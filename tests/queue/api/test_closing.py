"""Closing ends whose event loop is closed, has stopped, or runs in another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from faces import Thread
from remotes import wide_writer

from aioshm import MessageQueue, QueueClosed, RoleError

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.SelectorEventLoop, uvloop.new_event_loop]
NEW_LOOP = pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
Ends = tuple[Any, list[Any]]


def make(n_local: int, n_remote: int) -> Ends:
    writer = wide_writer(n_local, n_remote)
    handle = writer.export_handle()
    return writer, [MessageQueue.create_from_handle(handle, rank) for rank in range(n_local + n_remote)]


async def nothing(ends: Ends) -> None:
    """Leave the ends as they were made."""


async def begin(ends: Ends) -> None:
    """Begin to attach, and give up."""
    for end in (ends[0], *ends[1]):
        with pytest.raises(TimeoutError):
            await end.wait_until_ready(0)


async def talk(ends: Ends) -> None:
    """Send messages, of which one is read."""
    writer, readers = ends
    await asyncio.gather(*(end.wait_until_ready(20) for end in (writer, *readers)))
    await writer.enqueue_many(["read", "unread"])
    for reader in readers:
        assert await reader.dequeue(20) == "read"


async def wait(ends: Ends) -> None:
    """Leave readers that wait, whose tasks are never cancelled."""
    await talk(ends)
    for reader in ends[1]:
        assert await reader.dequeue(20) == "unread"
        waiting: Any = asyncio.ensure_future(reader.dequeue())
        waiting.add_done_callback(lambda task: task.exception())
        waiting._log_destroy_pending = False  # that it is pending is this test's doing
        while not reader.stats().parks:
            await asyncio.sleep(0)


CASES = [
    pytest.param(
        use, writer_first, *place, id=f"{use.__name__}-{'writer' if writer_first else 'readers'} first-{place}"
    )
    for use, writer_first in ((nothing, True), (begin, True), (talk, False), (wait, False))
    for place in ((1, 0), (0, 1))
]


@pytest.mark.usefixtures("short_goodbye")
@pytest.mark.slow_on_uvloop
@NEW_LOOP
@pytest.mark.parametrize(("use", "writer_first", "n_local", "n_remote"), CASES)
def test_it_closes_on_another_loop_once_its_own_is_closed(
    new_loop: Callable[[], asyncio.AbstractEventLoop], use: Any, writer_first: bool, n_local: int, n_remote: int
) -> None:
    threads = threading.active_count()
    ends = make(n_local, n_remote)
    first = new_loop()
    first.run_until_complete(use(ends))
    first.close()
    writer, readers = ends
    second = new_loop()
    for end in [writer, *readers] if writer_first else [*readers, writer]:
        for _ in range(2):
            second.run_until_complete(asyncio.wait_for(end.aclose(), 20))
        with pytest.raises((QueueClosed, RoleError)):
            second.run_until_complete(end.wait_until_ready(1))
        end.stats()
    assert not asyncio.all_tasks(second)
    second.close()
    assert threading.active_count() == threads


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


def new_writer(remote: bool) -> MessageQueue:
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
    async with new_writer(remote) as writer:
        reader = await attached(writer, there)
        with pytest.raises(RoleError, match="belongs to another thread"):
            await reader.aclose()
        waiting = asyncio.run_coroutine_threadsafe(reader.dequeue(), there.loop)
        await asyncio.to_thread(there.run, reader.aclose())
        with pytest.raises(QueueClosed, match="this end was closed"):
            await asyncio.wrap_future(waiting)
        assert reader.end.state.dismantled
        await reader.aclose()


async def test_while_its_loop_has_stopped(elsewhere: Any) -> None:
    there = elsewhere()
    async with new_writer(False) as writer:
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
        reader.end.source.receive_control = lambda _: None  # type: ignore[union-attr]  # as if its loop were held up
        await asyncio.wait_for(writer.aclose(), 10)
        assert writer.end.state.dismantled
