"""Real traffic between real processes."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from children import child
from pairs import attached
from remotes import wide_writer

from aioshm.ring.segment import orphans


@pytest.mark.one_loop
async def test_four_processes_receive_everything() -> None:
    rng = random.Random(0)
    async with wide_writer(4, 0, chunk=128 * 1024, chunks=10) as writer, AsyncExitStack() as stack:
        handle = writer.export_handle().to_json()
        readers = [await stack.enter_async_context(child("collect", handle, str(rank))) for rank in range(4)]
        await writer.wait_until_ready(30)
        for number in range(500):
            size = rng.randrange(80_000) if number % 100 else 200_000  # every 100th overflows
            await writer.enqueue((number, bytearray([number % 256]) * size), 20)
            if rng.random() < 0.01:
                await asyncio.sleep(rng.random() * 0.005)
        assert writer.stats().overflows == 5
        await writer.aclose()
        for reader in readers:
            await reader.says("ready")
            await reader.says("500 then closed")


@pytest.mark.parametrize("wait", ["park", "adaptive"])
async def test_a_parking_reader_wakes_for_every_message(wait: str) -> None:
    """150 pairs, the second message sent at every moment around the reader's parking."""
    rng = random.Random(8)
    async with attached(1, wait=wait) as (writer, (reader,)):
        received = []

        async def receive() -> None:
            async for number in reader:
                received.append(number)

        receiving = asyncio.ensure_future(receive())
        for pair in range(150):
            await writer.enqueue(2 * pair)
            for _ in range(rng.randrange(5)):
                await asyncio.sleep(0)
            await asyncio.wait_for(writer.enqueue(2 * pair + 1), 5)
            async with asyncio.timeout(5):
                while len(received) < 2 * pair + 2:
                    await asyncio.sleep(0)
        await writer.aclose()
        await receiving
        assert received == list(range(300))


async def test_a_named_segment_loses_its_name_once_all_have_attached() -> None:
    async with attached(1, backing="named") as (writer, (reader,)):
        name = writer.export_handle().segment
        assert name is not None
        assert name not in orphans()
        assert not (Path("/dev/shm") / name).exists()
        await writer.enqueue("x")
        assert await reader.dequeue(5) == "x"
