"""Leases that need not wait hold the slot and the line as those that wait do."""

from __future__ import annotations

import asyncio
import pickle
import random
from typing import Any

import numpy as np
import pytest
from faces import Thread, pair
from pairs import attached
from support import eventually

from aioshm import CodecError, QueueClosed, QueueEmpty, QueueFull, RoleError
from aioshm.codec import PickleCodec

LARGE = 600_000
"""More than `leases.VIEW_BYTES`."""


class Fails(PickleCodec):
    name = "fails"
    code = 99

    @staticmethod
    def loads(data: bytes) -> Any:
        obj = pickle.loads(data)
        if obj == "bad":
            raise CodecError("bad")
        return obj

    def decode(self, main: Any, buffers: Any) -> Any:
        return self.loads(main)


async def test_other_tasks_wait_until_it_ends() -> None:
    async with attached(1, chunks=4) as (writer, (reader,)):
        await writer.enqueue_many(["leased", "second", "third"])
        async with reader.lease() as obj:
            assert obj == "leased"
            waiting = [asyncio.ensure_future(reader.dequeue(5)) for _ in range(2)]
            for _ in range(20):
                await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
            with pytest.raises(QueueEmpty):
                reader.dequeue_nowait()
        assert await asyncio.gather(*waiting) == ["second", "third"]
        await writer.enqueue("fourth")
        async with reader.lease() as obj:
            assert obj == "fourth"


async def test_the_slot_of_a_large_message_is_held() -> None:
    async with attached(1, chunks=2, chunk=1 << 20) as (writer, (reader,)):
        for how in (reader.lease, lambda: reader.lease(5)):
            await writer.enqueue_many([np.full(LARGE, 1, np.uint8), 2])
            async with how() as obj:
                assert (obj == 1).all()
                del obj
                assert reader.stats().backlog == 2
                with pytest.raises(QueueFull):
                    writer.enqueue_nowait(3)
            writer.enqueue_nowait(3)
            assert await reader.dequeue_many(2) == [2, 3]


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


async def test_closing_waits_for_it() -> None:
    async with attached(1, chunks=4, chunk=1 << 20) as (writer, (reader,)):
        await writer.enqueue(np.full(LARGE, 5, np.uint8))
        async with reader.lease() as array:
            await reader.aclose()
            assert (array == 5).all()
            with pytest.raises(QueueClosed):
                await reader.dequeue()
        assert reader.stats().messages == 1
        with pytest.raises(QueueClosed):
            async with reader.lease():
                pytest.fail("it is closed")


async def test_damage_is_reported_once() -> None:
    async with attached(1, codec=Fails(), chunks=8) as (writer, (reader,)):
        for _ in range(2):
            await writer.enqueue_many(["bad", "good"])
            with pytest.raises(CodecError, match="bad"):
                async with reader.lease():
                    pytest.fail("it cannot be decoded")
            async with reader.lease() as obj:
                assert obj == "good"
        assert reader.stats().backlog == 0


async def test_what_was_leased_is_not_kept_alive() -> None:
    class Weak:
        alive = 0

        def __init__(self) -> None:
            Weak.alive += 1

        def __setstate__(self, state: object) -> None:
            Weak.alive += 1

        def __getstate__(self) -> object:
            return 1

        def __del__(self) -> None:
            Weak.alive -= 1

    globals()["Weak"] = Weak
    Weak.__qualname__ = "Weak"
    async with attached(1) as (writer, (reader,)):
        await writer.enqueue([Weak()])
        assert Weak.alive == 0
        async with reader.lease() as obj:
            assert Weak.alive == 1
            del obj
            assert Weak.alive == 0


async def test_streams_of_every_size_in_every_way() -> None:
    """Slots go back in order, whatever is still held of the ones before."""
    rng = random.Random(5)
    total = 300
    async with attached(2, chunks=4, chunk=1 << 20) as (writer, readers):

        async def send() -> None:
            for number in range(total):
                size = rng.choice([10, 5000, LARGE, 900_000])
                await writer.enqueue((number, np.full(size, number % 251, np.uint8)), 20)

        async def receive(reader: Any) -> None:
            held: Any = None
            for number in range(total):
                how = rng.randrange(4)
                if how == 0:
                    found, array = await reader.dequeue()
                elif how == 1:
                    async with reader.lease() as (found, array):
                        assert (array == number % 251).all()
                elif how == 2:
                    async with reader.lease(20) as (found, array):
                        assert (array == number % 251).all()
                else:
                    async with reader.lease() as (found, array):
                        held = array if rng.random() < 0.5 else held
                        await asyncio.sleep(0)
                assert found == number
                assert (array == number % 251).all()
                del array
            assert held is None or (held == held[0]).all()

        await asyncio.wait_for(asyncio.gather(send(), *map(receive, readers)), 60)


def test_other_threads_wait_until_it_ends() -> None:
    with pair() as (writer, reader):
        writer.enqueue("first")
        assert reader.dequeue() == "first"
        for size in (10, 1000):
            writer.enqueue(b"l" * size)
            writer.enqueue("second")
            with reader.lease() as obj:
                assert obj == b"l" * size
                other = Thread(reader.dequeue, 20)
                eventually(lambda: bool(reader.held.lock.waiting), "the thread to wait for its turn")
                with pytest.raises(RoleError, match="wait for itself"):
                    reader.dequeue()
                assert other.running
            assert other.result() == "second"


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


def test_a_writer_that_waits_is_woken_when_it_ends() -> None:
    with pair(chunks=2, chunk=1 << 20) as (writer, reader):
        for size in (10, 5000, LARGE):
            writer.enqueue("first")
            assert reader.dequeue() == "first"
            writer.enqueue(bytes(size))
            writer.enqueue("second")
            sending = Thread(writer.enqueue, "third", 20)
            eventually(lambda: writer.stats().parks > 0, "the writer to park")
            with reader.lease() as obj:
                assert len(obj) == size
                del obj
            sending.result()
            assert [reader.dequeue(20), reader.dequeue(20)] == ["second", "third"]
