"""Cancelling at any await loses nothing and duplicates nothing."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest
from pairs import attached

from aioshm import MessageQueue

OVERFLOW = 6000
"""More than a chunk of the queues below."""


def _message(number: int) -> tuple[int, bytes]:
    return number, bytes([number % 251]) * (OVERFLOW if number % 7 == 3 else number % 50)


async def _cancelled_after(coroutine: object, turns: int) -> object:
    """Run a call, cancelling it after so many turns of the loop; return its result or None."""
    task = asyncio.ensure_future(coroutine)  # type: ignore[arg-type]
    for _ in range(turns):
        if task.done():
            break
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        return await task
    return None


async def test_10_000_random_cancellations_of_dequeue() -> None:
    rng = random.Random(1)
    async with attached(1, chunks=4) as (writer, (reader,)):
        cancellations = sent = received = 0

        async def send(amount: int) -> None:
            nonlocal sent
            for _ in range(amount):
                await writer.enqueue(_message(sent))
                sent += 1

        while cancellations < 10_000:
            sending = asyncio.ensure_future(send(rng.randrange(4))) if rng.random() < 0.5 else None
            result = await _cancelled_after(reader.dequeue(), rng.randrange(8))
            if result is None:
                cancellations += 1
            else:
                assert result == _message(received)
                received += 1
            if sending is not None:
                while not sending.done():
                    assert await reader.dequeue(10) == _message(received)
                    received += 1
        while received < sent:
            assert await reader.dequeue(10) == _message(received)
            received += 1


async def test_10_000_random_cancellations_of_enqueue() -> None:
    rng = random.Random(2)
    async with attached(2, chunks=3) as (writer, readers):
        logs: list[list[int]] = [[], []]

        async def receive(reader: MessageQueue, log: list[int]) -> None:
            async for number, payload in reader:
                assert (number, payload) == _message(number)
                log.append(number)
                if random.random() < 0.3:
                    await asyncio.sleep(0)

        receiving = [asyncio.ensure_future(receive(r, log)) for r, log in zip(readers, logs, strict=True)]
        certain = set()
        cancellations = number = 0
        while cancellations < 10_000:
            task = asyncio.ensure_future(writer.enqueue(_message(number)))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
            try:
                await task
                certain.add(number)
            except asyncio.CancelledError:
                cancellations += 1
            number += 1
        await writer.enqueue(_message(number))
        certain.add(number)
        await writer.aclose()
        await asyncio.gather(*receiving)
        assert logs[0] == logs[1], "every reader got the same messages"
        assert logs[0] == sorted(set(logs[0])), "none came twice or out of order"
        assert certain <= set(logs[0]), "what was sent for certain arrived"


async def test_cancelling_one_of_many_consumers_loses_nothing() -> None:
    rng = random.Random(3)
    async with attached(1, chunks=8) as (writer, (reader,)):
        received: list[int] = []

        async def consume() -> None:
            while True:
                received.append((await reader.dequeue())[0])

        consumers = [asyncio.ensure_future(consume()) for _ in range(4)]
        for number in range(3000):
            await writer.enqueue(_message(number), 10)
            if rng.random() < 0.3:
                victim = rng.randrange(4)
                consumers[victim].cancel()
                consumers[victim] = asyncio.ensure_future(consume())
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        while reader.stats().backlog:
            await asyncio.sleep(0.001)
        for consumer in consumers:
            consumer.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
        assert received == list(range(3000))


async def test_cancelled_raw_access_gives_its_turn_back() -> None:
    async with attached(1, chunks=1, codec="raw") as (writer, (reader,)):
        await writer.enqueue(b"1")

        async def hold_write() -> None:
            async with writer.acquire_write():
                pytest.fail("no slot was free")

        assert await _cancelled_after(hold_write(), 5) is None

        async def hold_read() -> None:
            async with reader.acquire_read():
                await asyncio.Event().wait()

        assert await _cancelled_after(hold_read(), 5) is None  # reading had begun: the slot is released
        await writer.enqueue(b"2", 5)
        assert await reader.dequeue(5) == b"2"


async def test_cancelled_wait_until_ready_can_be_called_again() -> None:
    writer = MessageQueue(1, 1, max_chunk_bytes=4096)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    async with writer, reader:
        for turns in range(6):
            await _cancelled_after(writer.wait_until_ready(), turns)
            await _cancelled_after(reader.wait_until_ready(), turns)
        with suppress(TimeoutError):
            await reader.wait_until_ready(0)
        await asyncio.gather(writer.wait_until_ready(5), reader.wait_until_ready(5))
        await writer.enqueue(1)
        assert await reader.dequeue(5) == 1


async def test_aclose_finishes_even_when_cancelled() -> None:
    async with attached(1) as (writer, (reader,)):
        waiting = asyncio.ensure_future(reader.dequeue())
        await asyncio.sleep(0)
        await writer.enqueue(b"x" * 1_000_000)
        assert await waiting == b"x" * 1_000_000
        for end in (reader, writer):
            closing = asyncio.ensure_future(end.aclose())
            await asyncio.sleep(0)
            closing.cancel()
            with suppress(asyncio.CancelledError):
                await closing
            assert repr(end).endswith("closed>")
