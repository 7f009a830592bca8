"""Windows, and real traffic between real processes, some of them remote."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from children import child
from remotes import ready_ends
from support import HELPERS

from aioshm import MessageQueue, QueueFull
from aioshm.codec.base import Encoded
from aioshm.codec.pickle5 import PickleCodec

WRITER = HELPERS / "remote_child.py"

# Windows


@pytest.mark.parametrize("bounds", [{"remote_window": 3}, {"remote_window_bytes": 30_000}], ids=["messages", "bytes"])
async def test_a_full_window(bounds: dict[str, int]) -> None:
    async with ready_ends(0, 1, codec="raw", **bounds) as (writer, (reader,)):
        for number in range(3):
            writer.enqueue_nowait(bytes([number]) * 9_900)
        with pytest.raises(QueueFull, match=r"the window of the remote readers is full: rank 0 \(pid \d+ on "):
            writer.enqueue_nowait(bytes(9_900))
        with pytest.raises(TimeoutError, match=r"the window of the remote readers is full: rank 0 "):
            await writer.enqueue(bytes(9_900), 0.02)
        with pytest.raises(TimeoutError, match="the window of the remote readers is full"):
            async with writer.acquire_write(0.02):
                pytest.fail("the window is full")
        waiting = asyncio.ensure_future(writer.enqueue(b"fourth"))
        assert await reader.dequeue(5) == bytes([0]) * 9_900
        await asyncio.wait_for(waiting, 5)
        assert [await reader.dequeue(5) for _ in range(3)] == [bytes([1]) * 9_900, bytes([2]) * 9_900, b"fourth"]


async def test_batches_keep_to_the_window() -> None:
    async with ready_ends(0, 1, codec="raw", remote_window=100, remote_window_bytes=10_000) as (writer, (reader,)):
        largest = 0

        async def send() -> None:
            for size in (0, 10, 90, 200, 3000, 9_948):
                await writer.enqueue_many([bytes(size)] * 150, 10)
                async with writer.acquire_write(10) as buffer:
                    buffer[:1] = b"x"
            await writer.aclose()

        sending = asyncio.ensure_future(send())
        async for _ in reader:
            largest = max(largest, writer.stats().kept_bytes)
            assert writer.stats().kept <= 100
        await sending
        assert 9_000 < largest <= 10_000


# Traffic


@pytest.mark.slow
def test_a_reader_a_hundred_times_as_slow_as_the_writer() -> None:
    window, size, warm_up, count = 512 << 10, 64 << 10, 300, 250

    async def read() -> None:
        arguments = [str(number) for number in (window, size, warm_up, count)]
        async with child("measure", *arguments, script=WRITER) as writer:
            async with MessageQueue.create_from_handle(await writer.says("{"), 0) as reader:
                received = []

                def take(number: int, payload: bytes) -> None:
                    assert payload == bytes([number % 256]) * size
                    received.append(number)

                for _ in range(warm_up):
                    take(*await reader.dequeue(20))
                pace_s = float(await writer.says())
                async for message in reader:
                    take(*message)
                    time.sleep(100 * pace_s)
                assert received == list(range(warm_up + count))
                growth = int(await writer.says())
                assert growth < window + (6 << 20), f"it grew by {growth / 2**20:.1f} MiB"

    assert count * size > 2 * (window + (6 << 20)), "or nothing is shown"
    asyncio.run(read())


@pytest.mark.parametrize("n_local", [0, 1])
async def test_an_object_is_encoded_once_for_all_readers(n_local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = PickleCodec()
    encoded: list[Any] = []
    encode = codec.encode

    def count(obj: Any) -> Encoded:
        encoded.append(obj)
        return encode(obj)

    monkeypatch.setattr(codec, "encode", count)
    async with ready_ends(n_local, 2, codec=codec) as (writer, readers):
        sent = ["small", b"L" * 1_000_000, np.arange(10_000)]
        await writer.enqueue(sent[0])
        writer.enqueue_nowait(sent[1])
        await writer.enqueue_many(sent[2:])
        for reader in readers:
            for obj in sent:
                assert np.array_equal(await reader.dequeue(5), obj)
        assert len(encoded) == len(sent)
