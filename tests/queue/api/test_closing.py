"""Ends and their owners: the loop, the thread and the process; closing ends whose loop is closed or has stopped."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from faces import Thread
from overflowing import BOTH_WAYS, sockets_of_zeromq
from pairs import EITHER_PLACE, attached
from remotes import wide_writer
from support import eventually, forked, until

from aioshm import MessageQueue, QueueClosed, RoleError, blocking, merge

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


@pytest.mark.usefixtures("short_goodbye")
@pytest.mark.slow_on_uvloop
@NEW_LOOP
@EITHER_PLACE
@pytest.mark.parametrize("use", [nothing, begin, talk, wait])
def test_it_closes_on_another_loop_once_its_own_is_closed(
    new_loop: Callable[[], asyncio.AbstractEventLoop], use: Any, n_local: int, n_remote: int
) -> None:
    threads = threading.active_count()
    ends = make(n_local, n_remote)
    first = new_loop()
    first.run_until_complete(use(ends))
    first.close()
    writer, readers = ends
    second = new_loop()
    for end in [writer, *readers] if use in (nothing, begin) else [*readers, writer]:
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
async def there() -> AsyncIterator[LoopThread]:
    thread = LoopThread(type(asyncio.get_running_loop()))
    yield thread
    thread.close()


def new_writer(remote: bool) -> MessageQueue:
    return wide_writer(1 - remote, int(remote), remote_timeout=5, connect_ip="127.0.0.1")


async def reader_of(writer: MessageQueue, there: LoopThread) -> MessageQueue:
    """Return the reader, which belongs to the other loop."""
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = asyncio.run_coroutine_threadsafe(reader.wait_until_ready(20), there.loop)
    await writer.wait_until_ready(20)
    await asyncio.wrap_future(ready)
    return reader


@pytest.mark.parametrize("remote", [False, True])
async def test_end_whose_loop_runs_in_another_thread_is_closed_there(there: LoopThread, remote: bool) -> None:
    async with new_writer(remote) as writer:
        reader = await reader_of(writer, there)
        with pytest.raises(RoleError, match="belongs to another thread"):
            await reader.aclose()
        waiting = asyncio.run_coroutine_threadsafe(reader.dequeue(), there.loop)
        await asyncio.to_thread(there.run, reader.aclose())
        with pytest.raises(QueueClosed, match="this end was closed"):
            await asyncio.wrap_future(waiting)
        assert reader.end.state.dismantled
        await reader.aclose()


async def test_while_its_loop_has_stopped(there: LoopThread) -> None:
    async with new_writer(False) as writer:
        reader = await reader_of(writer, there)
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
    there: LoopThread,
) -> None:
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


# Others than the owner, and ends that nobody closes


def test_another_loop_is_refused() -> None:
    async def use(writer: MessageQueue, reader: MessageQueue) -> None:
        with pytest.raises(RoleError, match="event loop"):
            await writer.enqueue(1)
        with pytest.raises(RoleError, match="event loop"):
            await reader.dequeue(1)
        with pytest.raises(RoleError, match="event loop"):
            reader.dequeue_nowait()

    ends = attached()
    with asyncio.Runner() as runner:
        writer, (reader,) = runner.run(ends.__aenter__())
        asyncio.run(use(writer, reader))
        asyncio.set_event_loop(runner.get_loop())
        runner.run(ends.__aexit__(None, None, None))
    asyncio.set_event_loop(None)


async def test_a_forked_child_is_refused_and_does_not_hide_a_death() -> None:
    def is_refused(_kept: object) -> bool:
        for call in (reader.dequeue_nowait, lambda: writer.dismiss(0), lambda: writer.readers):
            with pytest.raises(RoleError, match="forked"):
                call()
        return True

    async with attached() as (writer, (reader,)):
        await writer.enqueue("kept")
        child_is_refused = forked(is_refused, None)
        assert await reader.dequeue(5) == "kept"
        await writer.aclose()
        with pytest.raises(QueueClosed):
            await reader.dequeue(5)  # although the child still has the writer's sockets
        assert child_is_refused()


@pytest.mark.parametrize("receive", [MessageQueue.dequeue, lambda reader: anext(merge({0: reader}))])
async def test_forked_child_that_ends_a_waiting_call_leaves_the_parents_call_wakeable(receive: Any) -> None:
    async with attached(wait="park") as (writer, (reader,)):
        call = receive(reader)
        waiting = asyncio.ensure_future(call)
        await until(lambda: reader.end.source.ring.parked[0])  # type: ignore[union-attr]
        assert forked(lambda call: call.close() is None, call)()
        await writer.enqueue("woken")
        assert await asyncio.wait_for(waiting, 5) in ("woken", (0, "woken"))


@EITHER_PLACE
@pytest.mark.parametrize(
    ("face", "ready"), [(MessageQueue, False), (MessageQueue, True), (blocking.MessageQueue, False)]
)
def test_a_forgotten_end_warns_and_leaks_nothing(face: Any, ready: bool, n_local: int, n_remote: int) -> None:
    def resources() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    async def attach(*ends: MessageQueue) -> None:
        await asyncio.gather(*(end.wait_until_ready(10) for end in ends))

    before = resources()
    writer = face(1, n_local, connect_ip="127.0.0.1", max_chunk_bytes=4096)
    reader = face.create_from_handle(writer.export_handle(), 0)
    if ready:
        asyncio.run(attach(writer, reader))
    kind = "local" if n_local else "remote"
    with pytest.warns(ResourceWarning, match=f"{kind} reader of queue .* was not closed"):
        del reader
        gc.collect()
    with pytest.warns(ResourceWarning, match="writer of queue .* was not closed"):
        del writer
        gc.collect()
    eventually(lambda: resources() == before, "the end of all that they had")


@BOTH_WAYS
async def test_queues_again_and_again_leak_nothing(way: str) -> None:
    async def once() -> None:
        async with attached(2, overflow=way) as (writer, readers):
            await writer.enqueue_many([1, b"x" * 10_000, b"unread" * 10_000])
            for reader in readers:
                assert await reader.dequeue(5) == 1
                assert len(await reader.dequeue(5)) == 10_000

    def resources() -> tuple[int, ...]:
        maps = Path("/proc/self/maps").read_text().count("memfd:aioshm")
        return sockets_of_zeromq(), len(os.listdir("/proc/self/fd")), threading.active_count(), maps

    await once()
    before = resources()
    for _ in range(5):
        await once()
    await until(lambda: resources() == before, "the end of all that they had")
