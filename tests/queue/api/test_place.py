"""An end belongs to one event loop, one thread, one process; everything else is refused, not corrupted."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from pairs import attached
from support import forked

from aioshm import MessageQueue, QueueClosed, RoleError, blocking


def test_another_loop_is_refused() -> None:
    async def use(writer: MessageQueue, reader: MessageQueue) -> None:
        with pytest.raises(RoleError, match="event loop"):
            await writer.enqueue(1)
        with pytest.raises(RoleError, match="event loop"):
            await reader.dequeue(1)
        with pytest.raises(RoleError, match="event loop"):
            reader.dequeue_nowait()

    ends = attached()
    with asyncio.Runner() as runner:
        writer, (reader,) = runner.run(ends.__aenter__())
        asyncio.run(use(writer, reader))
        asyncio.set_event_loop(runner.get_loop())
        runner.run(ends.__aexit__(None, None, None))
    asyncio.set_event_loop(None)


async def test_a_forked_child_is_refused_and_does_not_hide_a_death() -> None:
    def is_refused(reader: MessageQueue) -> bool:
        with pytest.raises(RoleError, match="forked"):
            reader.dequeue_nowait()
        return True

    async with attached() as (writer, (reader,)):
        await writer.enqueue("kept")
        child_is_refused = forked(is_refused, reader)
        assert await reader.dequeue(5) == "kept"
        await writer.aclose()
        with pytest.raises(QueueClosed):
            await reader.dequeue(5)  # although the child still has the writer's sockets
        assert child_is_refused()


@pytest.mark.parametrize("face", [MessageQueue, blocking.MessageQueue], ids=["async", "blocking"])
def test_a_forgotten_end_warns_and_leaks_nothing(face: Any) -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    writer = face(1, 1, max_chunk_bytes=4096)
    reader = face.create_from_handle(writer.export_handle(), 0)
    with pytest.warns(ResourceWarning, match="local reader of queue .* was not closed"):
        del reader
        gc.collect()
    with pytest.warns(ResourceWarning, match="writer of queue .* was not closed"):
        del writer
        gc.collect()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


async def test_queues_again_and_again_leak_nothing() -> None:
    async def once() -> None:
        async with attached(2) as (writer, readers):
            await writer.enqueue(1)
            await writer.enqueue(b"x" * 10_000)
            for reader in readers:
                assert await reader.dequeue(5) == 1
                assert len(await reader.dequeue(5)) == 10_000

    def resources() -> tuple[int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:aioshm")
        return len(os.listdir("/proc/self/fd")), threading.active_count(), maps

    await once()
    before = resources()
    for _ in range(5):
        await once()
    assert resources() == before
