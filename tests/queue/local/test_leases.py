"""Leases: a message where it lies, held while the block lasts, a copy afterwards."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
import torch
from faces import Thread, pair
from loops import turns
from pairs import attached
from slots import body_of, slot_of

from aioshm import CodecError, CorruptSlot, MessageQueue, QueueCancelled, QueueClosed, QueueEmpty, QueueFull, RoleError

LARGE = 600_000
"""More than `leases.VIEW_BYTES`."""


def _shows(writer: MessageQueue, number: int, array: Any) -> bool:
    """Say whether an array shows the ring itself: what is written there is seen at once."""
    memory = np.frombuffer(array, np.uint8)
    at = bytes(body_of(writer, number)).find(memory.tobytes())
    if at < 0:
        return False
    before = int(memory[0])
    body_of(writer, number)[at] = before ^ 0xFF
    seen = int(memory[0]) == before ^ 0xFF
    body_of(writer, number)[at] = before
    return seen


@pytest.mark.parametrize("codec", ["pickle", "msgpack"])
async def test_arrays_and_tensors_are_seen_where_they_lie(codec: str) -> None:
    async with attached(1, codec=codec, chunk=1 << 20) as (writer, (reader,)):
        rng = np.random.default_rng(1)
        for number in range(10):
            sent = {"array": rng.integers(0, 255, LARGE + number, np.uint8), "step": number}
            await writer.enqueue(sent)
            async with reader.lease(5) as obj:
                assert obj["step"] == number
                assert np.array_equal(obj["array"], sent["array"])
                assert not obj["array"].flags.writeable
                with pytest.raises(ValueError, match="read-only"):
                    obj["array"][0] = 1
                assert _shows(writer, number, obj["array"])
        tensor = torch.from_numpy(rng.integers(0, 255, LARGE, np.uint8))
        await writer.enqueue(tensor)
        async with reader.lease(5) as obj:
            assert torch.equal(obj, tensor)
            assert _shows(writer, 10, obj.numpy())
        assert torch.equal(obj, tensor), "a copy by now"


async def test_bytes_are_seen_where_they_lie() -> None:
    payload = random.Random(1).randbytes(LARGE)
    async with attached(1, codec="raw", chunk=1 << 20) as (writer, (reader,)):
        await writer.enqueue(payload)
        async with reader.lease(5) as obj:
            assert isinstance(obj, memoryview)
            assert obj.readonly
            assert obj == payload
            assert _shows(writer, 0, obj)
        await writer.enqueue(bytes(LARGE))
        assert obj == payload
    async with attached(1, chunk=1 << 20) as (writer, (reader,)):
        async with writer.acquire_write() as buffer:
            buffer[:LARGE] = payload
        async with reader.lease(5) as obj:
            assert obj.readonly
            assert obj[:LARGE] == payload
            assert _shows(writer, 0, obj[:LARGE])


@pytest.mark.parametrize("codec", ["pickle", "msgpack", "raw"])
async def test_small_messages_are_as_dequeue_returns_them(codec: str) -> None:
    """A view takes more time than their copy."""
    array = np.arange(3000, dtype=np.uint8)
    objects = [b"x" * 10, b"y" * 5000, b"z" * 100_000]
    if codec != "raw":
        objects += [{"n": 1, "array": array}, [array, torch.from_numpy(array), b"w" * 5000]]
    async with attached(2, codec=codec, chunk=1 << 20) as (writer, (leasing, dequeuing)):
        for obj in objects:
            await writer.enqueue(obj)
            received = await dequeuing.dequeue(5)
            for timeout in (None, 5.0):  # in the core, and not
                async with leasing.lease(timeout) as leased:
                    assert repr(leased) == repr(received)
                    assert type(leased) is type(received)
                if timeout is None:
                    await writer.enqueue(obj)
                    assert repr(await dequeuing.dequeue(5)) == repr(obj if codec != "raw" else received)
            if isinstance(leased, dict):
                leased["array"][0] = 7  # its own
                assert leased["array"][0] == 7


async def test_the_slot_is_held_as_long_as_the_block_lasts() -> None:
    async with attached(1, chunks=2, chunk=1 << 20) as (writer, (reader,)):
        for number in range(3):
            await writer.enqueue((number, np.full(LARGE, number, np.uint8)))
            async with reader.lease(5) as (found, _):
                assert found == number
                await writer.enqueue("second")
                with pytest.raises(QueueFull, match="rank 0"):
                    writer.enqueue_nowait("third")
                waiting = asyncio.ensure_future(writer.enqueue("third"))
                await turns(20)
                assert not waiting.done()
            await asyncio.wait_for(waiting, 5)
            assert await reader.dequeue_many(5, 5) == ["second", "third"]


async def test_ways_out_of_waiting() -> None:
    async with attached(1) as (writer, (reader,)):
        with pytest.raises(TimeoutError):
            async with reader.lease(0.01):
                pytest.fail("nothing was there")
        cancel = asyncio.Event()
        cancel.set()
        with pytest.raises(QueueCancelled):
            async with reader.lease(cancel=cancel):
                pytest.fail("nothing was there")
        await writer.enqueue(1)
        async with reader.lease(0, cancel) as obj:
            assert obj == 1


async def test_damaged_messages() -> None:
    async with attached(1, chunks=8, chunk=1 << 20) as (writer, (reader,)):
        await writer.enqueue_many([0, np.zeros(LARGE, np.uint8), np.zeros(LARGE, np.uint8), "fine"])
        slot_of(writer, 0)[8] ^= 0xFF
        body_of(writer, 1)[:8] = b"\xff" * 8
        slot_of(writer, 2)[1] = 99  # the codec
        for error in (CorruptSlot, CodecError, CodecError):
            with pytest.raises(error):
                async with reader.lease(5):
                    pytest.fail("damaged bytes were handed out")
        async with reader.lease(5) as obj:
            assert obj == "fine"
        assert reader.stats().backlog == 0


async def test_other_tasks_wait_until_it_ends() -> None:
    async with attached(1, chunks=4) as (writer, (reader,)):
        await writer.enqueue_many(["leased", "second", "third"])
        async with reader.lease() as obj:
            assert obj == "leased"
            waiting = [asyncio.ensure_future(reader.dequeue(5)) for _ in range(2)]
            await turns(20)
            assert not any(task.done() for task in waiting)
            with pytest.raises(QueueEmpty):
                reader.dequeue_nowait()
        assert await asyncio.gather(*waiting) == ["second", "third"]
        await writer.enqueue("fourth")
        async with reader.lease() as obj:
            assert obj == "fourth"


async def test_a_small_message_is_received_when_the_block_begins() -> None:
    async with attached(1, chunks=2) as (writer, (reader,)):
        for how in (reader.lease, lambda: reader.lease(5)):
            await writer.enqueue_many([1, 2])
            async with how() as obj:
                assert obj == 1
                assert reader.stats().backlog == 1
                writer.enqueue_nowait(3)
                with pytest.raises(RoleError, match="wait for itself"):
                    await reader.dequeue()
            assert await reader.dequeue_many(2) == [2, 3]


async def test_streams_of_every_size_in_every_way() -> None:
    """Slots go back in order, whatever is still held of the ones before."""
    rng = random.Random(5)
    total = 150
    async with attached(2, chunks=4, chunk=1 << 20) as (writer, readers):

        async def send() -> None:
            for number in range(total):
                size = rng.choice([10, 5000, LARGE, 900_000])
                await writer.enqueue((number, np.full(size, number % 251, np.uint8)), 20)

        async def receive(reader: Any) -> None:
            held: Any = None
            for number in range(total):
                if rng.random() < 0.25:
                    found, array = await reader.dequeue()
                else:
                    async with reader.lease(rng.choice([None, 20])) as (found, array):
                        assert (array == number % 251).all()
                        await asyncio.sleep(0)
                    held = array if rng.random() < 0.2 else held
                assert found == number
                assert (array == number % 251).all()
                del array
            assert held is None or (held == held[0]).all()

        await asyncio.wait_for(asyncio.gather(send(), *map(receive, readers)), 60)


def test_another_thread_closes_while_it_lasts() -> None:
    with pair(chunk=1 << 20) as (writer, reader):
        for obj in ("first", np.full(LARGE, 3, np.uint8)):
            writer.enqueue(obj)
        assert reader.dequeue() == "first"
        with reader.lease() as array:
            Thread(reader.close).result()
            assert (array == 3).all()
            with pytest.raises(QueueClosed):
                reader.dequeue()
        assert reader.held.closed
        assert (array == 3).all()
