"""What a newcomer tries first: both ends in one task, a queue that was closed already, a queue where its handle belongs."""

from __future__ import annotations

import asyncio

import pytest
from pairs import EITHER_PLACE
from remotes import wide_writer
from support import until

from aioshm import HandleError, MessageQueue


class TestBothEndsInOneTask:
    """Nobody waits for both at once: entering the reader begins to attach it."""

    @EITHER_PLACE
    async def test_meet_without_a_gather(self, n_local: int, n_remote: int) -> None:
        writer = wide_writer(n_local, n_remote)
        async with writer, MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            await writer.enqueue({"number": 1}, 20)
            assert await reader.dequeue(20) == {"number": 1}

    @EITHER_PLACE
    async def test_whichever_is_entered_first(self, n_local: int, n_remote: int) -> None:
        writer = wide_writer(n_local * 2, n_remote * 2)
        readers = [MessageQueue.create_from_handle(writer.export_handle(), rank) for rank in range(2)]
        async with readers[0], writer, readers[1]:
            await writer.enqueue("hello", 20)
            assert [await reader.dequeue(20) for reader in readers] == ["hello", "hello"]

    async def test_what_goes_wrong_is_said_by_the_first_call(self) -> None:
        writer = wide_writer(1, 0)
        async with writer, MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            async with MessageQueue.create_from_handle(writer.export_handle(), 0) as second:
                await writer.wait_until_ready(20)
                await until(lambda: second.end.gate.refusal is not None, "the refusal")
                with pytest.raises(HandleError, match="rank 0 is taken"):
                    await second.dequeue(20)
            await writer.enqueue("hello", 20)
            assert await reader.dequeue(20) == "hello"

    @EITHER_PLACE
    async def test_a_closed_end_may_be_entered(self, n_local: int, n_remote: int) -> None:
        async with wide_writer(n_local, n_remote) as writer:
            reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
            await reader.aclose()
            async with reader:
                assert "closed" in repr(reader)
            await asyncio.sleep(0)
