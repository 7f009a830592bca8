"""Readers without a descriptor left for an overflow segment: a typed error, and the same message once there is room."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from pairs import attached

from aioshm import MessageQueue, OutOfDescriptors, PeerDied, QueueClosed

LARGE = [bytes([number]) * (50_000 + number) for number in range(3)]


@contextmanager
def starving(left: int = 0) -> Iterator[Callable[[], None]]:
    """Let this process have so many descriptors more until the end of the block, or a call of what is given to it.

    With fewer than none it has no use for those that it closes, either.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(left + 1)] or [os.dup(0)]
    for each in taken:
        os.close(each)

    def lift() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) if left >= 0 else 3, hard))
    try:
        yield lift
    finally:
        lift()


@asynccontextmanager
async def withheld(n_reader: int = 1) -> AsyncIterator[tuple[Any, list[MessageQueue], Callable[[], None]]]:
    """Give a queue to the block with large messages, whose descriptors are passed on when that is called for."""
    async with attached(n_reader) as (writer, readers):
        queue: Any = writer
        held: list[int] = []
        pass_on = queue.end.ring.overflow.hand_over
        queue.end.ring.overflow.hand_over = held.append
        for message in LARGE:
            await queue.enqueue(message)
        assert len(held) == len(LARGE)

        def hand_over() -> None:
            for fd in held:
                pass_on(fd)
            held.clear()

        yield queue, readers, hand_over


async def test_every_call_says_so_and_loses_nothing() -> None:
    async with withheld() as (_writer, (reader,), hand_over):
        with starving():
            hand_over()
            for _ in range(2):
                with pytest.raises(
                    OutOfDescriptors, match=r"message 0 of 50\d+ bytes needs .*RLIMIT_NOFILE.*ulimit -n"
                ):
                    await reader.dequeue(20)
                with pytest.raises(OutOfDescriptors):
                    reader.dequeue_nowait()
                with pytest.raises(OutOfDescriptors):
                    await reader.dequeue_many(3, 20)
                with pytest.raises(OutOfDescriptors):
                    async with reader.acquire_read(20):
                        pytest.fail("there is nothing to read")
                with pytest.raises(OutOfDescriptors):
                    async with reader.lease(20):
                        pytest.fail("there is nothing to read")
        assert reader.dequeue_nowait() == LARGE[0]
        assert [await reader.dequeue(5) for _ in LARGE[1:]] == LARGE[1:]


async def test_a_reader_that_waits_already() -> None:
    async with withheld() as (_writer, (reader,), hand_over):
        waiting = asyncio.ensure_future(reader.dequeue(20))
        await asyncio.sleep(0)
        with starving():
            hand_over()
            with pytest.raises(OutOfDescriptors):
                await waiting
        assert [await reader.dequeue(5) for _ in LARGE] == LARGE


async def test_the_writer_may_close_meanwhile() -> None:
    async with withheld() as (writer, (reader,), hand_over):
        with starving(-1):
            hand_over()
            await writer.aclose()
            with pytest.raises(OutOfDescriptors):
                await reader.dequeue(20)
        assert [await reader.dequeue(5) for _ in LARGE] == LARGE
        with pytest.raises(QueueClosed):
            await reader.dequeue(5)


async def test_a_death_behind_a_descriptor_without_room_ends_a_wait() -> None:
    """The writer died after it had passed the descriptor, and before it published the message."""
    async with attached() as (writer, (reader,)):
        queue: Any = writer
        waiting = asyncio.ensure_future(reader.dequeue(20))
        await asyncio.sleep(0)
        fd = os.open(os.devnull, os.O_RDONLY)
        try:
            with starving(-1):
                queue.end.ring.overflow.hand_over(fd)
                for connection in list(queue.end.ring.listener._connections.values()):
                    connection.close()
                with pytest.raises(PeerDied):
                    await waiting
        finally:
            os.close(fd)
