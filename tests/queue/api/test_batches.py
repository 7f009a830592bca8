"""Batches: in order, all or nothing, one wake-up each; cancelled, late, damaged, and at an end that closes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from loops import turns
from pairs import attached
from slots import slot_of
from support import cancelled

from aioshm import CodecError, CorruptSlot, MessageQueue, QueueClosed
from aioshm.ring.layout import SLOT_HEADER_BYTES


async def _drain(reader: MessageQueue, count: int, most: int = 100) -> list[Any]:
    received: list[Any] = []
    while len(received) < count:
        batch = await reader.dequeue_many(most, 10)
        assert 1 <= len(batch) <= most
        received += batch
    return received


async def test_batches_and_single_messages_mix() -> None:
    rng = random.Random(1)
    async with attached(2, chunks=6) as (writer, readers):
        total = 800

        async def send() -> None:
            number = 0
            while number < total:
                amount = min(rng.choice([1, 1, 2, 5, 6, 13]), total - number)
                if amount == 1 and rng.random() < 0.2:
                    async with writer.acquire_write(10) as chunk:
                        chunk[:8] = number.to_bytes(8, "little")
                elif amount == 1:
                    await writer.enqueue(number, 10)
                else:
                    await writer.enqueue_many(iter(range(number, number + amount)), 10)
                number += amount

        async def receive(reader: MessageQueue, seed: int) -> None:
            rng = random.Random(seed)
            received: list[Any] = []
            while len(received) < total:
                if rng.random() < 0.5:
                    received.append(await reader.dequeue(10))
                elif rng.random() < 0.2:
                    async with reader.lease(10) as obj:
                        received.append(bytes(obj) if isinstance(obj, memoryview) else obj)
                else:
                    received += await reader.dequeue_many(rng.randrange(1, 9), 10)
            whole = [x if isinstance(x, int) else int.from_bytes(x[:8], "little") for x in received]
            assert whole == list(range(total))

        await asyncio.gather(send(), *(receive(reader, seed) for seed, reader in enumerate(readers)))


async def test_batches_of_several_tasks_stay_together() -> None:
    async with attached(1, chunks=8) as (writer, (reader,)):

        async def send(task: int) -> None:
            for number in range(25):
                await writer.enqueue_many([(task, number, part) for part in range(1 + (task + number) % 8)], 10)

        sending = [asyncio.ensure_future(send(task)) for task in range(5)]
        count = sum(1 + (task + number) % 8 for task in range(5) for number in range(25))
        received = await _drain(reader, count)
        await asyncio.gather(*sending)
        expected = dict.fromkeys(range(5), 0)
        while received:
            task, number, _ = received[0]
            size = 1 + (task + number) % 8
            assert received[:size] == [(task, expected[task], part) for part in range(size)], "a batch was torn apart"
            expected[task] += 1
            del received[:size]


@pytest.mark.parametrize("bad", [0, 1, 3])
async def test_what_cannot_be_encoded_keeps_the_whole_batch_back(bad: int) -> None:
    async with attached(1, chunks=8) as (writer, (reader,)):
        batch: list[Any] = ["x", b"L" * 9000, np.zeros(2000), "y"]
        batch[bad] = lambda: None
        with pytest.raises(CodecError, match="function"):
            await writer.enqueue_many(batch)
        assert writer.stats().messages == 0
        await writer.enqueue_many(["fine"])
        assert await reader.dequeue_many(9, 5) == ["fine"]


async def test_batch_that_is_empty_or_whose_iterable_fails_sends_nothing() -> None:
    def broken() -> Any:
        yield 1
        raise ZeroDivisionError

    async with attached() as (writer, (reader,)):
        with pytest.raises(ZeroDivisionError):
            await writer.enqueue_many(broken())
        with pytest.raises(TypeError):
            await writer.enqueue_many(5)  # type: ignore[arg-type]
        await writer.enqueue_many([])
        for number in range(4):
            writer.enqueue_nowait(number)
        await writer.enqueue_many(iter(()), 0)  # although the ring is full
        assert writer.stats().messages == 4
        assert await reader.dequeue_many(9, 5) == [0, 1, 2, 3]


async def test_a_batch_larger_than_the_ring_stops_after_whole_parts() -> None:
    async with attached(1, chunks=4) as (writer, (reader,)):
        with pytest.raises(TimeoutError, match="no slot became free: rank 0"):
            await writer.enqueue_many(range(10), 0.02)
        assert writer.stats().messages == 4
        task = asyncio.ensure_future(writer.enqueue_many(range(4, 14)))
        await turns(20)
        assert await reader.dequeue_many(99, 5) == [0, 1, 2, 3]
        while writer.stats().messages < 8:
            await asyncio.sleep(0)
        await cancelled(task)
        assert await reader.dequeue_many(99, 5) == [4, 5, 6, 7]
        assert writer.stats().messages == 8


def _break_header(slot: memoryview) -> None:
    slot[8] ^= 0xFF  # the sequence number


def _break_body(slot: memoryview) -> None:
    slot[SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + 12] = b"\xff" * 12


@pytest.mark.parametrize("place", [0, 2, 3])
@pytest.mark.parametrize(("damage", "error"), [(_break_header, CorruptSlot), (_break_body, CodecError)])
async def test_a_damaged_message_is_reported_once_and_its_neighbours_survive(
    damage: Callable[[memoryview], None], error: type[Exception], place: int
) -> None:
    async with attached() as (writer, (reader,)):
        await writer.enqueue_many([0, 1, 2, 3])
        damage(slot_of(writer, place))
        received: list[int] = []
        errors = 0
        while len(received) + errors < 4:
            try:
                received += await reader.dequeue_many(9, 5)
            except error:
                errors += 1
                assert received == list(range(place))
        assert received == [number for number in range(4) if number != place]
        assert errors == 1
        await writer.enqueue("goes on")
        assert await reader.dequeue_many(9, 5) == ["goes on"]


async def test_reader_that_closes_ends_a_batch_that_waits_for_messages() -> None:
    async with attached(chunks=2) as (_, (reader,)):
        waiting = asyncio.ensure_future(reader.dequeue_many(5))
        await asyncio.sleep(0)
        await reader.aclose()
        with pytest.raises(QueueClosed):
            await waiting


@pytest.mark.parametrize(("closes", "reason"), [("writer", "this end was closed"), ("reader", "every reader has left")])
async def test_end_that_closes_ends_a_batch_that_waits_for_room(closes: str, reason: str) -> None:
    async with attached(chunks=2) as (writer, (reader,)):
        await writer.enqueue(0)
        sending = asyncio.ensure_future(writer.enqueue_many([1, 2]))
        await asyncio.sleep(0)
        await (writer if closes == "writer" else reader).aclose()
        with pytest.raises(QueueClosed, match=reason):
            await sending
        if closes == "writer":
            assert [obj async for obj in reader] == [0]


async def test_one_wake_up_for_a_batch() -> None:
    async with attached(2, chunks=8, wait="park") as (writer, readers):
        for round_ in range(5):
            waiting = [asyncio.ensure_future(reader.dequeue_many(8)) for reader in readers]
            before = [reader.stats().parks for reader in readers]
            while any(r.stats().parks == parks for r, parks in zip(readers, before, strict=True)):
                await asyncio.sleep(0)
            await writer.enqueue_many([(round_, part) for part in range(8)])
            assert await asyncio.gather(*waiting) == [[(round_, part) for part in range(8)]] * 2
            assert [reader.stats().parks for reader in readers] == [parks + 1 for parks in before]
