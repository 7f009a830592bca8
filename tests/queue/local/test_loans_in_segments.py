"""Loans and leases in overflow segments: what only segments can do."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from pairs import attached

from aioshm import MessageQueue
from aioshm.errors import SharedMemoryError
from aioshm.ring.segment import Segment

CHUNK = 1 << 20
SIZE = 1_300_000
ROUNDS = 8


async def _lend(writer: MessageQueue, number: int, size: int = SIZE) -> None:
    async with writer.loan(size, "uint8") as array:
        array[:] = number


async def _see(reader: MessageQueue, number: int, size: int = SIZE) -> None:
    async with reader.lease(5) as array:
        assert len(array) == size
        assert (array == number).all()


async def _warm(writer: MessageQueue, reader: MessageQueue, size: int = SIZE) -> None:
    for number in range(ROUNDS):
        await _lend(writer, number, size)
        await _see(reader, number, size)


def _segments(writer: MessageQueue) -> list[Any]:
    segments: list[Any] = writer.end.ring.overflow.segments
    return segments


async def test_they_are_counted_and_not_copied() -> None:
    async with attached(chunk=CHUNK, chunks=3) as (writer, (reader,)):
        await _warm(writer, reader)
        before = writer.stats(), reader.stats()
        await _warm(writer, reader)
        for end, then in zip((writer, reader), before, strict=True):
            assert end.stats().overflows - then.overflows == ROUNDS
            assert end.stats().copied_bytes - then.copied_bytes < 200 * ROUNDS
            assert ROUNDS * SIZE < end.stats().bytes - then.bytes < ROUNDS * (SIZE + 512)


async def test_a_segment_that_becomes_free_during_a_block_is_not_taken_for_its_own() -> None:
    async with attached(chunk=CHUNK, chunks=3) as (writer, (reader,)):
        await _warm(writer, reader)
        for number in range(ROUNDS):
            await _lend(writer, 100 + number)
            async with writer.loan(SIZE, "uint8") as array:
                assert (await reader.dequeue(5) == 100 + number).all()
                array[:] = number
                held = array[7:]
            with suppress(ValueError):
                held[:] = 255
            assert (await reader.dequeue(5) == number).all()
            del held, array


async def test_blocks_that_send_nothing_keep_no_segment() -> None:
    async with attached(chunk=CHUNK, chunks=3) as (writer, (reader,)):
        await _warm(writer, reader)
        there = len(_segments(writer))

        async def raising(number: int) -> None:
            async with writer.loan(SIZE, "uint8") as array:
                array[:] = 99
                raise (ValueError("no") if number % 2 else asyncio.CancelledError)

        for number in range(ROUNDS):
            with pytest.raises(ValueError if number % 2 else asyncio.CancelledError):
                await raising(number)
        await writer.enqueue("between")
        assert await reader.dequeue(5) == "between"
        await _warm(writer, reader)
        assert len(_segments(writer)) == there


async def test_loan_without_a_segment_raises_when_its_block_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    async with attached(chunk=CHUNK, chunks=3) as (writer, (reader,)):
        await _warm(writer, reader)

        def refuse(*_: Any, **__: Any) -> Segment:
            raise SharedMemoryError(12, "no segment")

        with monkeypatch.context() as patch:
            patch.setattr(Segment, "create", refuse)
            await _lend(writer, 1)  # in the segment that there is
            with pytest.raises(SharedMemoryError, match="needs an overflow segment: no segment; or set"):
                async with writer.loan(SIZE, "uint8"):
                    pytest.fail("there is no memory")
        await _lend(writer, 2)
        for number in (1, 2):
            assert (await reader.dequeue(20) == number).all()
