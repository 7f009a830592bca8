"""The latest messages of a queue, read from the ring."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioshm import MessageQueue
from aioshm.errors import HandleError
from aioshm.observe.messages import MessageHeader, last_messages
from aioshm.observe.queues import Ring, Segment, find_rings


def ring_of(mq: MessageQueue) -> Ring:
    key = mq.export_handle().queue_id.hex()
    return next(each for each in find_rings()[0] if each.queue_id == key)


@asynccontextmanager
async def queue(**sizes: Any) -> AsyncIterator[tuple[MessageQueue, MessageQueue, Ring]]:
    async with MessageQueue(1, 1, **{"max_chunk_bytes": 100_000, "max_chunks": 4} | sizes) as writer:
        async with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            await writer.wait_until_ready()
            yield writer, reader, ring_of(writer)


async def test_headers() -> None:
    async with queue(codec="msgpack") as (writer, reader, ring):
        assert last_messages(ring, 5) == []
        for text in ("first", "second", "third"):
            await writer.enqueue(text)
        assert await reader.dequeue() == "first"
        messages = last_messages(ring, 2)
        assert [(each.seq, each.kind, each.codec, each.bytes, each.where) for each in messages] == [
            (1, "inline", "msgpack", 7, "slot"),
            (2, "inline", "msgpack", 6, "slot"),
        ]
        assert [each.unread_by for each in last_messages(ring, 10)] == [(), (0,), (0,)]
        assert {each.preview_hex for each in messages} == {None}
        assert all(0 <= each.age_s < 60 for each in messages)
        assert await reader.dequeue() == "second", "nothing was taken"


async def test_bodies() -> None:
    async with queue(codec="raw") as (writer, _, ring):
        await writer.enqueue(b"plain text")
        await writer.enqueue(b"\xff\x00")
        await writer.enqueue("ü".encode() * 40)
        await writer.enqueue(b"y" * 5000)
        found = last_messages(ring, 9, bodies=True)
        previews = [bytes.fromhex(each.preview_hex or "") for each in found]
        assert previews == [b"plain text", b"\xff\x00", "ü".encode() * 32, b"y" * 64]
        assert [each.preview_text for each in found] == ["plain text", None, "ü" * 32, "y" * 64]
        assert found[3].where.startswith("chunk ")
        assert found[3].bytes == 5000


async def test_a_body_is_never_decoded() -> None:
    class Explosive:
        def __reduce__(self) -> Any:
            return pytest.fail, ("it was unpickled",)

    async with queue() as (writer, _, ring):
        await writer.enqueue(Explosive())
        [message] = last_messages(ring, 1, bodies=True)
        assert message.preview_hex is not None
        assert message.preview_hex.startswith("80")


async def test_arrays_overflow_and_raw() -> None:
    async with queue() as (writer, _, ring):
        await writer.enqueue({"a": np.zeros(2000, dtype="uint8"), "b": np.ones(4000, dtype="uint8")})
        await writer.enqueue(np.zeros(50_000, dtype="uint8"))
        await writer.enqueue(b"x" * 300_000)
        async with writer.acquire_write() as slot:
            slot[:3] = b"abc"
        first, second, overflow, _raw = last_messages(ring, 4, bodies=True)
        assert first.buffers + second.buffers >= 1
        assert first.bytes > 6000
        assert second.bytes > 50_000
        assert second.main_bytes < 1000
        assert (overflow.kind, overflow.where, overflow.preview_hex) == ("overflow", "segment 0", None)
        assert overflow.bytes >= 300_000


async def test_laps() -> None:
    async with queue(max_chunk_bytes=100, max_chunks=2) as (writer, reader, ring):
        slots = ring.layout.slots
        for number in range(slots + 3):
            await writer.enqueue(number)
            await reader.dequeue()
        found = last_messages(ring, 10 * slots)
        assert [each.seq for each in found] == list(range(3, slots + 3))


async def test_message_that_is_being_overwritten_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async with queue() as (writer, _, ring):
        for number in range(3):
            await writer.enqueue(number)
        read = ring.read
        slot = ring.layout.slot(1)
        monkeypatch.setattr(ring, "read", lambda at, n: b"\xee" * n if (at, n) == (slot + 8, 8) else read(at, n))
        assert [each.seq for each in last_messages(ring, 3)] == [0, 2]


async def test_damage() -> None:
    async with queue() as (writer, _, ring):
        await writer.enqueue("x")
        read = ring.read
        slot = ring.layout.slot(0)
        for damage in (b"\xff" * 4, b"\x01\x01\x00\x00\xff\xff\xff\x00", b"\x02\x00\x01\x00"):
            with pytest.MonkeyPatch.context() as patch:

                def damaged(at: int, n: int, damage: bytes = damage) -> bytes:
                    return damage + read(at, n)[len(damage) :] if (at, n) == (slot, 64) else read(at, n)

                patch.setattr(ring, "read", damaged)
                [message] = last_messages(ring, 1, bodies=True)
                assert isinstance(message, MessageHeader)


async def test_ring_that_was_truncated_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ring"
    async with queue() as (writer, _, ring):
        await writer.enqueue("x")
        file.write_bytes(ring.read(0, ring.layout.header_bytes))
    ring.segment = Segment(str(file), file.stat())
    ring.segment.paths[os.getpid()] = str(file)
    with pytest.raises(HandleError, match="is damaged: it ends before byte"):
        last_messages(ring, 1)
