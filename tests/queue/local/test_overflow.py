"""Messages that do not fit a chunk: where they lie, how that memory is used again, and when it is given back."""

from __future__ import annotations

import errno
import os
from typing import Any

import numpy as np
import pytest
from overflowing import BOTH_WAYS, bodies, overflow_of
from pairs import attached
from support import raising

from aioshm import OutOfDescriptors, QueueClosed, SharedMemoryError
from aioshm.queue.local import overflow, overflow_sockets

pytestmark = pytest.mark.slow_on_uvloop

BIG = 50_000


def blocks(segment: Any) -> int:
    """Return how many bytes of memory an overflow segment has."""
    return os.fstat(segment.segment.fd).st_blocks * 512


@pytest.mark.parametrize("way", ["segments", "zmq", "named"])
async def test_they_grow_with_the_messages(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "named":
        monkeypatch.setattr(overflow, "DEFAULT_BACKING", way)
    async with attached(2, overflow="zmq" if way == "zmq" else "segments") as (writer, readers):
        for size in (5000, BIG, 20 * BIG, 100, 6000, 60 * BIG):
            await writer.enqueue(b"%d" % size * (size // 4))
            for reader in readers:
                assert await reader.dequeue(5) == b"%d" % size * (size // 4)
        assert bodies(writer) == 1
        if way == "named":
            assert overflow_of(writer).segments[0].segment.name is not None


async def test_memory_of_a_burst_is_given_back_and_can_be_used_again() -> None:
    async with attached(1, chunks=8) as (writer, (reader,)):
        for _ in range(2):
            for number in range(8):
                await writer.enqueue(bytes([number]) * BIG)
            assert all(blocks(segment) >= BIG for segment in overflow_of(writer).segments)
            for number in range(8):
                assert await reader.dequeue(5) == bytes([number]) * BIG
            for _ in range(overflow.IDLE_USES):
                await writer.enqueue(b"x" * BIG)
                assert await reader.dequeue(5) == b"x" * BIG
            kept = [blocks(segment) > 0 for segment in overflow_of(writer).segments]
            assert kept[overflow.IDLE_SEGMENTS :] == [False] * 6


@BOTH_WAYS
@pytest.mark.parametrize("codec", ["pickle", "msgpack", "raw"])
async def test_what_was_received_stays_while_its_memory_is_used_again(codec: str, way: str) -> None:
    async with attached(1, codec=codec, overflow=way) as (writer, (reader,)):
        for wrap in (bytes,) if codec == "raw" else (bytes, lambda data: np.frombuffer(data, np.uint8)):
            kept = []
            for number in range(10):
                await writer.enqueue(wrap(bytes([number]) * BIG))
                kept.append(await reader.dequeue(5))
            assert [bytes(memoryview(message)) for message in kept] == [bytes([n]) * BIG for n in range(10)]
        assert bodies(writer) == 1


@BOTH_WAYS
async def test_a_reader_that_reads_keeps_the_bodies(way: str) -> None:
    async with attached(2, codec="raw", overflow=way) as (writer, (slow, fast)):
        await writer.enqueue(b"0" * BIG)
        async with slow.acquire_read(5) as view:
            assert await fast.dequeue(5) == b"0" * BIG
            for number in (b"1", b"2", b"3"):
                await writer.enqueue(number * BIG)
                assert await fast.dequeue(5) == number * BIG
            assert view == b"0" * BIG
            assert bodies(writer) == 4
        assert [await slow.dequeue(5) for _ in range(3)] == [b"1" * BIG, b"2" * BIG, b"3" * BIG]


@BOTH_WAYS
async def test_a_reader_that_leaves_frees_the_bodies(way: str) -> None:
    async with attached(2, overflow=way) as (writer, (idle, reader)):
        for _ in range(4):
            await writer.enqueue(b"x" * BIG)
            await reader.dequeue(5)
        await idle.aclose()
        for number in range(50):
            await writer.enqueue(bytes([number]) * BIG, 5)
            assert await reader.dequeue(5) == bytes([number]) * BIG
        assert bodies(writer) <= 4


@pytest.mark.parametrize(("way", "subscribes_late"), [("segments", False), ("zmq", False), ("zmq", True)])
async def test_all_of_it_can_be_read_after_the_writer_has_closed(
    way: str, subscribes_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subscribes_late:
        monkeypatch.setattr(overflow_sockets.OverflowPublisher, "look", lambda _self: False)
    async with attached(2, chunks=8, overflow=way) as (writer, readers):
        for number in range(8):
            writer.enqueue_nowait(bytes([number]) * BIG)
        monkeypatch.undo()
        await writer.aclose()
        for reader in readers:
            assert [await reader.dequeue(5) for _ in range(8)] == [bytes([number]) * BIG for number in range(8)]
            with pytest.raises(QueueClosed):
                await reader.dequeue(5)


@pytest.mark.parametrize(
    ("number", "error", "text"),
    [
        (errno.ENOMEM, SharedMemoryError, "MiB free.*raise the limits of this process"),
        (errno.EMFILE, OutOfDescriptors, "RLIMIT_NOFILE.*ulimit -n"),
    ],
)
async def test_error_without_a_segment_says_what_to_do_and_the_queue_continues(
    number: int, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with attached(1) as (writer, (reader,)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", raising(OSError(number, os.strerror(number))))
            for _ in range(3):
                with pytest.raises(error, match=rf"(?s)50\d+ bytes needs an overflow segment.*{text}.*overflow='zmq'"):
                    await writer.enqueue(b"x" * BIG)
            with pytest.raises(error):
                writer.enqueue_nowait(b"x" * BIG)
            with pytest.raises(error):
                async with writer.loan(BIG, "uint8"):
                    pass  # private memory, which is copied when the block ends
            with pytest.raises(error):
                async with writer.loan(4 * BIG, "uint8"):
                    pytest.fail("there is no memory")
            with pytest.raises(error):
                await writer.enqueue_many(["small", b"x" * BIG, "unsent"])
            assert writer.stats().messages == 1
            assert await reader.dequeue(5) == "small"
        await writer.enqueue(b"y" * BIG)
        assert await reader.dequeue(5) == b"y" * BIG
        assert writer.stats().messages == 2
