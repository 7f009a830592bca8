"""Messages of every size in one ring: backpressure from its chunks, raw room, memory."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loops import turns
from pairs import attached
from remotes import ready_ends

from aioshm import MessageQueue, Options, QueueFull, SharedMemoryError
from aioshm.testing import pair

pytestmark = pytest.mark.slow_on_uvloop

LARGE = b"L" * 3000
FULL: dict[str, Any] = {"codec": "raw", "chunk": 4096, "chunks": 2, "slots": 64}


async def parked(writer: MessageQueue) -> None:
    before = writer.stats().parks
    while writer.stats().parks == before:
        await asyncio.sleep(0)


class TestBackpressure:
    async def test_of_chunks_names_who_holds_them(self) -> None:
        async with attached(2, **FULL) as (writer, (quick, slow)):
            for message in (b"small", LARGE, LARGE):
                await writer.enqueue(message)
                assert await quick.dequeue(5) == message
            with pytest.raises(QueueFull, match=r"no chunk is free: rank 1 \(pid \d+, \w+\)$"):
                writer.enqueue_nowait(LARGE)
            with pytest.raises(TimeoutError, match=r"no chunk became free: rank 1 \(pid \d+, \w+\)$"):
                await writer.enqueue(LARGE, 0.02)
            with pytest.raises(TimeoutError, match="no chunk became free: rank 1"):
                async with writer.acquire_write(0.02, nbytes=3000):
                    pytest.fail("there is none")
            await writer.enqueue(b"small ones need none")
            assert [await slow.dequeue(5) for _ in range(2)] == [b"small", LARGE]
            writer.enqueue_nowait(LARGE)
            assert [await slow.dequeue(5) for _ in range(3)] == [LARGE, b"small ones need none", LARGE]

    async def test_bounds_what_lies_beside_the_ring_too(self) -> None:
        async with attached(1, **FULL) as (writer, (reader,)):
            huge = bytes(9000)
            for _ in range(2):
                writer.enqueue_nowait(huge)
            with pytest.raises(QueueFull, match="no chunk is free: rank 0"):
                writer.enqueue_nowait(huge)
            writer.enqueue_nowait(b"small")
            for message in (huge, huge, b"small"):
                assert await reader.dequeue(5) == message
            await writer.enqueue(huge, 5)
            assert writer.stats().overflows == 3

    async def test_of_slots_is_told_as_that(self) -> None:
        async with attached(1, codec="raw", chunk=4096, chunks=2, slots=2) as (writer, _):
            writer.enqueue_nowait(b"1")
            writer.enqueue_nowait(b"2")
            for message in (b"3", LARGE):
                with pytest.raises(QueueFull, match="no slot is free: rank 0"):
                    writer.enqueue_nowait(message)

    async def test_the_writer_is_woken_for_the_chunk_and_not_for_a_slot(self) -> None:
        async with attached(1, **FULL, wait="park") as (writer, (reader,)):
            await writer.enqueue_many([b"small"] * 5 + [LARGE, LARGE])
            sending = asyncio.ensure_future(writer.enqueue(LARGE))
            await parked(writer)
            assert await reader.dequeue_many(5, 5) == [b"small"] * 5
            await turns(20)
            assert not sending.done(), "slots there were enough of"
            assert await reader.dequeue(5) == LARGE
            await asyncio.wait_for(sending, 5)

    async def test_a_batch_larger_than_the_pool_goes_in_parts_and_a_smaller_one_whole(self) -> None:
        async with attached(1, **FULL) as (writer, (reader,)):
            with pytest.raises(TimeoutError, match="no chunk became free: rank 0"):
                await writer.enqueue_many([b"1", LARGE, b"2", LARGE, b"3", LARGE, b"4", LARGE], 0.02)
            assert writer.stats().messages == 5
            assert await reader.dequeue_many(9, 5) == [b"1", LARGE, b"2", LARGE, b"3"]
            await writer.enqueue(LARGE)
            with pytest.raises(TimeoutError, match="no chunk became free"):
                await writer.enqueue_many([b"1", LARGE, LARGE], 0.02)
            assert writer.stats().messages == 6
            assert await reader.dequeue(5) == LARGE
            await writer.enqueue_many([b"1", LARGE, LARGE])
            assert await reader.dequeue_many(9, 5) == [b"1", LARGE, LARGE]

    async def test_what_is_only_counted_needs_no_chunk(self) -> None:
        async with ready_ends(0, 1, **FULL) as (writer, (reader,)):
            await writer.enqueue_many([LARGE] * 20)
            for _ in range(20):
                assert await reader.dequeue(10) == LARGE


class TestRaw:
    async def test_readers_see_as_many_bytes_as_were_asked_for(self) -> None:
        sizes = [0, 1, 960, 961, 4608, 5000, 73_728, 80_000, 1 << 20, None]
        async with ready_ends(1, 1, chunk=1 << 20, chunks=2) as (writer, readers):
            for nbytes, number in itertools.product(sizes, range(3)):
                size = 1 << 20 if nbytes is None else nbytes
                async with writer.acquire_write(nbytes=nbytes) as room:
                    assert (len(room), room.readonly) == (size, False)
                    room[:] = bytes([number]) * size
                for reader in readers:
                    if number == 1:
                        async with reader.acquire_read(5) as seen:
                            assert seen.readonly
                            assert seen == bytes([number]) * size
                    else:
                        assert await reader.dequeue(5) == bytes([number]) * size

    async def test_garbage(self) -> None:
        garbage: list[Any] = [-1, 4097, 1.0, "1", True]
        async with attached(1) as (writer, _):
            for nbytes in garbage:
                error = ValueError if type(nbytes) is int else TypeError
                with pytest.raises(error, match=f"nbytes must be .* not {nbytes!r}"):
                    async with writer.acquire_write(nbytes=nbytes):
                        pytest.fail("nothing of that size can be had")
            async with writer.acquire_write(nbytes=4096):
                pass
            assert writer.stats().messages == 1


def resident(name: str) -> list[int]:
    """Return how many bytes of each mapping of a memfd are in memory, its parts taken together."""
    sizes: dict[str, int] = {}
    at = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"[0-9a-f]+-[0-9a-f]+ .* (\d+) +(/.*)?$", line):
            at = match[1] if name in (match[2] or "") else ""
        elif at and line.startswith("Rss:"):
            sizes[at] = sizes.get(at, 0) + int(line.split()[1]) * 1024
    return list(sizes.values())


async def test_small_messages_take_little_memory() -> None:
    async with pair(codec="raw") as (writer, reader):
        for _ in range(200):
            await writer.enqueue_many([b"small"] * 64)
            while reader.stats().messages < writer.stats().messages:
                await reader.dequeue_many(64, 5)
        assert writer.stats().messages > 2 * writer.stats().slots
        [both_ends] = resident("/memfd:aioshm")
        assert both_ends < 2 * (6 << 20)


async def test_the_default_ring_has_many_messages_of_every_size_on_the_way() -> None:
    async with pair(codec="raw") as (writer, reader):
        for size, amount in ((64, 1000), (4096, 200), (65536, 12), (1 << 20, 10)):
            for _ in range(amount):
                writer.enqueue_nowait(bytes(size))
            for _ in range(amount):
                assert len(await reader.dequeue(5)) == size
        assert writer.stats().overflows == 0
        assert (writer.stats().max_chunks, reader.stats().slots) == (10, writer.stats().slots)


ALLOCATES = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="macOS allocates whole segments")

CHUNK = 1 << 20
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


@ALLOCATES
async def test_new_named_queue_occupies_its_slots_only() -> None:
    async with MessageQueue(1, 1, max_chunk_bytes=64 * CHUNK, options=Options(backing="named")) as mq:
        assert 0 < allocated(mq) < 8 * CHUNK


@ALLOCATES
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


@ALLOCATES
async def test_chunks_with_memory_are_used_again(refuse: Callable[[int], None]) -> None:
    async with attached(1, **NAMED_RING) as (writer, (reader,)):
        refuse(2 * CHUNK + 128)
        for number in range(10):
            two = [bytes([number]) * CHUNK, bytes([100 + number]) * CHUNK]
            await writer.enqueue_many(two)
            assert [await reader.dequeue() for _ in two] == two
        await writer.enqueue_many(two)
        with pytest.raises(SharedMemoryError):
            await writer.enqueue(two[0])
        assert [await reader.dequeue() for _ in two] == two
