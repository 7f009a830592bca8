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


async def test_damaged_table_in_a_segment() -> None:
    values = [1, 7, IN_SEGMENT, CHUNK, 1 << 40, (1 << 64) - 8, (1 << 64) - 1]
    async with attached(chunk=CHUNK, chunks=3) as (writer, (reader,)):
        await _warm(writer, reader, IN_SEGMENT)
        for word, value in itertools.product(range(3), values):
            await _lend(writer, 1, IN_SEGMENT)
            view = _segment(writer)
            (table,) = struct.unpack_from("<Q", view)
            struct.pack_into("<Q", view, 0 if word == 0 else table + 8 * (word - 1), value)
            with suppress(CodecError):
                async with reader.lease(5) as array:
                    assert array.nbytes <= 2 * CHUNK
            await _lend(writer, 2, IN_SEGMENT)
            async with reader.lease(5) as array:
                assert (array == 2).all()


def _segment(writer: MessageQueue) -> memoryview:
    """Return the memory of the latest message's overflow segment, which begins with the message."""
    ring = writer.end.ring
    (written,) = [each for each in ring.overflow.segments if each.seq == ring.ring.seq - 1]
    view: memoryview = written.segment.view
    return view


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
