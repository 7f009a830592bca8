"""Queues with remote readers when nothing goes wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from remotes import ready_ends, wide_writer

from aioshm import MessageQueue, QueueFull
from aioshm.codec.base import Encoded
from aioshm.codec.pickle5 import PickleCodec
from aioshm.queue.remote.wire import ONE_FRAME_BYTES


@pytest.mark.parametrize(("n_local", "secure"), [(0, False), (1, True)], ids=["plain", "encrypted"])
async def test_sizes_around_every_bound(n_local: int, secure: bool) -> None:
    bounds = (1, 4096, ONE_FRAME_BYTES, 65_536, 1_000_000)  # a chunk, a frame, what pyzmq copies
    payload = bytes(range(256)) * 4000
    async with ready_ends(n_local, 1, codec="raw", secure=secure) as (writer, readers):
        for size in sorted({size + change for size in bounds for change in (-1, 0, 1)}):
            await writer.enqueue(payload[:size], 5)
            for reader in readers:
                assert await reader.dequeue(5) == payload[:size]


async def test_how_large_messages_may_be_is_for_the_writer_to_say() -> None:
    async with wide_writer(0, 1, codec="raw", max_message_bytes=100_000, chunk=200_000) as writer:
        own = msgspec.structs.replace(writer.export_handle().options, max_message_bytes=10)
        async with MessageQueue.create_from_handle(writer.export_handle(), 0, options=own) as reader:
            await asyncio.gather(writer.wait_until_ready(5), reader.wait_until_ready(5))
            await writer.enqueue(bytes(100_000))
            assert len(await reader.dequeue(5)) == 100_000
            async with writer.acquire_write(5) as buffer:
                buffer[:3] = b"raw"
            assert len(await reader.dequeue(5)) == 200_000
            assert reader.stats().reconnects == 0


async def test_an_object_is_encoded_once_for_all_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = PickleCodec()
    encoded: list[Any] = []
    encode = codec.encode

    def count(obj: Any) -> Encoded:
        encoded.append(obj)
        return encode(obj)

    monkeypatch.setattr(codec, "encode", count)
    async with ready_ends(1, 2, codec=codec) as (writer, readers):
        sent = ["small", b"L" * 1_000_000, np.arange(10_000)]
        await writer.enqueue(sent[0])
        writer.enqueue_nowait(sent[1])
        await writer.enqueue_many(sent[2:])
        for reader in readers:
            for obj in sent:
                assert np.array_equal(await reader.dequeue(5), obj)
        assert len(encoded) == len(sent)


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
