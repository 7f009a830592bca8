"""Batches that are cancelled, come too late, are damaged, or meet an end that closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from pairs import attached
from slots import slot_of
from support import bystander

from aioshm import CodecError, CorruptSlot, QueueClosed
from aioshm.queue.state import YIELD_AFTER_MESSAGES
from aioshm.ring.layout import SLOT_HEADER_BYTES


async def test_a_batch_larger_than_the_ring_stops_after_whole_parts() -> None:
    async with attached(1, chunks=4) as (writer, (reader,)):
        with pytest.raises(TimeoutError, match="no slot became free: rank 0"):
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
