"""Queues that are found by name."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from children import child
from faces import Thread
from receiving import acquire_read, dequeue, dequeue_many, dequeue_nowait, lease
from support import HELPERS, cancelled, cancelled_after, eventually, until

from aioshm import (
    EndClosed,
    HandleError,
    MessageQueue,
    NameTaken,
    Options,
    PeerClosed,
    PeerDied,
    QueueClosed,
    QueueRestarted,
    RoleError,
    blocking,
    merge,
)
from aioshm.process.proc import process_state
from aioshm.queue.local.source import RingSource
from aioshm.queue.names.registry import NamedWriters

NAMED = HELPERS / "named_child.py"


@pytest.fixture(autouse=True)
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let names be in a directory of the test's own, where nothing is in the way of what killed writers leave."""
    directory = tmp_path / "names"
    monkeypatch.setenv("AIOSHM_RUNTIME_DIR", str(directory))
    return directory


def new_writer(n_reader: int = 1, chunks: int = 4, name: str = "steps", **arguments: Any) -> MessageQueue:
    return MessageQueue(n_reader, n_reader, max_chunk_bytes=4096, max_chunks=chunks, name=name, **arguments)


def named_child(*arguments: str) -> Any:
    return child(*arguments, script=NAMED)


async def test_reader_that_attaches_by_name_late_gets_history() -> None:
    options = msgspec.structs.replace(Options.from_env(), max_readers=2)
    async with MessageQueue(1, name="steps", options=options) as writer, MessageQueue.attach("steps", 0) as first:
        for number in range(3):
            await writer.enqueue(number)
        assert [await first.dequeue(20) for _ in range(3)] == [0, 1, 2]
        async with MessageQueue.attach("steps", history=2) as late:
            assert await late.dequeue(20) == 1
            assert await late.dequeue(20) == 2


async def test_a_reader_that_goes_on_to_the_next_writer_does_not_wake_the_one_before() -> None:
    writer = new_writer(slots=4)
    async with MessageQueue.attach("steps", reconnect=True) as reader:
        await asyncio.gather(writer.wait_until_ready(20), reader.wait_until_ready(20))
        source = reader.end.source
        source.waker._loop.call_soon(source.waker.wake)  # as where a slot became free just before
        await writer.aclose()
        await until(lambda: reader.end.source is not source)
        source.waker.wake()


@pytest.mark.parametrize("error", [MemoryError(), OSError(5, "Input/output error")])
async def test_reader_whose_look_for_a_writer_fails_once_looks_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, failures = NamedWriters.find, [error]

    def look_after_a_failure(writers: NamedWriters) -> Any:
        if failures:
            raise failures.pop()
        return look(writers)

    async with MessageQueue.attach("steps", 0) as reader:
        monkeypatch.setattr(NamedWriters, "find", look_after_a_failure)
        receiving = asyncio.create_task(reader.dequeue(timeout=20))
        await until(lambda: not failures)
        async with new_writer(1) as writer:
            await writer.enqueue("sent", 20)
            assert await receiving == "sent"


# Finding


async def test_both_ends_in_one_task_whichever_comes_first() -> None:
    for name in ("a", "7", "x" * 100, "engine:0", "a.b-c_d+e@f"):
        async with new_writer(name=name) as writer, MessageQueue.attach(name, 0) as reader:
            await writer.enqueue("first", 20)
            assert await reader.dequeue(20) == "first"
            assert writer.export_handle().name == name
            assert (writer.stats().queue, reader.stats().queue) == (name, name)
    readers = [MessageQueue.attach("steps", rank) for rank in range(3)]
    waiting = [asyncio.ensure_future(reader.dequeue(20)) for reader in readers]
    await asyncio.sleep(0.01)
    async with new_writer(3) as writer:
        await writer.enqueue("found", 20)
        assert await asyncio.gather(*waiting) == ["found"] * 3
        for reader in readers:
            await reader.aclose()


async def test_who_waits_in_vain_is_told_for_what(names: Path) -> None:
    expected = re.escape(f"there is no writer of the name 'steps' in {names}")
    expected += r".*\(waited \d\.\d s; timeout= of attach\(\)"
    async with MessageQueue.attach("steps", 0, timeout=0.05) as reader:
        for call in (reader.dequeue, reader.wait_until_ready, reader.lease().__aenter__):
            with pytest.raises(TimeoutError, match=expected):
                await call()
        with pytest.raises(TimeoutError, match=expected):
            await reader.dequeue(0.01)
        with pytest.raises(RoleError, match="not ready"):
            reader.dequeue_nowait()
        async with new_writer() as writer:  # and goes on waiting in the next call
            await asyncio.gather(writer.enqueue("late", 20), reader.wait_until_ready(20))
            assert await reader.dequeue() == "late"

    def wait() -> None:
        with blocking.MessageQueue.attach("steps", 0, timeout=0.05) as reader:
            reader.dequeue()

    with pytest.raises(TimeoutError, match=expected):
        Thread(wait).result()


async def test_a_name_that_was_found_has_all_the_time_it_needs() -> None:
    async with new_writer(2) as writer, MessageQueue.attach("steps", 0, timeout=0.02) as reader:
        waiting = asyncio.ensure_future(reader.dequeue())
        starting = asyncio.ensure_future(writer.wait_until_ready(20))
        await until(lambda: writer.stats().readers == 1)
        await asyncio.sleep(0.06)
        assert not waiting.done()
        async with MessageQueue.attach("steps", 1) as other:
            await starting
            await writer.enqueue("all there", 20)
            assert [await waiting, await other.dequeue(20)] == ["all there"] * 2


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a\0b", "a b", "ä", "a\n", "-x", "x" * 101])
def test_bad_names(name: str) -> None:
    with pytest.raises(ValueError, match="name must be 1 to 100 letters"):
        new_writer(name=name)
    for api in (MessageQueue, blocking.MessageQueue):
        with pytest.raises(ValueError, match="name must be 1 to 100 letters"):
            api.attach(name, 0)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"name": b"steps"}, TypeError, "name must be a str"),
        ({"rank": "0"}, TypeError, "rank must be an int"),
        ({"rank": -1}, ValueError, "rank must be at least 0"),
        ({"timeout": -1}, ValueError, "timeout must be at least 0"),
        ({"timeout": "soon"}, TypeError, "timeout must be"),
        ({"reconnect": 1}, TypeError, "reconnect must be True or False"),
        ({"slow_reader": "later"}, ValueError, "slow_reader must be one of"),
        ({"codec": "xml"}, ValueError, "xml"),
        ({"options": {}}, TypeError, "options must be"),
    ],
    ids=str,
)
def test_bad_arguments(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        MessageQueue.attach(**{"name": "steps", "rank": 0, **arguments})
    with pytest.raises(TypeError, match="name must be a str"):
        MessageQueue(1, 1, name=7)  # type: ignore[arg-type]


async def test_what_does_not_go_with_the_writer_that_is_found() -> None:
    async with new_writer(codec="msgpack"):
        for arguments, text in (
            ({"rank": 1}, r"rank must be one of \(0,\)"),
            ({"codec": "raw"}, "'msgpack', as the"),
            ({"type": list[list[int] | set[int]]}, "which the codec 'msgpack' cannot decode"),
        ):
            async with MessageQueue.attach(**{"name": "steps", "rank": 0, **arguments}) as reader:
                for _ in range(4):
                    with pytest.raises(HandleError, match=text) as caught:
                        await reader.dequeue(20)
                assert len(caught.traceback) < 10, "of this call alone"


# One writer at a time


async def test_a_second_writer_is_told_who_has_the_name(names: Path) -> None:
    async with new_writer() as writer:
        with pytest.raises(NameTaken, match=rf"'steps' is taken by a running writer \(pid {os.getpid()}\)") as caught:
            new_writer()
        assert (caught.value.name, caught.value.pid) == ("steps", os.getpid())
        assert caught.value.path == str(names / "steps.queue")
        with pytest.raises(NameTaken):
            blocking.MessageQueue(1, 1, name="steps")
        async with new_writer(name="other"), MessageQueue.attach("steps", 0) as reader:  # nor has it done any harm
            await writer.enqueue(1, 20)
            assert await reader.dequeue(20) == 1
    assert os.listdir(names) == []
    new_writer().end.state.discard()
    assert os.listdir(names) == []


@pytest.mark.slow_on_uvloop
async def test_a_forked_child_does_not_have_its_parents_name() -> None:
    async with named_child("have_and_fork", "steps") as running:
        forked = int((await running.says("child ")).split()[1])
        try:
            await running.kill()
            async with new_writer() as writer, MessageQueue.attach("steps", 0) as reader:
                await writer.enqueue(1, 20)
                assert await reader.dequeue(20) == 1
        finally:
            os.kill(forked, signal.SIGKILL)


async def test_the_name_outlives_nothing_that_is_forgotten(names: Path) -> None:
    for api, remedy in ((MessageQueue, "or await aclose"), (blocking.MessageQueue, "or call close")):
        for make in (partial(api, 1, name="steps"), partial(api.attach, "steps", 0)):
            with pytest.warns(ResourceWarning, match=f"not closed: .*{remedy}"):
                make()
                gc.collect()
            assert os.listdir(names) == []


# Going on with the next writer


async def take_next(reader: MessageQueue, **_limits: Any) -> Any:
    return await anext(reader)


async def read_on(reader: MessageQueue, receive: Callable[..., Any] = dequeue) -> Any:
    """Receive a message in one of several ways; return it, or the error."""
    try:
        return await receive(reader, timeout=20)
    except QueueRestarted as error:
        return error


@pytest.mark.slow_on_uvloop
async def test_a_reader_that_is_not_to_reconnect() -> None:
    async with named_child("write", "steps", "1") as running, MessageQueue.attach("steps", 0) as reader:
        assert await reader.dequeue(20) == (running.pid, 0)
        running.signal(signal.SIGKILL)
        with pytest.raises(PeerDied):
            await reader.dequeue(20)
        # A process that is being killed closes one descriptor after the other: first it is heard of, then it lets go.
        await until(lambda: process_state(running.pid) in ("zombie", "gone"), "the end of the writer")
        async with new_writer():
            with pytest.raises(PeerDied):
                await reader.dequeue(20)
    async with MessageQueue.attach("steps", 0) as reader:
        async with new_writer() as writer:
            await writer.enqueue(1, 20)
        assert [message async for message in reader] == [1]


@pytest.mark.slow_on_uvloop
async def test_reader_of_a_writer_killed_under_traffic_goes_on_with_its_successor() -> None:
    async with MessageQueue.attach("steps", 0, reconnect=True) as reader:
        former = expected = 0
        for _ in range(2):
            async with named_child("write", "steps", "1000000") as running:
                if former:
                    with pytest.raises(QueueRestarted) as caught:
                        while True:
                            assert await reader.dequeue(20) == (former, expected)
                            expected += 1
                    assert (caught.value.old_pid, caught.value.pid) == (former, running.pid)
                    assert isinstance(caught.value.ended, PeerDied)
                for expected in range(300):
                    assert await reader.dequeue(20) == (running.pid, expected)
                former = running.pid
                expected += 1
                running.signal(signal.SIGKILL)


async def test_waiting_for_the_next_writer_may_be_cancelled_at_every_await() -> None:
    async with MessageQueue.attach("steps", 0, reconnect=True) as reader:
        async with new_writer() as writer:
            await writer.enqueue("old", 20)
        assert await reader.dequeue(20) == "old"
        for turns in range(12):
            received: list[Any] = []

            async def read(received: list[Any] = received) -> None:
                try:
                    received.append(await reader.dequeue(20))
                except QueueRestarted as error:
                    received.append(error)

            await cancelled_after(read(), turns)
            async with new_writer() as writer:
                sending = asyncio.ensure_future(writer.enqueue(turns, 20))
                await cancelled_after(read(), 2 * turns)
                while len(received) < 2:
                    await read()
                await sending
            assert isinstance(received[0], QueueRestarted), received
            assert received[1:] == [turns]


async def test_an_idle_reader_leaves_a_writer_whose_last_messages_it_received_after_the_end() -> None:
    async with MessageQueue.attach("steps", 0, reconnect=True) as reader:
        async with new_writer() as writer:
            await writer.enqueue("old", 20)
        await until(lambda: reader.end.source.gone)
        assert await reader.dequeue(20) == "old"
        async with new_writer() as writer:
            await writer.enqueue("new", 20)  # waits for the reader, which is in no call
            with pytest.raises(QueueRestarted):
                await reader.dequeue(20)
            assert await reader.dequeue(20) == "new"


async def test_whichever_call_comes_first_is_told_first() -> None:
    """An idle reader is ready again before anybody asks; no short way leads past the error."""
    async with MessageQueue.attach("steps", 0, reconnect=True) as reader:
        ways = [dequeue, dequeue, dequeue_many, lease, acquire_read, dequeue_nowait, take_next]
        for incarnation, receive in enumerate(ways):
            async with new_writer() as writer:
                await writer.enqueue(incarnation, 20)
                await until(lambda: reader.stats().ready)
                assert reader.end.state.core.open == (incarnation == 0)
                told = await read_on(reader, receive)
                assert isinstance(told, QueueRestarted) == (incarnation > 0)
                if isinstance(told, QueueRestarted):
                    assert (told.name, told.old_pid, told.pid) == ("steps", os.getpid(), os.getpid())
                    assert isinstance(told.ended, PeerClosed)
                    for number in range(3):
                        await writer.enqueue(number, 20)
            # The writer is closed, and all of its messages are still received.
            if incarnation:
                sent = [incarnation, 0, 1, 2]
                received = [await read_on(reader, receive) for _ in sent]
                assert received == ([pickle.dumps(number, 5) for number in sent] if receive is acquire_read else sent)
        assert (reader.stats().messages, reader.stats().restarts) == (25, 6)


async def test_a_writer_that_goes_before_all_are_ready_was_none() -> None:
    async with MessageQueue.attach("steps", 0, reconnect=True) as reader:
        async with new_writer(2) as writer:
            starting = asyncio.ensure_future(writer.wait_until_ready(20))
            waiting = asyncio.ensure_future(reader.dequeue(20))
            await until(lambda: writer.stats().readers == 1)
            await cancelled(starting)
        async with new_writer() as writer:
            await writer.enqueue("at last", 20)
            assert await waiting == "at last"
        assert reader.stats().restarts == 0
    async with MessageQueue.attach("steps", 0) as other:
        writer = new_writer(2)
        starting = asyncio.ensure_future(writer.wait_until_ready(20))
        call = asyncio.ensure_future(other.dequeue())
        await until(lambda: writer.readers[0].state == "attached")
        starting.cancel()
        await writer.aclose()
        with pytest.raises(PeerClosed):
            await call
        assert other.stats().messages == 0


async def test_tasks_that_share_a_reader_are_told_once() -> None:
    async with MessageQueue.attach("steps", 0, reconnect=True) as reader:
        async with new_writer() as writer:
            await writer.enqueue("old", 20)
        assert await reader.dequeue(20) == "old"
        tasks = [asyncio.ensure_future(read_on(reader)) for _ in range(4)]
        async with new_writer() as writer:
            for number in range(3):
                await writer.enqueue(number, 20)
            outcomes = await asyncio.gather(*tasks)
        assert sorted(outcome for outcome in outcomes if not isinstance(outcome, QueueRestarted)) == [0, 1, 2]
        assert reader.stats().restarts == 1


async def test_task_that_waits_behind_a_cancelled_one_is_told_before_it_gets_a_message() -> None:
    async with MessageQueue.attach("steps", 0, reconnect=True) as reader:
        async with new_writer() as writer:
            await writer.enqueue("old", 20)
            assert await reader.dequeue(20) == "old"
            first, second = (asyncio.ensure_future(reader.dequeue(20)) for _ in range(2))
            await until(lambda: reader.end.state.lock.calls == 2)
        async with new_writer() as writer:
            sending = asyncio.ensure_future(writer.enqueue("new", 20))
            while not reader.end.has_news:
                await asyncio.sleep(0)
            await cancelled(first)
            with pytest.raises(QueueRestarted):
                await second
            await sending
            assert await reader.dequeue(20) == "new"


async def test_the_next_queue_may_be_another_size_but_not_another_codec() -> None:
    async with MessageQueue.attach("steps", 0, reconnect=True, codec="pickle") as reader:
        for size in (4096, 1 << 16):
            async with MessageQueue(1, 1, max_chunk_bytes=size, max_chunks=2, name="steps") as writer:
                await writer.enqueue(bytes(size // 2), 20)
                try:
                    assert len(await reader.dequeue(20)) == size // 2
                except QueueRestarted:
                    assert len(await reader.dequeue(20)) == size // 2
        async with new_writer(codec="raw"):
            with pytest.raises(HandleError, match="codec must be 'raw'"):
                await reader.dequeue(20)


async def test_a_rank_that_is_taken_is_tried_again_at_the_next_call() -> None:
    late = MessageQueue.attach("steps", 0, reconnect=True)
    async with new_writer(2) as writer:
        starting = asyncio.ensure_future(writer.wait_until_ready(20))
        async with MessageQueue.attach("steps", 0):
            await until(lambda: writer.stats().readers == 1)
            for _ in range(2):
                with pytest.raises(HandleError, match=f"rank 0 is taken by pid {os.getpid()}"):
                    await late.dequeue(20)
            merged = merge({5: late}, errors="yield")
            assert [(rank, type(error)) async for rank, error in merged] == [(5, HandleError)]
            assert list(merged.failed) == [5]
        async with late, MessageQueue.attach("steps", 1) as other:
            await asyncio.gather(starting, late.wait_until_ready(20), other.wait_until_ready(20))
            await writer.enqueue("free", 20)
            assert await late.dequeue(20) == "free"
        assert late.stats().restarts == 0


def blocking_writers(count: int) -> None:
    for incarnation in range(count):
        with blocking.MessageQueue(1, 1, name="steps", max_chunk_bytes=4096, max_chunks=4) as writer:
            for number in range(5):
                writer.enqueue((incarnation, number), 20)


def test_threads_that_share_a_reader_are_told_once() -> None:
    lock, received = threading.Lock(), list[Any]()

    def read(reader: blocking.MessageQueue) -> None:
        while True:
            try:
                message = reader.dequeue(20)
            except QueueRestarted:
                message = "restarted"
            except QueueClosed:
                return
            with lock:
                received.append(message)

    with blocking.MessageQueue.attach("steps", 0, reconnect=True) as reader:
        threads = [Thread(read, reader) for _ in range(3)]
        blocking_writers(4)
        eventually(lambda: len(received) == 23)
    for thread in threads:  # which wait for another writer until the end is closed
        thread.result()
    assert received.count("restarted") == 3
    expected = [(incarnation, number) for incarnation in range(4) for number in range(5)]
    assert sorted(message for message in received if message != "restarted") == expected


async def test_closing_while_a_writer_is_looked_for() -> None:
    for reconnect in (False, True):
        reader = MessageQueue.attach("steps", 0, reconnect=reconnect)
        waiting = asyncio.ensure_future(reader.dequeue())
        await asyncio.sleep(0.005)
        await reader.aclose()
        with pytest.raises(EndClosed):
            await waiting


async def test_messages_are_counted_once_while_a_reader_changes_its_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    close = RingSource.close
    async with MessageQueue.attach("steps", 0, reconnect=True) as reader:

        def counting(source: RingSource) -> None:
            counts.append(reader.stats().messages)  # as another thread may
            close(source)

        async with new_writer() as writer:
            for number in range(3):
                await writer.enqueue(number, 20)
                assert await reader.dequeue(20) == number
            monkeypatch.setattr(RingSource, "close", counting)
        await until(lambda: counts)
    assert counts[0] == 3


async def test_the_writers_options_hold_for_a_reader_that_has_none_of_its_own(names: Path) -> None:
    options = Options(runtime_dir=str(names), stall_warning_s=7.0)
    async with new_writer(options=options) as writer, MessageQueue.attach("steps", 0) as reader:
        await asyncio.gather(writer.wait_until_ready(20), reader.wait_until_ready(20))
        assert reader.end.state.options == options
