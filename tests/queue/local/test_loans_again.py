"""Loans and leases in chunks, and in overflow segments, that were loaned and leased before."""

from __future__ import annotations

import itertools
import struct
from contextlib import suppress

import numpy as np
import pytest
from pairs import attached
from support import until

from aioshm import CodecError, MessageQueue, PeerDied, QueueClosed
from aioshm.ring.layout import CHUNK_HEADER_BYTES, chunk_at

pytestmark = pytest.mark.slow_on_uvloop

CHUNK = 1 << 20
IN_CHUNK = 600_000
IN_SEGMENT = 1_300_000
SIZES = pytest.mark.parametrize("size", [IN_CHUNK, IN_SEGMENT], ids=["chunk", "segment"])
ROUNDS = 8
"""Several laps of a pool of 3 chunks."""


async def _lend(writer: MessageQueue, number: int, size: int) -> None:
    async with writer.loan(size, "uint8") as array:
        array[:] = number


async def _warm(writer: MessageQueue, reader: MessageQueue, size: int) -> None:
    """Loan and lease every chunk."""
    for number in range(ROUNDS):
        await _lend(writer, number, size)
        async with reader.lease(5) as array:
            assert (array == number).all()


@SIZES
async def test_an_array_that_was_changed_in_place_is_sent_as_it_is(size: int) -> None:
    async with attached(chunk=CHUNK, chunks=3) as (writer, (reader,)):
        await _warm(writer, reader, size)
        async with writer.loan(size, "uint8") as array:
            array[:] = 1
            array.shape = (size // 2, 2)
        async with reader.lease(5) as leased:
            assert leased.shape == (size // 2, 2)
        async with writer.loan(size, "uint8") as array:
            array[:] = 1
            array.dtype = "uint16"
        async with reader.lease(5) as leased:
            assert leased.dtype == np.uint16
            assert (leased == 257).all()


@SIZES
async def test_the_reader_goes_during_a_block(size: int) -> None:
    async with attached(chunk=CHUNK, chunks=3) as (writer, (reader,)):
        await _warm(writer, reader, size)
        with pytest.raises((PeerDied, QueueClosed)):
            async with writer.loan(size, "uint8") as array:
                await reader.aclose()
                await until(lambda: writer.end.state.refusal is not None)
                array[:] = 2


@SIZES
async def test_a_damaged_table(size: int) -> None:
    values = [1, 7, size, CHUNK, 1 << 40, (1 << 64) - 8, (1 << 64) - 1]
    async with attached(chunk=CHUNK, chunks=3) as (writer, (reader,)):
        await _warm(writer, reader, size)
        for word, value in itertools.product(range(3), values):
            await _lend(writer, 1, size)
            view, start = _chunk(writer) if size == IN_CHUNK else _segment(writer)
            (table,) = struct.unpack_from("<Q", view, start)
            struct.pack_into("<Q", view, start if word == 0 else start + table + 8 * (word - 1), value)
            with suppress(CodecError):
                async with reader.lease(5) as array:
                    assert array.nbytes <= 2 * CHUNK
            await _lend(writer, 2, size)
            async with reader.lease(5) as array:
                assert (array == 2).all()


def _chunk(writer: MessageQueue) -> tuple[memoryview, int]:
    """Return the ring's memory, and the offset of the latest message's chunk."""
    ring = writer.end.ring.ring
    chunk = ring.slots.chunk(ring.slots.begin((ring.seq - 1) % len(ring.slots)))
    return ring.slots.view, chunk_at(ring.layout.pools, chunk)[0] + CHUNK_HEADER_BYTES


def _segment(writer: MessageQueue) -> tuple[memoryview, int]:
    """Return the memory of the latest message's overflow segment, which begins with the message."""
    ring = writer.end.ring
    (written,) = [each for each in ring.overflow.segments if each.seq == ring.ring.seq - 1]
    return written.segment.view, 0


async def test_segments_are_counted_and_not_copied() -> None:
    async with attached(chunk=CHUNK, chunks=3) as (writer, (reader,)):
        await _warm(writer, reader, IN_SEGMENT)
        for stats in (writer.stats(), reader.stats()):
            assert stats.overflows == ROUNDS
            assert stats.copied_bytes < 200 * ROUNDS
            assert ROUNDS * IN_SEGMENT < stats.bytes < ROUNDS * (IN_SEGMENT + 512)


async def test_a_segment_that_becomes_free_during_a_block_is_not_taken_for_its_own() -> None:
    async with attached(chunk=CHUNK, chunks=3) as (writer, (reader,)):
        await _warm(writer, reader, IN_SEGMENT)
        for number in range(ROUNDS):
            await _lend(writer, 100 + number, IN_SEGMENT)
            async with writer.loan(IN_SEGMENT, "uint8") as array:
                assert (await reader.dequeue(5) == 100 + number).all()
                array[:] = number
                held = array[7:]
            with suppress(ValueError):
                held[:] = 255
            assert (await reader.dequeue(5) == number).all()
            del held, array
