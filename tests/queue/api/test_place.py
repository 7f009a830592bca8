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

from aioshm import MessageQueue, QueueClosed, RoleError, blocking


def test_another_loop_is_refused() -> None:
    ends: list[MessageQueue] = []

    async def make() -> None:
        writer = MessageQueue(1, 1, max_chunk_bytes=4096)
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        ends.extend([writer, reader])
        await asyncio.gather(writer.wait_until_ready(5), reader.wait_until_ready(5))
        await writer.enqueue("kept")

    async def use() -> None:
        with pytest.raises(RoleError, match="event loop"):
            await ends[0].enqueue(1)
        with pytest.raises(RoleError, match="event loop"):
            await ends[1].dequeue(1)
        with pytest.raises(RoleError, match="event loop"):
            ends[1].dequeue_nowait()

    async def close() -> None:
        for end in ends:
            await end.aclose()

    with asyncio.Runner() as runner:
        runner.run(make())
        asyncio.run(use())
        asyncio.set_event_loop(runner.get_loop())
        runner.run(close())
    asyncio.set_event_loop(None)


async def test_a_forked_child_is_refused_and_does_not_hide_a_death() -> None:
    async with attached() as (writer, (reader,)):
        await writer.enqueue("kept")
        told, tell = os.pipe()
        hold, let_go = os.pipe()
        child = os.fork()
        if child == 0:
            verdict = b"no error"
            try:
                reader.dequeue_nowait()
            except RoleError as error:
                verdict = str(error).encode()
            finally:
                os.write(tell, verdict)
                os.close(let_go)
                os.read(hold, 1)  # stay alive, with every descriptor that was inherited
                os._exit(0)
        os.close(hold)
        os.close(tell)
        assert b"forked" in await asyncio.to_thread(os.read, told, 1000)
        assert await reader.dequeue(5) == "kept"
        await writer.aclose()
        with pytest.raises(QueueClosed):
            await reader.dequeue(5)  # although the child still has the writer's sockets
        os.close(let_go)
        os.close(told)
        os.waitpid(child, 0)


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


async def test_forty_queues_leak_nothing() -> None:
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
    for _ in range(40):
        await once()
    assert resources() == before


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"n_reader": 0, "n_local_reader": 1}, ValueError, "n_local_reader"),
        ({"n_reader": -1, "n_local_reader": 1}, ValueError, "n_reader"),
        ({"n_reader": "1", "n_local_reader": 1}, TypeError, "n_reader"),
        ({"n_reader": 2, "n_local_reader": 3}, ValueError, "n_local_reader"),
        ({"n_reader": 2, "n_local_reader": 2, "local_reader_ranks": [0, 0]}, ValueError, "local_reader_ranks"),
        ({"n_reader": 2, "n_local_reader": 2, "local_reader_ranks": [0]}, ValueError, "local_reader_ranks"),
        ({"n_reader": 2, "n_local_reader": 2, "local_reader_ranks": [0, -5]}, ValueError, "local_reader_ranks"),
        ({"n_reader": 2, "n_local_reader": 2, "local_reader_ranks": [0, 1 << 32]}, ValueError, "local_reader_ranks"),
        ({"n_reader": 2, "n_local_reader": 2, "remote_reader_ranks": [2]}, ValueError, "remote_reader_ranks"),
        ({"n_reader": 2, "n_local_reader": 1, "remote_reader_ranks": [0]}, ValueError, "remote_reader_ranks"),
        ({"n_reader": 2, "n_local_reader": 1, "remote_reader_ranks": []}, ValueError, "remote_reader_ranks"),
        ({"n_reader": 2, "n_local_reader": 1, "connect_ip": "localhost"}, ValueError, "connect_ip"),
        ({"n_reader": 2, "n_local_reader": 1, "connect_ip": "192.0.2.1"}, ValueError, "connect_ip"),
        ({"n_reader": 2, "n_local_reader": 1, "options": {}}, TypeError, "options"),
        ({"n_reader": 1, "n_local_reader": 1, "max_chunk_bytes": 0}, ValueError, "max_chunk_bytes"),
        ({"n_reader": 1, "n_local_reader": 1, "max_chunk_bytes": 1.5}, TypeError, "max_chunk_bytes"),
        ({"n_reader": 1, "n_local_reader": 1, "max_chunks": 0}, ValueError, "max_chunks"),
        ({"n_reader": 1, "n_local_reader": 1, "connect_ip": 5}, TypeError, "connect_ip"),
        ({"n_reader": 1, "n_local_reader": 1, "codec": "zip"}, ValueError, "codec"),
        ({"n_reader": 1, "n_local_reader": 1, "options": {}}, TypeError, "options"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        MessageQueue(**arguments)


async def test_bad_timeouts_are_named() -> None:
    async with attached() as (writer, (reader,)):
        with pytest.raises(ValueError, match="timeout"):
            await reader.dequeue(-1)
        with pytest.raises(ValueError, match="timeout"):
            await reader.dequeue(float("nan"))
        with pytest.raises(TypeError, match="timeout"):
            await reader.dequeue("1")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="timeout"):
            await writer.wait_until_ready("1")  # type: ignore[arg-type]


async def test_ranks_need_not_be_in_order() -> None:
    writer = MessageQueue(3, 3, local_reader_ranks=[2, 0, 1], max_chunk_bytes=4096)
    readers = [MessageQueue.create_from_handle(writer.export_handle(), rank) for rank in range(3)]
    await asyncio.gather(*(end.wait_until_ready(5) for end in [writer, *readers]))
    await writer.enqueue("x")
    assert [await reader.dequeue(5) for reader in readers] == ["x"] * 3
    assert [reader.stats().rank for reader in readers] == [0, 1, 2]
    for end in [writer, *readers]:
        await end.aclose()
