"""A queue whose ring is a named segment: its chunks get memory in /dev/shm when they are first used."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pairs import attached

from aioshm import MessageQueue, Options, QueueFull, SharedMemoryError

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="macOS allocates whole segments")

CHUNK = 1 << 20
NAMED = Options(backing="named")
NAMED_RING: dict[str, Any] = {"chunk": CHUNK, "slots": 64, "codec": "raw", "backing": "named"}


def allocated(mq: MessageQueue) -> int:
    """Return how many bytes the writer's ring occupies in /dev/shm."""
    segment = mq.export_handle().segment
    assert segment is not None
    return Path("/dev/shm", segment).stat().st_blocks * 512


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set how many bytes can be allocated from now on, as in a /dev/shm that is nearly full."""
    allocate = os.posix_fallocate
    left = 0

    def limited(fd: int, offset: int, length: int) -> None:
        nonlocal left
        if length > left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left -= length
        allocate(fd, offset, length)

    def limit(nbytes: int) -> None:
        nonlocal left
        left = nbytes
        monkeypatch.setattr(os, "posix_fallocate", limited)

    return limit


async def test_new_named_queue_occupies_its_slots_only() -> None:
    async with MessageQueue(1, 1, max_chunk_bytes=64 * CHUNK, options=NAMED) as mq:
        assert 0 < allocated(mq) < 8 * CHUNK


async def test_memory_refused_for_a_chunk_is_an_error_and_loses_nothing(refuse: Callable[[int], None]) -> None:
    async with attached(1, **NAMED_RING) as (writer, (reader,)):
        large = b"L" * CHUNK
        refuse(0)
        for send in (writer.enqueue(large), writer.enqueue_many([b"small", large])):
            with pytest.raises(SharedMemoryError, match="aioshm doctor --clean"):
                await send
        with pytest.raises(SharedMemoryError):
            writer.enqueue_nowait(large)
        with pytest.raises(SharedMemoryError):
            async with writer.acquire_write(nbytes=CHUNK):
                pytest.fail("there is no memory for the block")
        await writer.enqueue(b"small")
        assert await reader.dequeue() == b"small"
        refuse(1 << 40)
        await writer.enqueue_many([large, b"small", large])
        assert [await reader.dequeue() for _ in range(3)] == [large, b"small", large]


async def test_chunks_with_memory_are_used_again(refuse: Callable[[int], None]) -> None:
    async with attached(1, **NAMED_RING) as (writer, (reader,)):
        refuse(2 * CHUNK + 128)
        for number in range(10):
            pair = [bytes([number]) * CHUNK, bytes([100 + number]) * CHUNK]
            await writer.enqueue_many(pair)
            assert [await reader.dequeue() for _ in pair] == pair
        await writer.enqueue_many(pair)
        with pytest.raises(SharedMemoryError):
            await writer.enqueue(pair[0])
        assert [await reader.dequeue() for _ in pair] == pair


async def test_every_chunk_is_used_before_the_queue_is_full() -> None:
    async with attached(1, **NAMED_RING) as (writer, (reader,)):
        sent = [bytes([number]) * CHUNK for number in range(4)]
        for message in sent:
            writer.enqueue_nowait(message)
        with pytest.raises(QueueFull, match="no chunk is free"):
            writer.enqueue_nowait(sent[0])
        assert [await reader.dequeue() for _ in sent] == sent
