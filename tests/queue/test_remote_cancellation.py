"""Cancelling at any await loses nothing and duplicates nothing, over the network either."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from remotes import ready_ends, wide_writer

from aioshm import MessageQueue

CANCELLATIONS = 2000


def _message(number: int) -> tuple[int, bytes]:
    return number, bytes([number % 251]) * (20_000 if number % 7 == 3 else number % 50)


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


async def test_random_cancellations_of_dequeue() -> None:
    rng = random.Random(1)
    async with ready_ends(0, 1, remote_window=5) as (writer, (reader,)):
        cancellations = sent = received = 0

        async def send(amount: int) -> None:
            nonlocal sent
            for _ in range(amount):
                await writer.enqueue(_message(sent))
                sent += 1

        while cancellations < CANCELLATIONS:
            sending = asyncio.ensure_future(send(rng.randrange(4))) if rng.random() < 0.5 else None
            if rng.random() < 0.5:
                result = await _cancelled_after(reader.dequeue(), rng.randrange(8))
                batch = [] if result is None else [result]
            else:
                batch = await _cancelled_after(reader.dequeue_many(3), rng.randrange(8)) or []  # type: ignore[assignment]
            if not batch:
                cancellations += 1
            for message in batch:
                assert message == _message(received)
                received += 1
            if sending is not None:
                while not sending.done():
                    with suppress(TimeoutError):
                        assert await reader.dequeue(0.01) == _message(received)
                        received += 1
        while received < sent:
            assert await reader.dequeue(10) == _message(received)
            received += 1
        assert reader.stats().backlog == 0


async def test_random_cancellations_of_enqueue() -> None:
    rng = random.Random(2)
    async with ready_ends(1, 2, remote_window=3) as (writer, readers):
        logs: list[list[int]] = [[] for _ in readers]
        waited = 0

        async def receive(reader: MessageQueue, log: list[int]) -> None:
            async for number, payload in reader:
                assert (number, payload) == _message(number)
                log.append(number)
                if random.random() < 0.3:
                    await asyncio.sleep(0)

        receiving = [asyncio.ensure_future(receive(r, log)) for r, log in zip(readers, logs, strict=True)]
        batches, certain = [], set()
        cancellations = number = 0
        while cancellations < CANCELLATIONS:
            batch = [number + index for index in range(rng.randrange(1, 4))]
            if len(batch) == 1:
                task = asyncio.ensure_future(writer.enqueue(_message(number)))
            else:
                task = asyncio.ensure_future(writer.enqueue_many(map(_message, batch)))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            waited += writer.stats().kept == 3
            task.cancel()
            try:
                await task
                certain.update(batch)
            except asyncio.CancelledError:
                cancellations += 1
            batches.append(batch)
            number += len(batch)
        await writer.enqueue(_message(number))
        certain.add(number)
        await writer.aclose()
        await asyncio.gather(*receiving)
        assert logs[0] == logs[1] == logs[2], "every reader got the same messages"
        assert logs[0] == sorted(set(logs[0])), "none came twice or out of order"
        assert certain <= set(logs[0]), "what was sent for certain arrived"
        arrived = set(logs[0])
        assert all(arrived.issuperset(batch) or arrived.isdisjoint(batch) for batch in batches), "all or none"
        assert waited > CANCELLATIONS // 10, "the window was full often enough"


async def test_cancelling_one_of_many_consumers_loses_nothing() -> None:
    rng = random.Random(3)
    async with ready_ends(0, 1, remote_window=8) as (writer, (reader,)):
        received: list[int] = []

        async def consume() -> None:
            while True:
                received.append((await reader.dequeue())[0])

        consumers = [asyncio.ensure_future(consume()) for _ in range(4)]
        for number in range(2000):
            await writer.enqueue(_message(number), 10)
            if rng.random() < 0.3:
                victim = rng.randrange(4)
                consumers[victim].cancel()
                consumers[victim] = asyncio.ensure_future(consume())
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        async with asyncio.timeout(10):
            while writer.stats().kept:
                await asyncio.sleep(0.001)
        for consumer in consumers:
            consumer.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
        assert received == list(range(2000))


async def test_cancelled_attaching_can_be_begun_again() -> None:
    writer = wide_writer(0, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    async with writer, reader:
        for turns in range(6):
            await _cancelled_after(writer.wait_until_ready(), turns)
            await _cancelled_after(reader.wait_until_ready(), turns)
        await asyncio.gather(writer.wait_until_ready(5), reader.wait_until_ready(5))
        await writer.enqueue(1)
        assert await reader.dequeue(5) == 1


async def test_aclose_finishes_even_when_cancelled() -> None:
    async with ready_ends(1, 1) as (writer, readers):
        await writer.enqueue(b"x" * 1_000_000)
        for end in (*readers, writer):
            closing = asyncio.ensure_future(end.aclose())
            await asyncio.sleep(0)
            closing.cancel()
            with suppress(asyncio.CancelledError):
                await closing
            assert repr(end).endswith("closed>")
            await end.aclose()
