"""Queues with remote readers when nothing goes wrong."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
import torch
from remotes import ready_ends, wide_writer

from aioshm import CodecError, MessageQueue, MsgpackCodec, QueueCancelled, QueueEmpty, RoleError
from aioshm.queue.remote.wire import ONE_FRAME_BYTES


@pytest.mark.parametrize(("n_local", "secure"), [(0, False), (1, True)], ids=["plain", "encrypted"])
async def test_sizes_around_every_bound(n_local: int, secure: bool) -> None:
    bounds = (1, 4096, ONE_FRAME_BYTES, 65_536, 1_000_000)  # a chunk, a frame, what pyzmq copies
    payload = bytes(range(256)) * 4000
    async with ready_ends(n_local, 1, codec="raw", secure=secure) as (writer, readers):
        for size in sorted({size + change for size in bounds for change in (-1, 0, 1)}):
            await writer.enqueue(payload[:size], 5)
            for reader in readers:
                assert await reader.dequeue(5) == payload[:size]


async def test_arrays_and_tensors() -> None:
    async with ready_ends(1, 1) as (writer, readers):
        array = np.arange(100_000).reshape(100, 1000)
        tensor = torch.arange(50_000, dtype=torch.bfloat16)
        sent = {"array": array, "tensor": tensor, "empty": np.empty((0, 3)), "small": np.ones(3)}
        await writer.enqueue(sent)
        for reader in readers:
            received = await reader.dequeue(5)
            assert np.array_equal(received["array"], array)
            assert torch.equal(received["tensor"], tensor)
            assert received["empty"].shape == (0, 3)
            received["array"][:] = 0  # the caller's own
            received["tensor"].zero_()
        assert array[99, 999] == 99_999


class Step(msgspec.Struct):
    number: int
    tokens: list[int]
    mask: np.ndarray | None = None


async def test_codecs() -> None:
    async with ready_ends(0, 1, codec="msgpack") as (writer, (reader,)):
        await writer.enqueue({"k": [1, 2.5, None, b"x"]})
        assert await reader.dequeue(5) == {"k": [1, 2.5, None, b"x"]}
    writer = wide_writer(0, 1, codec=MsgpackCodec(type=Step))
    own = MessageQueue.create_from_handle(writer.export_handle(), 0, codec=MsgpackCodec(type=Step))
    async with writer, own:
        await asyncio.gather(writer.wait_until_ready(5), own.wait_until_ready(5))
        for step in (Step(1, [2, 3]), Step(2, list(range(10_000)), np.ones(50_000))):
            await writer.enqueue(step)
            received = await own.dequeue(5)
            assert (received.number, received.tokens) == (step.number, step.tokens)
            assert (received.mask is None) == (step.mask is None)
        with pytest.raises(ValueError, match="codec must be 'msgpack'"):
            MessageQueue.create_from_handle(writer.export_handle(), 0, codec="raw")


async def test_batches() -> None:
    async with ready_ends(1, 1, remote_window=8, chunks=4) as (writer, readers):

        async def receive(reader: MessageQueue) -> list[int]:
            received: list[int] = []
            while len(received) < 100:
                batch = await reader.dequeue_many(7, 5)
                assert 1 <= len(batch) <= 7
                received += batch
            return received

        receiving = [asyncio.ensure_future(receive(reader)) for reader in readers]
        await writer.enqueue_many([])
        await writer.enqueue_many(range(100), 5)
        assert await asyncio.gather(*receiving) == [list(range(100))] * 2
        await writer.enqueue_many(["a", b"L" * 100_000, "b"])
        for reader in readers:
            received = []
            while len(received) < 3:
                received += await reader.dequeue_many(10, 5)
            assert received == ["a", b"L" * 100_000, "b"]
        with pytest.raises(CodecError):
            await writer.enqueue_many([1, lambda: None])
        await writer.enqueue("nothing of it was sent")
        for reader in readers:
            assert await reader.dequeue(5) == "nothing of it was sent"
        with pytest.raises(ValueError, match="max_items"):
            await readers[0].dequeue_many(0)


async def test_nothing_there_yet() -> None:
    async with ready_ends(0, 1) as (writer, (reader,)):
        with pytest.raises(QueueEmpty, match="no message has arrived"):
            reader.dequeue_nowait()
        with pytest.raises(TimeoutError, match="message 0 did not come in time"):
            await reader.dequeue(0.01)
        cancel = asyncio.Event()
        for call in (reader.dequeue(cancel=cancel), reader.dequeue_many(2, cancel=cancel)):
            waiting = asyncio.ensure_future(call)
            await asyncio.sleep(0)
            cancel.set()
            with pytest.raises(QueueCancelled):
                await waiting
            cancel.clear()
        waiting = asyncio.ensure_future(reader.dequeue())
        await asyncio.sleep(0.01)
        with pytest.raises(QueueEmpty, match="other tasks wait for a message"):
            reader.dequeue_nowait()
        writer.enqueue_nowait("now")
        assert await waiting == "now"
        writer.enqueue_nowait("and again")
        async with asyncio.timeout(5):
            while True:
                try:
                    assert reader.dequeue_nowait() == "and again"
                    break
                except QueueEmpty:
                    await asyncio.sleep(0.001)


async def test_leases() -> None:
    async with ready_ends(0, 1) as (writer, (reader,)):
        kept = []
        for number in range(5):
            await writer.enqueue({"array": np.full(100_000, number), "bytes": b"b" * number})
            async with reader.lease(5) as seen:
                assert np.array_equal(seen["array"], np.full(100_000, number))
                assert not seen["array"].flags.writeable
                kept.append(seen["array"])
                with pytest.raises(RoleError, match="inside of a block"):
                    await reader.dequeue()
        assert [int(array.sum()) for array in kept] == [number * 100_000 for number in range(5)]
        assert reader.stats().messages == 5


async def test_stats() -> None:
    async with ready_ends(1, 1, chunks=16) as (writer, (local, remote)):
        for number in range(10):
            await writer.enqueue(bytes(number))
        stats = writer.stats()
        assert (stats.messages, stats.backlog, stats.readers, stats.kept) == (10, 10, 2, 10)
        assert stats.kept_bytes > 10 * 50
        assert await local.dequeue(5) == b""
        assert await remote.dequeue(5) == b""
        async with asyncio.timeout(5):
            while remote.stats().backlog < 9 or writer.stats().kept > 9:
                await asyncio.sleep(0.001)
        stats = remote.stats()
        assert (stats.side, stats.rank, stats.ready, stats.messages) == ("reader", 1, True, 1)
        assert (stats.resent, stats.reconnects, writer.stats().resent) == (0, 0, 0)
        for number in range(1, 10):
            assert await remote.dequeue(5) == bytes(number)
        async with asyncio.timeout(5):
            while writer.stats().kept_bytes:
                await asyncio.sleep(0.001)
        assert writer.stats().backlog == 9, "the local reader's"
    assert remote.stats().messages == 10
    assert writer.stats().messages == 10


async def test_how_large_messages_may_be_is_for_the_writer_to_say() -> None:
    async with wide_writer(0, 1, codec="raw", max_message_bytes=100_000, chunk=200_000) as writer:
        own = msgspec.structs.replace(writer.export_handle().options, max_message_bytes=10)
        async with MessageQueue.create_from_handle(writer.export_handle(), 0, options=own) as reader:
            await asyncio.gather(writer.wait_until_ready(5), reader.wait_until_ready(5))
            await writer.enqueue(bytes(100_000))
            assert len(await reader.dequeue(5)) == 100_000
            async with writer.acquire_write(5) as buffer:
                buffer[:3] = b"raw"
            assert len(await reader.dequeue(5)) == 200_000
            assert reader.stats().reconnects == 0
