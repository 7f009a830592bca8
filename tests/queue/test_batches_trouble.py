"""Batches that are cancelled, come too late, are damaged, or meet an end that closes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from pairs import attached
from slots import slot_of
from support import bystander, cancelled_after, examples

from aioshm import CodecError, CorruptSlot, MessageQueue, QueueCancelled, QueueClosed, RoleError
from aioshm.queue.state import YIELD_AFTER_MESSAGES
from aioshm.ring.layout import SLOT_HEADER_BYTES

OVERFLOW = 6000


def _message(batch: int, part: int, size: int) -> tuple[int, int, int, bytes]:
    return batch, part, size, bytes([batch % 251]) * (OVERFLOW if batch % 19 == 3 and part == 1 else batch % 30)


@pytest.mark.slow_on_uvloop
async def test_random_cancellations_of_enqueue_many() -> None:
    rng = random.Random(1)
    async with attached(2, chunks=6) as (writer, readers):
        logs: list[list[tuple[int, int, int]]] = [[], []]

        async def receive(reader: MessageQueue, log: list[tuple[int, int, int]], seed: int) -> None:
            rng = random.Random(seed)
            with suppress(QueueClosed):
                while True:
                    for batch, part, size, payload in await reader.dequeue_many(rng.randrange(1, 8)):
                        assert (batch, part, size, payload) == _message(batch, part, size)
                        log.append((batch, part, size))
                    if rng.random() < 0.3:
                        await asyncio.sleep(0)

        receiving = [
            asyncio.ensure_future(receive(reader, log, seed))
            for seed, (reader, log) in enumerate(zip(readers, logs, strict=True))
        ]
        certain = []
        cancellations = number = 0
        while cancellations < examples(10_000):
            size = rng.randrange(1, 7)
            task = asyncio.ensure_future(writer.enqueue_many([_message(number, part, size) for part in range(size)]))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
            try:
                await task
                certain.append(number)
            except asyncio.CancelledError:
                cancellations += 1
            number += 1
        await writer.aclose()
        await asyncio.gather(*receiving)
        assert logs[0] == logs[1], "every reader got the same messages"
        log, batches = logs[0], []
        while log:
            batch, _, size = log[0]
            assert log[:size] == [(batch, part, size) for part in range(size)], "a part of a batch came"
            batches.append(batch)
            del log[:size]
        assert batches == sorted(set(batches)), "none came twice or out of order"
        assert set(certain) <= set(batches), "what was sent for certain arrived"
        assert len(batches) - len(certain) < cancellations, "some were cancelled in time"


@pytest.mark.slow_on_uvloop
async def test_random_cancellations_of_dequeue_many() -> None:
    rng = random.Random(2)
    async with attached(1, chunks=6) as (writer, (reader,)):
        cancellations = sent = 0
        received: list[Any] = []

        while cancellations < examples(10_000):
            sending = None
            if rng.random() < 0.5:
                batch = [_message(number, 1, 1) for number in range(sent, sent + rng.randrange(1, 7))]
                sent += len(batch)
                sending = asyncio.ensure_future(writer.enqueue_many(batch))
            batch = await cancelled_after(reader.dequeue_many(rng.randrange(1, 8)), rng.randrange(8)) or []
            cancellations += not batch
            received += batch
            if sending is not None:
                while not sending.done() and len(received) < sent:
                    received += await reader.dequeue_many(3, 10)
                await sending
        while len(received) < sent:
            received += await reader.dequeue_many(100, 10)
        assert received == [_message(number, 1, 1) for number in range(sent)]


async def test_a_batch_larger_than_the_ring_stops_after_whole_parts() -> None:
    async with attached(1, chunks=4) as (writer, (reader,)):
        with pytest.raises(TimeoutError, match="4 slots did not become free: rank 0"):
            await writer.enqueue_many(range(10), 0.02)
        assert writer.stats().messages == 4
        task = asyncio.ensure_future(writer.enqueue_many(range(4, 14)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert await reader.dequeue_many(99, 5) == [0, 1, 2, 3]
        while writer.stats().messages < 8:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await reader.dequeue_many(99, 5) == [4, 5, 6, 7]
        assert writer.stats().messages == 8


async def test_ways_out_of_waiting_for_a_batch() -> None:
    async with attached() as (writer, (reader,)):
        with pytest.raises(TimeoutError, match="message 0 did not come"):
            await reader.dequeue_many(3, 0.02)
        with pytest.raises(TimeoutError):
            await reader.dequeue_many(3, 0)
        cancel = asyncio.Event()
        waiting = asyncio.ensure_future(reader.dequeue_many(3, cancel=cancel))
        await asyncio.sleep(0)
        cancel.set()
        with pytest.raises(QueueCancelled):
            await waiting
        await writer.enqueue_many(["there", "too"])
        assert await reader.dequeue_many(3, 0, cancel) == ["there", "too"]


@pytest.mark.parametrize(
    ("most", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), ("x", TypeError), (1.5, TypeError)]
)
async def test_bad_limits_are_named(most: Any, error: type[Exception]) -> None:
    async with attached() as (writer, (reader,)):
        with pytest.raises(ValueError, match="timeout"):
            await reader.dequeue_many(1, -1)
        await writer.enqueue("kept")
        with pytest.raises(error, match=r"max_items must be .* not"):
            await reader.dequeue_many(most)
        with pytest.raises(TypeError, match="timeout"):
            await writer.enqueue_many([1], "1")  # type: ignore[arg-type]
        assert await reader.dequeue_many(2**70, 5) == ["kept"]


def _break_header(slot: memoryview) -> None:
    slot[8] ^= 0xFF  # the sequence number


def _break_body(slot: memoryview) -> None:
    slot[SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + 12] = b"\xff" * 12


@pytest.mark.parametrize("place", [0, 1, 2, 3])
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
        with pytest.raises(TimeoutError):
            await reader.dequeue_many(9, 0)
        await writer.enqueue("goes on")
        assert await reader.dequeue_many(9, 5) == ["goes on"]


async def test_a_batch_is_drained_before_the_writers_close_is_told() -> None:
    async with attached(1, chunks=8) as (writer, (reader,)):
        await writer.enqueue_many([1, b"L" * 100_000, 3])
        await writer.aclose()
        received: list[Any] = []
        with pytest.raises(QueueClosed):
            while True:
                received += await reader.dequeue_many(9, 5)
        assert received == [1, b"L" * 100_000, 3]
        with pytest.raises(QueueClosed):
            await writer.enqueue_many([1])


async def test_closing_ends_the_waiting_calls() -> None:
    async with attached(chunks=2) as (writer, (reader,)):
        waiting = asyncio.ensure_future(reader.dequeue_many(5))
        await asyncio.sleep(0)
        await reader.aclose()
        with pytest.raises(QueueClosed):
            await waiting
    async with attached(chunks=2) as (writer, (reader,)):
        await writer.enqueue(0)
        sending = asyncio.ensure_future(writer.enqueue_many([1, 2]))
        await asyncio.sleep(0)
        await writer.aclose()
        with pytest.raises(QueueClosed):
            await sending
        assert [obj async for obj in reader] == [0]
    async with attached(chunks=2) as (writer, (reader,)):
        await writer.enqueue(0)
        sending = asyncio.ensure_future(writer.enqueue_many([1, 2]))
        await asyncio.sleep(0)
        await reader.aclose()
        with pytest.raises(QueueClosed, match="every reader has left"):
            await sending


async def test_wrong_ends_threads_and_loops() -> None:
    async with attached() as (writer, (reader,)):
        with pytest.raises(RoleError, match=r"enqueue_many\(\) belongs to the queue's writer"):
            await reader.enqueue_many([1])
        with pytest.raises(RoleError, match=r"dequeue_many\(\) belongs to the queue's reader"):
            await writer.dequeue_many(1)
        await writer.enqueue("kept")

        async def elsewhere() -> list[str]:
            errors = []
            for call in (reader.dequeue_many(1), writer.enqueue_many([1])):
                with pytest.raises(RoleError, match="belongs to another thread") as caught:
                    await call
                errors.append(str(caught.value))
            return errors

        assert len(await asyncio.to_thread(asyncio.run, elsewhere())) == 2
        assert await reader.dequeue_many(5, 5) == ["kept"]


async def test_sending_a_batch_implies_waiting_until_ready() -> None:
    writer = MessageQueue(1, 1, max_chunk_bytes=4096)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    async with writer, reader:
        _, received = await asyncio.gather(writer.enqueue_many(["a", "b"], 5), reader.dequeue_many(5, 5))
        assert received == ["a", "b"]


async def test_a_stream_of_batches_starves_no_other_task() -> None:
    async with attached(1, chunks=512) as (writer, (reader,)):
        async with bystander() as other:
            for number in range(512):
                await writer.enqueue_many([number])
            assert other.turns >= 512 // YIELD_AFTER_MESSAGES - 1
            other.turns = 0
            received: list[int] = []
            while len(received) < 512:
                received += await reader.dequeue_many(64)
            assert other.turns >= 512 // YIELD_AFTER_MESSAGES - 1
        assert received == list(range(512))


async def test_one_wake_up_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with attached(2, chunks=8, wait="park") as (writer, readers):
        rung: list[Any] = []
        peers = type(writer.end.registry.slots[0].reader)
        ring = peers.ring
        monkeypatch.setattr(peers, "ring", lambda peer: (rung.append(peer), ring(peer)))
        for round_ in range(20):
            waiting = [asyncio.ensure_future(reader.dequeue_many(8)) for reader in readers]
            before = [reader.stats().parks for reader in readers]
            while any(r.stats().parks == parks for r, parks in zip(readers, before, strict=True)):
                await asyncio.sleep(0)
            rung.clear()
            await writer.enqueue_many([(round_, part) for part in range(8)])
            assert await asyncio.gather(*waiting) == [[(round_, part) for part in range(8)]] * 2
            assert len(rung) == 2, "each parked reader's bell rang once"
            assert [reader.stats().parks for reader in readers] == [parks + 1 for parks in before]


async def test_a_waiting_batch_is_woken_when_its_last_slot_is_free() -> None:
    async with attached(1, chunks=8, wait="park") as (writer, (reader,)):
        for wanted in range(1, 9):
            await writer.enqueue_many(range(8))
            parks = writer.stats().parks
            sending = asyncio.ensure_future(writer.enqueue_many(["x"] * wanted))
            while writer.stats().parks == parks:
                await asyncio.sleep(0)
            assert await reader.dequeue_many(wanted, 5) == list(range(wanted))
            await asyncio.wait_for(sending, 5)
            assert writer.stats().parks == parks + 1
            assert await reader.dequeue_many(8, 5) == [*range(wanted, 8), *["x"] * wanted][:8]
            assert reader.stats().backlog == 0
