"""Real traffic between real processes."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crowd import Crowd
from pairs import attached

from aioshm import Handle, MessageQueue
from aioshm.ring.segment import orphans

READERS = 4


def _arrays(messages: int, seed: int) -> Any:
    """Yield the same random arrays in every process: about 40 kB each."""
    rng = np.random.default_rng(seed)
    pool = rng.integers(0, 256, 300_000, dtype=np.uint8)
    for number in range(messages):
        size = int(rng.integers(0, 80_000)) if number % 500 else 200_000
        offset = int(rng.integers(0, len(pool) - size))
        yield number, pool[offset : offset + size]


async def _read_all(handle: Handle, rank: int, messages: int) -> int:
    rng = random.Random(rank)
    verified = 0
    async with MessageQueue.create_from_handle(handle, rank) as reader:
        for number, expected in _arrays(messages, seed=7):
            received, array = await reader.dequeue(60)
            assert received == number
            assert np.array_equal(array, expected)
            verified += 1
            if rng.random() < 0.01:
                await asyncio.sleep(rng.random() * 0.005)
    return verified


def _reader_process(handle: Handle, rank: int, result: Connection, messages: int) -> None:
    result.send(asyncio.run(_read_all(handle, rank, messages)))


@pytest.mark.one_loop
@pytest.mark.parametrize("messages", [500, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_four_processes_receive_random_arrays(messages: int) -> None:
    # Chunks of 128 KiB: every 500th array overflows.
    writer = MessageQueue(READERS, READERS, max_chunk_bytes=128 * 1024, max_chunks=10, slots=10)
    crowd = Crowd(partial(_reader_process, messages=messages), writer.export_handle(), READERS)
    rng = random.Random(0)
    async with writer:
        await writer.wait_until_ready(30)
        total = 0
        for number, array in _arrays(messages, seed=7):
            await writer.enqueue((number, array), 60)
            total += array.nbytes
            if rng.random() < 0.01:
                await asyncio.sleep(rng.random() * 0.005)
        assert total > 35_000 * messages
        assert writer.stats().overflows == messages // 500
        assert await asyncio.to_thread(crowd.results) == [messages] * READERS


@pytest.mark.parametrize("wait", ["park", "adaptive"])
async def test_a_parking_reader_wakes_for_every_message(wait: str) -> None:
    """500 pairs, the second message sent at every moment around the reader's parking."""
    rng = random.Random(8)
    async with attached(1, wait=wait) as (writer, (reader,)):
        received = []

        async def receive() -> None:
            async for number in reader:
                received.append(number)

        receiving = asyncio.ensure_future(receive())
        for pair in range(500):
            await writer.enqueue(2 * pair)
            for _ in range(rng.randrange(5)):
                await asyncio.sleep(0)
            await asyncio.wait_for(writer.enqueue(2 * pair + 1), 5)
            async with asyncio.timeout(5):
                while len(received) < 2 * pair + 2:
                    await asyncio.sleep(0)
        await writer.aclose()
        await receiving
        assert received == list(range(1000))


async def test_waiting_over_the_socket_where_there_is_no_eventfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioshm.lifeline.listener.HAVE_EVENTFD", False)
    async with attached(2, wait="park", chunks=2) as (writer, readers):

        async def receive(reader: MessageQueue) -> list[int]:
            received = []
            async for number in reader:
                received.append(number)
                if number % 3 == 0:
                    await asyncio.sleep(0)
            return received

        receiving = [asyncio.ensure_future(receive(reader)) for reader in readers]
        for number in range(1000):
            await writer.enqueue(number, 5)
        await writer.aclose()
        assert await asyncio.gather(*receiving) == [list(range(1000))] * 2


async def test_a_named_segment_loses_its_name_once_all_have_attached() -> None:
    async with attached(1, backing="named") as (writer, (reader,)):
        name = writer.export_handle().segment
        assert name is not None
        assert name not in orphans()
        assert not (Path("/dev/shm") / name).exists()
        await writer.enqueue("x")
        assert await reader.dequeue(5) == "x"
