"""Loans and leases in chunks, and in segments, that were loaned and leased before."""

from __future__ import annotations

import itertools
import struct
import sys
from contextlib import suppress

import numpy as np
import pytest
from pairs import attached
from support import until

from aioshm import CodecError, MessageQueue, PeerDied, QueueClosed
from aioshm.ring.layout import CHUNK_HEADER_BYTES, chunk_at

CHUNK = 1 << 20
SIZE = 600_000
"""Of what is lent: it fits a chunk, or lies in an overflow segment; see `where`."""

SIZES = {"chunk": 600_000, "segment": 1_300_000}
ROUNDS = 12
"""Several laps of a pool of 3 chunks."""


@pytest.fixture(params=SIZES, autouse=True)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys.modules[__name__], "SIZE", SIZES[request.param])
    return str(request.param)


async def _lend(writer: MessageQueue, number: int) -> None:
    async with writer.loan(SIZE, "uint8") as array:
        array[:] = number


async def _warm(writer: MessageQueue, reader: MessageQueue) -> None:
    """Have loaned and leased every chunk before."""
    for number in range(ROUNDS):
        await _lend(writer, number)
        async with reader.lease(5) as array:
            assert (array == number).all()


async def test_an_array_that_was_changed_in_place_is_sent_as_it_is() -> None:
    async with attached(chunk=CHUNK, chunks=3) as (writer, (reader,)):
        await _warm(writer, reader)
        for _ in range(2):
            async with writer.loan(SIZE, "uint8") as array:
                array[:] = 1
                array.shape = (SIZE // 2, 2)
            async with reader.lease(5) as leased:
                assert leased.shape == (SIZE // 2, 2)
            async with writer.loan(SIZE, "uint8") as array:
                array[:] = 1
                array.dtype = "uint16"
            async with reader.lease(5) as leased:
                assert leased.dtype == np.uint16
                assert (leased == 257).all()


async def test_the_reader_goes_during_a_block() -> None:
    async with attached(chunk=CHUNK, chunks=3) as (writer, (reader,)):
        await _warm(writer, reader)
        with pytest.raises((PeerDied, QueueClosed)):
            async with writer.loan(SIZE, "uint8") as array:
                await reader.aclose()
                await until(lambda: writer.end.state.refusal is not None)
                array[:] = 2


async def test_a_damaged_table(where: str) -> None:
    values = [1, 7, SIZE, CHUNK, 1 << 40, (1 << 64) - 8, (1 << 64) - 1]
    async with attached(chunk=CHUNK, chunks=3) as (writer, (reader,)):
        await _warm(writer, reader)
        for word, value in itertools.product(range(3), values):
            await _lend(writer, 1)
            view, start = _body(writer) if where == "chunk" else _segment(writer)
            (table,) = struct.unpack_from("<Q", view, start)
            struct.pack_into("<Q", view, start if word == 0 else start + table + 8 * (word - 1), value)
            with suppress(CodecError):
                async with reader.lease(5) as array:
                    assert array.nbytes <= 2 * CHUNK
            await _lend(writer, 2)
            async with reader.lease(5) as array:
                assert (array == 2).all()


def _body(writer: MessageQueue) -> tuple[memoryview, int]:
    """Return the ring's memory, and where the chunk's begins that has the latest message."""
    ring = writer.end.ring.ring
    chunk = ring.slots.chunk(ring.slots.begin((ring.seq - 1) % len(ring.slots)))
    return ring.slots.view, chunk_at(ring.layout.pools, chunk)[0] + CHUNK_HEADER_BYTES


def _segment(writer: MessageQueue) -> tuple[memoryview, int]:
    """The same for an overflow segment."""
    ring = writer.end.ring
    (written,) = [each for each in ring.overflow.segments if each.seq == ring.ring.seq - 1]
    return written.segment.view, 0
