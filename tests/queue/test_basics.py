"""What a queue does when nothing goes wrong."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
import torch
from pairs import attached

from aioshm import (
    CodecError,
    MessageQueue,
    MessageTooLarge,
    QueueCancelled,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    RoleError,
)


async def test_every_reader_gets_every_message_in_order() -> None:
    async with attached(3) as (writer, readers):

        async def send() -> None:
            for number in range(1000):
                await writer.enqueue({"number": number, "text": "x" * (number % 300)})

        async def receive(reader: MessageQueue) -> None:
            for number in range(1000):
                assert await reader.dequeue(5) == {"number": number, "text": "x" * (number % 300)}

        await asyncio.gather(send(), *map(receive, readers))


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 100_000])
async def test_sizes_around_the_chunk(size: int) -> None:
    payload = bytes(range(256)) * (size // 256 + 1)
    async with attached(2, codec="raw") as (writer, readers):
        for _ in range(9):  # more than the ring has slots
            await writer.enqueue(payload[:size])
            for reader in readers:
                assert await reader.dequeue(5) == payload[:size]
        overflowing = size > 4096
        assert writer.stats().overflows == (9 if overflowing else 0)
        assert readers[0].stats().overflows == (9 if overflowing else 0)


async def test_several_overflows_in_flight_keep_their_place() -> None:
    async with attached(2) as (writer, readers):
        sent = [b"small", b"A" * 50_000, b"B" * 60_000, b"tiny"]
        for obj in sent:
            await writer.enqueue(obj, 5)
        with pytest.raises(QueueFull):
            writer.enqueue_nowait(b"")
        for reader in readers:
            assert [await reader.dequeue(5) for _ in sent] == sent


async def test_the_sender_may_change_its_buffers_at_once() -> None:
    async with attached(1, chunk=65536) as (writer, (reader,)):
        for size in (10_000, 1_000_000):  # through the ring, and through an annex
            array = np.arange(size, dtype=np.uint8)
            expected = array.copy()
            await writer.enqueue(array)
            array[:] = 0
            received = await reader.dequeue(5)
            assert np.array_equal(received, expected)
            received[:] = 1  # the caller's own


async def test_what_was_received_never_changes_again() -> None:
    async with attached(1, chunk=65536, chunks=2) as (writer, (reader,)):
        kept = []
        for number in range(20):
            await writer.enqueue(torch.full((5000,), number, dtype=torch.int32))
            kept.append(await reader.dequeue(5))
        for number, tensor in enumerate(kept):
            assert torch.equal(tensor, torch.full((5000,), number, dtype=torch.int32))


async def test_timeout_and_nowait() -> None:
    async with attached() as (writer, (reader,)):
        with pytest.raises(QueueEmpty):
            reader.dequeue_nowait()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await reader.dequeue(0.05)
        assert 0.05 <= time.monotonic() - began < 5
        with pytest.raises(TimeoutError):
            await reader.dequeue(0)
        for number in range(4):
            writer.enqueue_nowait(number)
        with pytest.raises(QueueFull, match="rank 0"):
            writer.enqueue_nowait(4)
        with pytest.raises(TimeoutError, match="rank 0"):
            await writer.enqueue(4, 0.05)
        assert [reader.dequeue_nowait() for _ in range(4)] == [0, 1, 2, 3]
        await writer.enqueue(5, 0)
        assert await reader.dequeue(0) == 5


async def test_nowait_receives_overflow_at_once() -> None:
    async with attached() as (writer, (reader,)):
        writer.enqueue_nowait(b"x" * 100_000)
        assert reader.dequeue_nowait() == b"x" * 100_000
        assert reader.stats().overflows == 1


async def test_cancel_event() -> None:
    async with attached() as (writer, (reader,)):
        cancel = asyncio.Event()
        waiting = asyncio.ensure_future(reader.dequeue(cancel=cancel))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        cancel.set()
        with pytest.raises(QueueCancelled):
            await waiting
        with pytest.raises(QueueCancelled):
            await reader.dequeue(cancel=cancel)
        await writer.enqueue("there")
        assert await reader.dequeue(cancel=cancel) == "there"


async def test_iteration_ends_when_the_writer_closes() -> None:
    async with attached(2) as (writer, readers):

        async def collect(reader: MessageQueue) -> list[int]:
            return [obj async for obj in reader]

        collecting = [asyncio.ensure_future(collect(reader)) for reader in readers]
        for number in range(100):
            await writer.enqueue(number)
        await writer.aclose()
        assert await asyncio.gather(*collecting) == [list(range(100))] * 2
        with pytest.raises(QueueClosed):
            await readers[0].dequeue()
        with pytest.raises(QueueClosed):
            readers[0].dequeue_nowait()


async def test_everything_sent_survives_the_writers_close() -> None:
    async with attached(1) as (writer, (reader,)):
        sent = [b"small", b"L" * 3_000_000, b"M" * 2_000_000, b"end"]
        for obj in sent:
            await writer.enqueue(obj)
        await writer.aclose()
        assert [obj async for obj in reader] == sent


async def test_raw_slots() -> None:
    async with attached(2, chunk=1000) as (writer, readers):
        async with writer.acquire_write(1) as buffer:
            assert len(buffer) == 1000
            buffer[:] = b"z" * 1000
        for reader in readers:
            async with reader.acquire_read(1) as view:
                assert view.readonly
                assert view == b"z" * 1000
        async with writer.acquire_write(1) as buffer:
            buffer[:3] = b"abc"
        for reader in readers:
            assert bytes(await reader.dequeue(1))[:3] == b"abc"


async def test_a_failed_raw_write_sends_nothing_and_a_failed_raw_read_releases() -> None:
    async with attached(1, codec="raw") as (writer, (reader,)):
        with pytest.raises(ZeroDivisionError):
            async with writer.acquire_write():
                raise ZeroDivisionError
        await writer.enqueue(b"first")
        await writer.enqueue(b"second")
        with pytest.raises(ZeroDivisionError):
            async with reader.acquire_read() as view:
                assert view == b"first"
                raise ZeroDivisionError
        assert await reader.dequeue(1) == b"second"
        assert reader.stats().backlog == 0


async def test_raw_read_of_overflow() -> None:
    async with attached(1, codec="raw") as (writer, (reader,)):
        await writer.enqueue(b"o" * 50_000)
        async with reader.acquire_read(5) as view:
            assert view == b"o" * 50_000
        await writer.enqueue(b"next")
        assert await reader.dequeue(5) == b"next"


async def test_a_view_kept_beyond_its_block_is_refused() -> None:
    async with attached(1, codec="raw") as (writer, (reader,)):
        async with writer.acquire_write() as buffer:
            pass
        with pytest.raises(ValueError, match="released"):
            buffer[0] = 1
        async with reader.acquire_read() as view:
            pass
        with pytest.raises(ValueError, match="released"):
            view[0]


async def test_broadcast_object() -> None:
    async with attached(2) as (writer, readers):
        results = await asyncio.gather(
            writer.broadcast_object({"k": [1]}), *(reader.broadcast_object() for reader in readers)
        )
        assert results == [{"k": [1]}] * 3


async def test_undecodable_and_unencodable_messages() -> None:
    async with attached() as (writer, (reader,)):
        with pytest.raises(CodecError, match="function"):
            await writer.enqueue(lambda: None)
        await writer.enqueue(_Explosive())
        await writer.enqueue("fine")
        with pytest.raises(CodecError, match="ZeroDivisionError"):
            await reader.dequeue(5)
        assert await reader.dequeue(5) == "fine"


async def test_too_large_a_message() -> None:
    async with attached(max_message_bytes=10_000, codec="raw") as (writer, (reader,)):
        with pytest.raises(MessageTooLarge, match="10001 bytes"):
            await writer.enqueue(bytes(10_001))
        await writer.enqueue(bytes(10_000))
        assert len(await reader.dequeue(5)) == 10_000


async def test_wrong_end() -> None:
    async with attached() as (writer, (reader,)):
        with pytest.raises(RoleError, match="writer"):
            await reader.enqueue(1)
        with pytest.raises(RoleError, match="writer"):
            reader.enqueue_nowait(1)
        with pytest.raises(RoleError, match="writer"):
            reader.acquire_write()
        with pytest.raises(RoleError, match="writer"):
            reader.export_handle()
        with pytest.raises(RoleError, match="reader"):
            await writer.dequeue()
        with pytest.raises(RoleError, match="reader"):
            writer.dequeue_nowait()
        with pytest.raises(RoleError, match="reader"):
            writer.acquire_read()


async def test_sending_implies_waiting_until_ready() -> None:
    writer = MessageQueue(1, 1, max_chunk_bytes=4096)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    async with writer, reader:
        with pytest.raises(RoleError, match="wait_until_ready"):
            writer.enqueue_nowait(1)
        with pytest.raises(RoleError, match="wait_until_ready"):
            reader.dequeue_nowait()
        _, received = await asyncio.gather(writer.enqueue("hello", 5), reader.dequeue(5))
        assert received == "hello"


async def test_two_consumers_share_the_messages_in_turn() -> None:
    async with attached() as (writer, (reader,)):

        async def consume() -> list[int]:
            return [number async for number in reader]

        consumers = [asyncio.ensure_future(consume()) for _ in range(2)]
        for number in range(1000):
            await writer.enqueue(number)
            if number % 3 == 0:
                await asyncio.sleep(0)
        await writer.aclose()
        first, second = await asyncio.gather(*consumers)
        assert sorted(first + second) == list(range(1000))
        assert first == sorted(first)
        assert second == sorted(second)
        assert first
        assert second


async def test_waiting_consumers_are_served_first_come_first() -> None:
    async with attached() as (writer, (reader,)):
        consumers = [asyncio.ensure_future(reader.dequeue()) for _ in range(5)]
        await asyncio.sleep(0.01)
        for number in range(5):
            await writer.enqueue(number)
        assert await asyncio.gather(*consumers) == [0, 1, 2, 3, 4]


async def test_a_reader_that_never_waits_lets_other_tasks_run() -> None:
    async with attached(1, chunks=512) as (writer, (reader,)):
        for number in range(512):
            writer.enqueue_nowait(number)
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count_turns())
        for number in range(512):
            assert await reader.dequeue() == number
        counting.cancel()
        assert turns >= 512 // 64 - 1


async def test_stats_stay_readable_after_closing() -> None:
    async with attached(2) as (writer, readers):
        await writer.enqueue("x")
        assert writer.stats().backlog == 1
        assert writer.stats().readers == 2
        assert await readers[0].dequeue() == "x"
        assert readers[0].stats().messages == 1
        assert readers[1].stats().backlog == 1
    assert writer.stats().messages == 1
    assert readers[0].stats().messages == 1
    await writer.aclose()
    with pytest.raises(QueueClosed):
        await writer.enqueue(1)


class _Explosive:
    def __reduce__(self) -> tuple[object, tuple[int, int]]:
        return divmod, (1, 0)


async def test_who_is_missing_is_said() -> None:
    writer = MessageQueue(2, 2, max_chunk_bytes=4096)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    async with writer, reader:
        with pytest.raises(TimeoutError, match="the writer does not answer"):
            await reader.wait_until_ready(0.01)
        with pytest.raises(TimeoutError, match="not attached yet: rank 0, rank 1"):
            await writer.wait_until_ready(0)
        async with asyncio.timeout(10):
            while writer.stats().readers == 0 or "large" in reader._why_not_ready():  # type: ignore[attr-defined]
                await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError, match="other readers are missing"):
            await reader.wait_until_ready(0.01)
        with pytest.raises(TimeoutError, match="not attached yet: rank 1"):
            await writer.wait_until_ready(0.01)
        async with MessageQueue.create_from_handle(writer.export_handle(), 1) as second:
            await asyncio.gather(*(end.wait_until_ready(10) for end in (writer, reader, second)))
