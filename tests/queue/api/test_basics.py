"""What a queue does when nothing goes wrong; what its readers do the same in either place, local and remote."""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import child
from overflowing import BOTH_WAYS
from pairs import EITHER_PLACE, attached
from receiving import Decoded, dequeue, dequeue_many, lease, while_decoding
from remotes import ready_ends, wide_writer
from support import bystander, raising, until

from aioshm import CodecError, Handle, MessageQueue, MessageTooLarge, Options, QueueCancelled, QueueClosed, RoleError
from aioshm.queue.state import YIELD_AFTER_MESSAGES
from aioshm.ring.segment import orphans


async def test_every_reader_gets_every_message_in_order() -> None:
    async with ready_ends(2, 2) as (writer, readers):

        async def send() -> None:
            for number in range(1000):
                await writer.enqueue({"number": number, "text": "x" * (number % 300)})

        async def receive(reader: MessageQueue) -> None:
            for number in range(1000):
                assert await reader.dequeue(10) == {"number": number, "text": "x" * (number % 300)}

        await asyncio.gather(send(), *map(receive, readers))


@BOTH_WAYS
async def test_sizes_around_the_chunk(way: str) -> None:
    payload = bytes(range(256)) * 400
    async with attached(2, codec="raw", overflow=way) as (writer, readers):
        for size, overflows in ((0, 0), (1, 0), (4095, 0), (4096, 0), (4097, 9), (100_000, 18)):
            for _ in range(9):  # more than the ring has slots
                await writer.enqueue(payload[:size])
                for reader in readers:
                    assert await reader.dequeue(5) == payload[:size]
            assert writer.stats().overflows == readers[0].stats().overflows == overflows


@pytest.mark.parametrize(("n_local", "n_remote", "way"), [(1, 0, "segments"), (1, 0, "zmq"), (0, 1, "segments")])
async def test_the_sender_may_change_its_buffers_at_once(n_local: int, n_remote: int, way: str) -> None:
    async with ready_ends(n_local, n_remote, chunk=65536, overflow=way) as (writer, (reader,)):
        # Through the ring and beside it, in one frame and in two, copied by pyzmq or not.
        for size in (80, 10_000, 80_000, 400_000, 1_000_000, 24_000_000):
            array = np.arange(size, dtype=np.uint8)
            expected = array.copy()
            await writer.enqueue(array)
            array[:] = 0
            received = await reader.dequeue(5)
            assert np.array_equal(received, expected)
            received[:] = 1  # the caller's own


@EITHER_PLACE
@pytest.mark.parametrize("receive", [dequeue, dequeue_many, lease])
async def test_ways_out_of_waiting(receive: Callable[..., Any], n_local: int, n_remote: int) -> None:
    async with ready_ends(n_local, n_remote) as (writer, (reader,)):
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="message 0 did not come"):
            await receive(reader, timeout=0.05)
        assert 0.05 <= time.monotonic() - began < 5
        with pytest.raises(TimeoutError):
            await receive(reader, timeout=0)
        cancel = asyncio.Event()
        waiting = asyncio.ensure_future(receive(reader, cancel=cancel))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        with pytest.raises(TimeoutError, match="the call of another task"):
            await receive(reader, timeout=0.01)
        cancel.set()
        with pytest.raises(QueueCancelled):
            await waiting
        with pytest.raises(QueueCancelled):
            await receive(reader, cancel=cancel)
        await writer.enqueue("there", 0)
        await until(lambda: reader.stats().backlog == 1)
        assert await receive(reader, timeout=0, cancel=cancel) == "there"


@pytest.mark.parametrize(("n_local", "n_remote"), [(1, 0), (1, 1)])
async def test_a_failed_raw_write_sends_nothing_and_a_failed_raw_read_releases(n_local: int, n_remote: int) -> None:
    async with ready_ends(n_local, n_remote, codec="raw") as (writer, readers):
        with pytest.raises(ZeroDivisionError):
            async with writer.acquire_write() as buffer:
                raise ZeroDivisionError
        with pytest.raises(ValueError, match="released"):
            buffer[0] = 1
        await writer.enqueue(b"first")
        await writer.enqueue(b"second")
        for reader in readers:
            with pytest.raises(ZeroDivisionError):
                async with reader.acquire_read(5) as view:
                    assert view == b"first"
                    raise ZeroDivisionError
            with pytest.raises(ValueError, match="released"):
                view[0]
            assert await reader.dequeue(5) == b"second", "a block that raises has had its message"
            assert reader.stats().backlog == 0


@EITHER_PLACE
@pytest.mark.parametrize("error", [LookupError("boom"), asyncio.CancelledError("boom")], ids=repr)
async def test_undecodable_and_unencodable_messages(n_local: int, n_remote: int, error: BaseException) -> None:
    refuses = type("Refuses", (), {"__reduce__": raising(error)})()
    async with ready_ends(n_local, n_remote, chunks=6) as (writer, (reader,)):
        with pytest.raises(CodecError, match="cannot pickle Refuses: boom"):
            await writer.enqueue(refuses)
        await writer.enqueue_many(["fine", Decoded(), "fine"] * 2)
        await until(lambda: reader.stats().backlog == 6)
        with while_decoding(raising(error)):
            assert await reader.dequeue(5) == "fine"
            with pytest.raises(CodecError, match=f"{type(error).__name__}.*boom"):
                await reader.dequeue(5)
            assert await reader.dequeue_many(5, 5) == ["fine", "fine"]
            with pytest.raises(CodecError, match=f"{type(error).__name__}.*boom"):
                await reader.dequeue_many(5, 5)
            assert await reader.dequeue_many(5, 5) == ["fine"]


@pytest.mark.parametrize(("n_local", "n_remote"), [(1, 0), (1, 1)])
async def test_too_large_a_message(n_local: int, n_remote: int) -> None:
    async with ready_ends(n_local, n_remote, max_message_bytes=100_000, codec="raw") as (writer, readers):
        for calling in (writer.enqueue(bytes(100_001)), writer.enqueue_many([b"x", bytes(100_001)])):
            with pytest.raises(MessageTooLarge, match="100001 bytes"):
                await calling
        with pytest.raises(MessageTooLarge):
            writer.enqueue_nowait(bytes(100_001))
        assert writer.stats().messages == 0
        await writer.enqueue(bytes(100_000))
        for reader in readers:
            assert len(await reader.dequeue(5)) == 100_000


WRITING: list[Callable[[MessageQueue], Any]] = [
    lambda end: end.enqueue(1),
    lambda end: end.enqueue_many([1]),
    lambda end: end.enqueue_nowait(1),
]
READING: list[Callable[[MessageQueue], Any]] = [
    lambda end: end.dequeue(),
    lambda end: end.dequeue_many(1),
    lambda end: end.dequeue_nowait(),
]


async def outcome(call: Callable[[MessageQueue], Any], end: MessageQueue) -> None:
    result = call(end)
    if inspect.isawaitable(result):
        await result


@EITHER_PLACE
async def test_wrong_end(n_local: int, n_remote: int) -> None:
    async with ready_ends(n_local, n_remote) as (writer, (reader,)):
        for call in (*WRITING, lambda end: end.acquire_write(), lambda end: end.export_handle()):
            with pytest.raises(RoleError, match="belongs to the queue's writer"):
                await outcome(call, reader)
        for call in (*READING, lambda end: end.acquire_read(), lambda end: end.lease()):
            with pytest.raises(RoleError, match="belongs to the queue's reader"):
                await outcome(call, writer)


@EITHER_PLACE
async def test_another_thread(n_local: int, n_remote: int) -> None:
    async with ready_ends(n_local, n_remote) as (writer, (reader,)):
        await writer.enqueue("kept")
        for calls, end in ((WRITING, writer), (READING, reader)):
            for call in calls:
                advice = r"belongs to another thread .*run_coroutine_threadsafe, or make an aioshm\.blocking\."
                with pytest.raises(RoleError, match=advice):
                    await asyncio.to_thread(asyncio.run, outcome(call, end))
        assert await reader.dequeue_many(5, 5) == ["kept"]


@EITHER_PLACE
@pytest.mark.parametrize("receive", [dequeue, dequeue_many])
async def test_sending_implies_waiting_until_ready(receive: Callable[..., Any], n_local: int, n_remote: int) -> None:
    writer = wide_writer(n_local, n_remote)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    async with writer, reader:
        with pytest.raises(RoleError, match="wait_until_ready"):
            writer.enqueue_nowait(1)
        with pytest.raises(RoleError, match="wait_until_ready"):
            reader.dequeue_nowait()
        _, received = await asyncio.gather(writer.enqueue_many(["hello"], 5), receive(reader, timeout=5))
        assert received == "hello"


@EITHER_PLACE
async def test_a_reader_that_never_waits_lets_other_tasks_run(n_local: int, n_remote: int) -> None:
    async with ready_ends(n_local, n_remote, chunks=512) as (writer, (reader,)):
        for number in range(512):
            writer.enqueue_nowait(number)
        await until(lambda: reader.stats().backlog == 512, "the arrival of all messages")
        async with bystander() as other:
            for number in range(512):
                assert await reader.dequeue() == number
        assert other.turns >= 512 // YIELD_AFTER_MESSAGES - 1


async def test_who_is_missing_is_said() -> None:
    async with wide_writer(2, 0) as writer, MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
        with pytest.raises(TimeoutError, match="the writer does not answer"):
            await reader.wait_until_ready(0.01)
        with pytest.raises(TimeoutError, match="not attached yet: rank 0, rank 1"):
            await writer.wait_until_ready(0)
        async with asyncio.timeout(10):
            while writer.stats().readers == 0 or "large" in reader.end.source.why_not_ready():  # type: ignore[attr-defined]
                await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError, match="other readers are missing"):
            await reader.wait_until_ready(0.01)
        with pytest.raises(TimeoutError, match="not attached yet: rank 1"):
            await writer.wait_until_ready(0.01)
        async with MessageQueue.create_from_handle(writer.export_handle(), 1) as second:
            await asyncio.gather(*(end.wait_until_ready(10) for end in (writer, reader, second)))


# Traffic


@pytest.mark.one_loop
async def test_four_processes_receive_everything() -> None:
    rng = random.Random(0)
    async with wide_writer(4, 0, chunk=128 * 1024, chunks=10) as writer, AsyncExitStack() as stack:
        handle = writer.export_handle().to_json()
        readers = [await stack.enter_async_context(child("collect", handle, str(rank))) for rank in range(4)]
        await writer.wait_until_ready(30)
        for number in range(500):
            size = rng.randrange(80_000) if number % 100 else 200_000  # every 100th overflows
            await writer.enqueue((number, bytearray([number % 256]) * size), 20)
            if rng.random() < 0.01:
                await asyncio.sleep(rng.random() * 0.005)
        assert writer.stats().overflows == 5
        await writer.aclose()
        for reader in readers:
            await reader.says("ready")
            await reader.says("500 then closed")


@pytest.mark.parametrize("wait", ["park", "adaptive"])
async def test_a_parking_reader_wakes_for_every_message(wait: str) -> None:
    """150 pairs, the second message sent at every moment around the reader's parking."""
    rng = random.Random(8)
    async with attached(1, wait=wait) as (writer, (reader,)):
        received = []

        async def receive() -> None:
            async for number in reader:
                received.append(number)

        receiving = asyncio.ensure_future(receive())
        for pair in range(150):
            await writer.enqueue(2 * pair)
            for _ in range(rng.randrange(5)):
                await asyncio.sleep(0)
            await asyncio.wait_for(writer.enqueue(2 * pair + 1), 5)
            async with asyncio.timeout(5):
                while len(received) < 2 * pair + 2:
                    await asyncio.sleep(0)
        await writer.aclose()
        await receiving
        assert received == list(range(300))


async def test_a_named_segment_loses_its_name_once_all_have_attached() -> None:
    async with attached(1, backing="named") as (writer, (reader,)):
        name = writer.export_handle().segment
        assert name is not None
        assert name not in orphans()
        assert not (Path("/dev/shm") / name).exists()
        await writer.enqueue("x")
        assert await reader.dequeue(5) == "x"


# Calls of subclasses


class Shouting(MessageQueue[Any]):
    """Has calls of its own."""

    async def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        await super().enqueue(obj.upper(), timeout)

    async def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        return await super().dequeue(*args, **kwargs) + "!"


async def test_what_a_subclass_has_to_say() -> None:
    async with Shouting(1, 1) as writer, Shouting.create_from_handle(writer.export_handle(), 0) as reader:
        await asyncio.gather(writer.wait_until_ready(30), reader.wait_until_ready(30))
        await writer.enqueue("ha")
        assert await reader.dequeue(timeout=30) == "HA!"
        await writer.broadcast_object("oh")
        assert await reader.broadcast_object() == "OH!"


async def test_iterating_over_what_a_subclass_or_an_observer_receives() -> None:
    async with MessageQueue(1, 1) as writer, Shouting.create_from_handle(writer.export_handle(), 0) as reader:
        await asyncio.gather(writer.wait_until_ready(30), reader.wait_until_ready(30))
        await writer.enqueue_many("abc")
        assert [await anext(aiter(reader)) for _ in "abc"] == ["a!", "b!", "c!"]
    async with attached() as (writer, [observed]):
        await writer.enqueue_many("ab")
        dequeue, seen = observed.dequeue, []

        async def watched() -> Any:
            seen.append(obj := await dequeue())
            return obj

        observed.dequeue = watched  # type: ignore[method-assign,assignment]
        assert [await anext(aiter(observed)) for _ in "ab"] == seen == ["a", "b"]


# No readers


SIZES: dict[str, Any] = {"max_chunk_bytes": 4096, "max_chunks": 4, "slots": 4}


class TestAQueueWithoutReaders:
    @pytest.mark.parametrize("codec", ["pickle", "msgpack", "raw"])
    async def test_takes_any_number_of_messages_of_any_size(self, codec: str) -> None:
        async with MessageQueue(0, 0, **SIZES, codec=codec) as writer:
            for size in (0, 10, 5000, 3_000_000):
                await writer.enqueue(bytes(size), 0)
                writer.enqueue_nowait(bytes(size))
                assert await writer.broadcast_object(bytes(size)) == bytes(size)
            await writer.enqueue_many([b"x"] * 100, 0)
            for _ in range(20):
                async with writer.acquire_write(0) as chunk:
                    assert len(chunk) == 4096
                    chunk[:2] = b"hi"
            stats = writer.stats()
            assert (stats.messages, stats.backlog, stats.overflows) == (132, 0, 0)

    async def test_starves_nobody(self) -> None:
        async with MessageQueue(0, 0, **SIZES) as writer, bystander() as other:
            for number in range(10_000):
                await writer.enqueue(number)
            assert other.turns >= 10_000 // YIELD_AFTER_MESSAGES

    async def test_refuses_what_any_queue_refuses(self) -> None:
        async with MessageQueue(0, 0, **SIZES, codec="msgpack") as writer:
            with pytest.raises(CodecError):
                await writer.enqueue(object())
            with pytest.raises(CodecError):
                await writer.enqueue_many([1, object()])
            assert writer.stats().messages == 0
            with pytest.raises(RoleError):
                await writer.dequeue()
        with pytest.raises(QueueClosed):
            await writer.enqueue(1)

    @pytest.mark.parametrize("lifeline", ["abstract", "directory"])
    async def test_has_a_handle_that_admits_nobody(self, lifeline: Any) -> None:
        async with MessageQueue(0, 0, **SIZES, options=Options(lifeline=lifeline)) as writer:
            await writer.wait_until_ready(0)
            assert writer.stats().ready
            handle = Handle.from_json(writer.export_handle().to_json())
            assert (handle.n_reader, handle.local_reader_ranks, handle.remote) == (0, (), None)
            with pytest.raises(ValueError, match="the queue has none; not 0"):
                MessageQueue.create_from_handle(handle, 0)
            await writer.enqueue("on")
