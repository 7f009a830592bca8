"""Queues without readers, as a group of one has them: everything is sent, and nothing goes anywhere."""

from __future__ import annotations

from typing import Any

import pytest
from support import bystander

from aioshm import CodecError, Handle, MessageQueue, Options, QueueClosed, RoleError
from aioshm.queue.state import YIELD_AFTER_MESSAGES

SIZES: dict[str, Any] = {"max_chunk_bytes": 4096, "max_chunks": 4, "slots": 4}


class TestAQueueWithoutReaders:
    @pytest.mark.parametrize("codec", ["pickle", "msgpack", "raw"])
    async def test_takes_any_number_of_messages_of_any_size(self, codec: str) -> None:
        async with MessageQueue(0, 0, **SIZES, codec=codec) as writer:
            for size in (0, 10, 5000, 3_000_000):
                await writer.enqueue(bytes(size), 0)
                writer.enqueue_nowait(bytes(size))
                assert await writer.broadcast_object(bytes(size)) == bytes(size)
            await writer.enqueue_many([b"x"] * 100, 0)
            for _ in range(20):
                async with writer.acquire_write(0) as chunk:
                    assert len(chunk) == 4096
                    chunk[:2] = b"hi"
            stats = writer.stats()
            assert (stats.messages, stats.backlog, stats.overflows) == (132, 0, 0)

    async def test_starves_nobody(self) -> None:
        async with MessageQueue(0, 0, **SIZES) as writer, bystander() as other:
            for number in range(10_000):
                await writer.enqueue(number)
            assert other.turns >= 10_000 // YIELD_AFTER_MESSAGES

    async def test_refuses_what_any_queue_refuses(self) -> None:
        async with MessageQueue(0, 0, **SIZES, codec="msgpack") as writer:
            with pytest.raises(CodecError):
                await writer.enqueue(object())
            with pytest.raises(CodecError):
                await writer.enqueue_many([1, object()])
            assert writer.stats().messages == 0
            with pytest.raises(RoleError):
                await writer.dequeue()
        with pytest.raises(QueueClosed):
            await writer.enqueue(1)

    @pytest.mark.parametrize("lifeline", ["abstract", "directory"])
    async def test_has_a_handle_that_admits_nobody(self, lifeline: Any) -> None:
        async with MessageQueue(0, 0, **SIZES, options=Options(lifeline=lifeline)) as writer:
            await writer.wait_until_ready(0)
            assert writer.stats().ready
            handle = Handle.from_json(writer.export_handle().to_json())
            assert (handle.n_reader, handle.local_reader_ranks, handle.remote) == (0, (), None)
            with pytest.raises(ValueError, match="the queue has none; not 0"):
                MessageQueue.create_from_handle(handle, 0)
            await writer.enqueue("on")
