"""``leases()``: each message is leased until the next one is asked for, and the last one until its loop is left."""

from __future__ import annotations

import asyncio
import gc
from contextlib import aclosing, nullcontext
from typing import Any

import numpy as np
import pytest
from faces import Thread, pair
from loops import turns
from pairs import attached
from support import until

from aioshm import EndClosed, MessageQueue, QueueEmpty, RoleError, blocking

LARGE = 600_000
"""More than `leases.VIEW_BYTES`."""


async def test_each_is_held_until_the_next_is_asked_for() -> None:
    async with attached(slots=8, chunks=8, chunk=1 << 20) as (writer, [reader]):
        await writer.enqueue_many([np.full(LARGE, number, np.uint8) for number in range(5)])
        held = []
        async for array in reader.leases():
            number = int(array[0])
            del array
            held.append((number, reader.stats().backlog))
            if number == 4:
                break
        assert held == [(0, 5), (1, 4), (2, 3), (3, 2), (4, 1)]
        assert reader.stats().backlog == 0
        assert await asyncio.wait_for(_echo(writer, reader), 30) == "echo", "a loop that was left holds nothing"


async def _echo(writer: MessageQueue[Any], reader: MessageQueue[Any]) -> Any:
    await writer.enqueue("echo")
    return await reader.dequeue()


class OddError(Exception):
    """What a loop's body raises."""


@pytest.mark.parametrize("large", [False, True])
async def test_a_loop_that_is_left_ends_its_lease(large: bool) -> None:
    async with attached(chunks=2, chunk=1 << 20) as (writer, [reader]):
        for number in range(4):
            await writer.enqueue(np.full(LARGE if large else 10, number, np.uint8), 30)
            with pytest.raises(OddError) if number % 2 else nullcontext():
                async for array in reader.leases():
                    assert array[0] == number
                    if number % 2:
                        raise OddError
                    break
            assert reader.stats().backlog == 0
        del array
        await asyncio.wait_for(_echo(writer, reader), 30)


async def test_one_with_a_name_ends_its_lease_when_it_is_closed_or_let_go_of() -> None:
    async with attached(slots=8) as (writer, [reader]):
        for how in range(3):
            await writer.enqueue_many(range(3))
            its = reader.leases()
            async for number in its:
                assert number == 0
                break
            with pytest.raises(RoleError, match="wait for itself"):
                await reader.dequeue()
            assert await anext(its) == 1
            if how == 0:
                await its.aclose()
                await its.aclose()
                assert await anext(its) == 2, "it may be gone on with"
                await its.aclose()
            elif how == 1:
                del its
                assert await reader.dequeue() == 2
            else:
                async with aclosing(its):
                    assert await anext(its) == 2
            with pytest.raises(QueueEmpty):
                reader.dequeue_nowait()


async def test_two_may_not_await_the_same_one() -> None:
    async with attached(slots=8) as (writer, [reader]):
        its = reader.leases()
        first = asyncio.ensure_future(anext(its))
        await turns(5)
        for call in (its.__anext__, its.aclose):
            with pytest.raises(RuntimeError, match="being leased already"):
                await call()
        await writer.enqueue("one")
        assert await asyncio.wait_for(first, 30) == "one"
        await its.aclose()


async def test_cancelled_it_loses_nothing() -> None:
    async with attached(slots=8) as (writer, [reader]):
        its = reader.leases()
        for number in range(20):
            waiting = asyncio.ensure_future(anext(its))
            await turns(number % 4)
            waiting.cancel()
            await asyncio.wait([waiting])
            await writer.enqueue(number)
            if waiting.cancelled():
                assert await asyncio.wait_for(anext(its), 30) == number
            else:
                assert waiting.result() == number
        await its.aclose()
        assert reader.stats().backlog == 0


async def test_a_loop_that_another_thread_lets_go_of() -> None:
    async with attached(slots=8) as (writer, [reader]):
        await writer.enqueue_many(range(2))
        box = [reader.leases()]
        assert await anext(box[0]) == 0
        await asyncio.to_thread(box.clear)
        gc.collect()
        await until(lambda: reader.stats().backlog == 1)
        assert await reader.dequeue() == 1


@pytest.mark.parametrize("remote", [False, True])
def test_blocking_ones_hold_each_until_the_next_is_asked_for(remote: bool) -> None:
    with pair(remote=remote) as (writer, reader):
        sizes = [10, 5000, 70_000, LARGE, 1 << 20]
        its = reader.leases()
        for turn in range(10):
            writer.enqueue((turn, np.full(sizes[turn % 5], turn, np.uint8)))
            number, array = next(its)
            assert number == turn
            assert (array == turn).all()
            for call in (reader.dequeue, lambda: reader.dequeue_many(1), lambda: reader.lease().__enter__()):
                with pytest.raises(RoleError, match="inside of a block that has its slot, and so would wait"):
                    call()
            del array
            if turn % 3 == 0:
                its.close()
                its.close()
                writer.enqueue("between")
                assert reader.dequeue(20) == "between"
        its.close()
        assert reader.stats().backlog == 0


@pytest.mark.parametrize("remote", [False, True])
def test_blocking_ones_that_are_left_end_their_lease(remote: bool) -> None:
    with pair(remote=remote) as (writer, reader):
        for turn in range(8):
            writer.enqueue(np.full(LARGE if turn % 4 > 1 else 10, turn, np.uint8))
            with pytest.raises(OddError) if turn % 2 else nullcontext():
                for array in reader.leases():
                    assert array[0] == turn
                    if turn % 2:
                        raise OddError
                    break
            del array
            writer.enqueue("between")
            assert reader.dequeue(20) == "between"

        def unfinished() -> Any:
            its = reader.leases()
            return next(its)

        writer.enqueue_many(range(2))
        assert [unfinished() for _ in range(2)] == list(range(2))


def test_a_blocking_loop_keeps_its_queue() -> None:
    with blocking.MessageQueue(1, 1, slots=2) as writer:
        handle = writer.export_handle()
        thread = Thread(lambda: [*blocking.MessageQueue.create_from_handle(handle, 0).leases()])
        for number in range(10):  # more than there are slots: the loop has to wait
            writer.enqueue(number, 20)
        with pytest.warns(ResourceWarning, match="local reader of queue .* was not closed"):
            writer.close()
            assert thread.result() == [*range(10)]
            gc.collect()


def test_a_blocking_end_that_is_closed_amid_a_loop() -> None:
    with pair() as (writer, reader):
        writer.enqueue_many(range(3))
        found = []
        for number in reader.leases():
            found.append(number)
            reader.close()
        assert found == [0]
        assert list(reader.leases()) == []
        with pytest.raises(EndClosed), reader.lease():
            pass
