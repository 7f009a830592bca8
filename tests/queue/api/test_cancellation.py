"""Cancelling at any await loses nothing and duplicates nothing, wherever the readers are."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest
from pairs import EITHER_PLACE, attached
from remotes import ready_ends, wide_writer
from support import cancelled_after, examples, until

from aioshm import HandleError, MessageQueue

LARGE = 20_000
"""More than a chunk of the queues below, and than what goes over the network in one frame."""


def _message(number: int) -> tuple[int, bytes]:
    return number, bytes([number % 251]) * (LARGE if number % 7 == 3 else number % 50)


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize(("n_local", "n_remote", "cancellations"), [(1, 0, 2000), (0, 1, 500)])
async def test_random_cancellations_of_dequeue(n_local: int, n_remote: int, cancellations: int) -> None:
    rng = random.Random(1)
    async with ready_ends(n_local, n_remote, chunks=6, remote_window=6) as (writer, (reader,)):
        cancelled = sent = received = 0

        async def send(amount: int) -> None:
            nonlocal sent
            first = sent
            sent += amount
            if rng.random() < 0.5:
                await writer.enqueue_many(map(_message, range(first, sent)))
            else:
                for number in range(first, first + amount):
                    await writer.enqueue(_message(number))

        while cancelled < examples(cancellations):
            sending = asyncio.ensure_future(send(rng.randrange(7))) if rng.random() < 0.5 else None
            if rng.random() < 0.5:
                message = await cancelled_after(reader.dequeue(), rng.randrange(8))
                batch = [] if message is None else [message]
            else:
                batch = await cancelled_after(reader.dequeue_many(rng.randrange(1, 8)), rng.randrange(8)) or []
            if not batch:
                cancelled += 1
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


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize(("n_local", "n_remote", "cancellations"), [(2, 0, 1500), (1, 2, 500)])
async def test_random_cancellations_of_enqueue(n_local: int, n_remote: int, cancellations: int) -> None:
    rng = random.Random(2)
    async with ready_ends(n_local, n_remote, chunks=6, remote_window=6) as (writer, readers):
        logs: list[list[int]] = [[] for _ in readers]
        cancelled = number = waited = 0

        def full() -> bool:
            stats = writer.stats()
            return (stats.kept if n_remote else stats.backlog) == 6

        async def receive(reader: MessageQueue, log: list[int]) -> None:
            async for number, payload in reader:
                assert (number, payload) == _message(number)
                log.append(number)
                if random.random() < 0.3:
                    await asyncio.sleep(0)

        receiving = [asyncio.ensure_future(receive(r, log)) for r, log in zip(readers, logs, strict=True)]
        batches, certain = [], set()
        while cancelled < examples(cancellations):
            batch = [number + index for index in range(rng.randrange(1, 7))]
            if len(batch) == 1:
                task = asyncio.ensure_future(writer.enqueue(_message(number)))
            else:
                task = asyncio.ensure_future(writer.enqueue_many(map(_message, batch)))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            waited += full()
            task.cancel()
            try:
                await task
                certain.update(batch)
            except asyncio.CancelledError:
                cancelled += 1
            batches.append(batch)
            number += len(batch)
        await writer.enqueue(_message(number))
        certain.add(number)
        await writer.aclose()
        await asyncio.gather(*receiving)
        arrived = set(logs[0])
        assert all(log == logs[0] for log in logs), "every reader got the same messages"
        assert logs[0] == sorted(arrived), "none came twice or out of order"
        assert certain <= arrived, "what was sent for certain arrived"
        assert all(arrived.issuperset(batch) or arrived.isdisjoint(batch) for batch in batches), "all or none"
        assert waited > examples(cancellations) // 10, "the ring or the window was full often enough"


@pytest.mark.slow_on_uvloop
@EITHER_PLACE
async def test_cancelling_one_of_many_consumers_loses_nothing(n_local: int, n_remote: int) -> None:
    rng = random.Random(3)
    async with ready_ends(n_local, n_remote, chunks=8, remote_window=8) as (writer, (reader,)):
        received: list[int] = []

        async def consume() -> None:
            while True:
                received.append((await reader.dequeue())[0])

        consumers = [asyncio.ensure_future(consume()) for _ in range(4)]
        for number in range(300):
            await writer.enqueue(_message(number), 10)
            if rng.random() < 0.3:
                victim = rng.randrange(4)
                consumers[victim].cancel()
                consumers[victim] = asyncio.ensure_future(consume())
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        await until(lambda: not writer.stats().backlog, "the end of every message's way")
        for consumer in consumers:
            consumer.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
        assert received == list(range(300))


async def test_cancelled_raw_access_gives_its_turn_back() -> None:
    async with attached(1, chunks=1, codec="raw") as (writer, (reader,)):
        await writer.enqueue(b"1")

        async def hold_write() -> None:
            async with writer.acquire_write():
                pytest.fail("no slot was free")

        assert await cancelled_after(hold_write(), 5) is None

        async def hold_read() -> None:
            async with reader.acquire_read():
                await asyncio.Event().wait()

        assert await cancelled_after(hold_read(), 5) is None  # reading had begun: the slot is released
        await writer.enqueue(b"2", 5)
        assert await reader.dequeue(5) == b"2"


@EITHER_PLACE
async def test_cancelled_attaching_can_be_begun_again(n_local: int, n_remote: int) -> None:
    writer = wide_writer(n_local, n_remote)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    async with writer, reader:
        for turns in range(6):
            await cancelled_after(writer.wait_until_ready(), turns)
            await cancelled_after(reader.wait_until_ready(), turns)
        with suppress(TimeoutError):
            await reader.wait_until_ready(0)
        await asyncio.gather(writer.wait_until_ready(5), reader.wait_until_ready(5))
        await writer.enqueue(1)
        assert await reader.dequeue(5) == 1


async def test_reader_whose_attaching_another_has_cancelled_raises_at_each_call() -> None:
    before = asyncio.all_tasks()
    async with wide_writer(1, 0) as writer, MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
        for task in asyncio.all_tasks() - before:
            task.cancel()
        for _ in range(2):
            with pytest.raises(HandleError, match="attaching was cancelled"):
                await reader.wait_until_ready(20)


@pytest.mark.parametrize(("n_local", "n_remote"), [(1, 0), (1, 1)])
@pytest.mark.parametrize("unread", [False, True])
async def test_aclose_finishes_even_when_cancelled(n_local: int, n_remote: int, unread: bool) -> None:
    async with ready_ends(n_local, n_remote) as (writer, readers):
        await writer.enqueue(b"x" * 1_000_000)
        if not unread:
            for reader in readers:
                assert await reader.dequeue(5) == b"x" * 1_000_000
        for end in (*readers, writer):
            closing = asyncio.ensure_future(end.aclose())
            await asyncio.sleep(0)
            closing.cancel()
            with suppress(asyncio.CancelledError):
                await closing
            assert repr(end).endswith("closed>")
            await end.aclose()
