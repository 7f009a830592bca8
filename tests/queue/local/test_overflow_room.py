"""Readers without a descriptor left for an overflow segment: a typed error, and the same message once there is room."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from overflowing import withhold
from pairs import attached

from aioshm import MessageQueue, OutOfDescriptors

LARGE = [bytes([number]) * (50_000 + number) for number in range(3)]


@contextmanager
def starving() -> Iterator[None]:
    """Let this process have no further descriptor, though it closes some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@asynccontextmanager
async def withheld() -> AsyncIterator[tuple[MessageQueue, MessageQueue, Callable[[], None]]]:
    """Give a queue with large messages, and a function that passes their descriptors on, to the block."""
    async with attached() as (writer, (reader,)):
        pass_on = withhold(writer)
        for message in LARGE:
            await writer.enqueue(message)
        yield writer, reader, pass_on


async def test_every_call_says_so_and_loses_nothing() -> None:
    async with withheld() as (_writer, reader, hand_over):
        with starving():
            hand_over()
            for _ in range(2):
                with pytest.raises(OutOfDescriptors, match=r"message 0 of 50\d+ bytes .*RLIMIT_NOFILE.*ulimit"):
                    await reader.dequeue(20)
                with pytest.raises(OutOfDescriptors):
                    reader.dequeue_nowait()
                with pytest.raises(OutOfDescriptors):
                    await reader.dequeue_many(3, 20)
                for block in (reader.acquire_read, reader.lease):
                    with pytest.raises(OutOfDescriptors):
                        async with block(20):
                            pytest.fail("there is nothing to read")
        assert reader.dequeue_nowait() == LARGE[0]
        assert [await reader.dequeue(5) for _ in LARGE[1:]] == LARGE[1:]


async def test_a_reader_that_waits_already() -> None:
    async with withheld() as (_writer, reader, hand_over):
        waiting = asyncio.ensure_future(reader.dequeue(20))
        await asyncio.sleep(0)
        with starving():
            hand_over()
            with pytest.raises(OutOfDescriptors):
                await waiting
        assert [await reader.dequeue(5) for _ in LARGE] == LARGE
