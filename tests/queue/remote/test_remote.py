"""Queues with remote readers when nothing goes wrong."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from remotes import ready_ends, wide_writer

from aioshm import MessageQueue
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
