"""One stream out of many queues: fair, in order, and asleep while there is nothing."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from merging import BIG, asleep, poller_of, queues
from support import bystander

from aioshm import RoleError
from aioshm.queue.merge import merge
from aioshm.queue.state import YIELD_AFTER_MESSAGES


class TestTurns:
    async def test_queues_that_are_full_take_turns(self) -> None:
        async with queues(3, chunks=100) as (writers, readers):
            for number in range(100):
                for writer in writers:
                    writer.enqueue_nowait(number)
            merged = merge(readers)
            items = [await anext(merged) for _ in range(300)]
            assert [rank for rank, _ in items] == [0, 1, 2] * 100
            assert [number for _, number in items] == [number for number in range(100) for _ in range(3)]

    async def test_a_queue_that_is_always_full_starves_nobody(self) -> None:
        async with queues(4, 1) as (writers, readers):
            for _ in range(4):
                writers[0].enqueue_nowait("flood")
            rng = random.Random(1)
            expected: int | None = None
            since = 0
            async for rank, obj in merge(readers):
                if rank == 0:
                    writers[0].enqueue_nowait("flood")
                    since += 1
                else:
                    assert (rank, obj) == (expected, "one")
                    assert since <= 1, "each has its turn in each round"
                    expected = None
                if expected is None:
                    expected, since = rng.randrange(1, 4), 0
                    writers[expected].enqueue_nowait("one")
                if writers[0].stats().messages > 1000:
                    break

    async def test_large_messages_have_their_turns_too(self) -> None:
        async with queues(2, chunks=64) as (writers, readers):
            for number in range(40):
                writers[0].enqueue_nowait(number)
                writers[1].enqueue_nowait(bytes([number]) * BIG)
            merged = merge(readers)
            await anext(merged)  # which has let the overflow segments arrive
            items = [await anext(merged) for _ in range(79)]
            assert [rank for rank, _ in items] == [1, 0] * 39 + [1]
            assert [obj for rank, obj in items if rank] == [bytes([number]) * BIG for number in range(40)]

    @pytest.mark.slow_on_uvloop
    @pytest.mark.parametrize("wait", ["adaptive", "spin", "park"])
    async def test_each_queue_keeps_its_order(self, wait: str) -> None:
        async with queues(3, 2, wait=wait) as (writers, readers):

            async def send(which: int) -> None:
                rng = random.Random(which)
                for number in range(150):
                    await writers[which].enqueue((number, bytes(BIG if rng.random() < 0.05 else number)), 10)
                    if rng.random() < 0.3:
                        await asyncio.sleep(rng.random() * 0.002)
                await writers[which].aclose()

            sending = [asyncio.ensure_future(send(which)) for which in range(5)]
            logs: dict[int, list[int]] = {rank: [] for rank in readers}
            async for rank, (number, _) in merge(readers):
                logs[rank].append(number)
            await asyncio.gather(*sending)
            assert logs == {rank: list(range(150)) for rank in readers}

    async def test_the_loop_goes_on_beside_a_stream_that_never_ends(self) -> None:
        async with queues(3) as (writers, readers):
            for writer in writers:
                writer.enqueue_nowait("flood")
            async with bystander() as other:
                merged = merge(readers)
                for number in range(1600):
                    rank, _ = await anext(merged)
                    writers[rank].enqueue_nowait("flood")
                    if number == 0:
                        other.turns = 0
                assert other.turns >= 1600 // YIELD_AFTER_MESSAGES - 1


class TestSleeping:
    async def test_one_sleep_for_all(self) -> None:
        async with queues(3, 1) as (writers, readers):
            tasks = asyncio.all_tasks()
            merged = merge(readers)
            waiting = await asleep(merged)
            poller = poller_of(merged)
            await asyncio.sleep(0.1)
            assert asyncio.all_tasks() - tasks == {waiting}
            assert poller.stats.parks == 1, "nothing wakes it"
            rings: list[Any] = [writer.end.ring.ring for writer in writers[:3]]  # type: ignore[attr-defined]
            assert [ring.readers_parked[0] for ring in rings] == [1, 1, 1]
            await writers[1].enqueue("here")
            assert await waiting == (1, "here")
            assert [ring.readers_parked[0] for ring in rings] == [0, 0, 0]

    async def test_closing_wakes_it(self) -> None:
        async with queues(2, 1) as (writers, readers):
            merged = merge(readers)
            waiting = await asleep(merged)
            await readers[0].aclose()
            await writers[2].aclose()
            await asyncio.sleep(0.01)
            assert not waiting.done()
            assert readers[0].end.state.dismantled, "nobody is left in its line"  # type: ignore[attr-defined]
            await writers[1].enqueue("last")
            assert await waiting == (1, "last")
            waiting = await asleep(merged)
            await readers[1].aclose()
            with pytest.raises(StopAsyncIteration):
                await asyncio.wait_for(waiting, 5)
            assert merged.failed == {}

    async def test_after_a_lease(self) -> None:
        async with queues(2, chunk=1 << 20) as (writers, readers):
            await writers[0].enqueue(bytearray(600_000))
            await writers[0].enqueue("next")
            merged = merge(readers)
            async with readers[0].lease(5) as leased:
                with pytest.raises(RoleError, match="inside of a block"):
                    await anext(merged)
            assert await anext(merged) == (0, "next")
            assert bytes(leased) == bytes(600_000)

    async def test_a_lease_that_another_task_holds(self) -> None:
        async with queues(2) as (writers, readers):
            await writers[0].enqueue("leased")
            merged = merge(readers)
            let_go = asyncio.Event()

            async def hold() -> None:
                async with readers[0].lease(5):
                    await let_go.wait()

            holding = asyncio.ensure_future(hold())
            await asyncio.sleep(0)
            await writers[0].enqueue("next")
            waiting = await asleep(merged)
            await writers[1].enqueue("other")
            assert await waiting == (1, "other")
            waiting = await asleep(merged)
            let_go.set()
            assert await waiting == (0, "next")
            await holding

    async def test_another_tasks_call_waits_in_line(self) -> None:
        async with queues(2) as (writers, readers):
            merged = merge(readers)
            waiting = await asleep(merged)
            direct = asyncio.ensure_future(readers[0].dequeue(5))
            await asyncio.sleep(0.01)
            await writers[0].enqueue("first")
            assert await waiting == (0, "first")
            waiting = await asleep(merged)
            await writers[0].enqueue("second")
            assert await direct == "second"
            await writers[0].enqueue("third")
            assert await waiting == (0, "third")

    async def test_two_tasks_get_different_messages(self) -> None:
        async with queues(3, 1) as (writers, readers):
            merged = merge(readers)
            received: list[Any] = []

            async def receive() -> None:
                async for item in merged:
                    received.append(item)

            receiving = [asyncio.ensure_future(receive()) for _ in range(3)]
            for number in range(200):
                await writers[number % 4].enqueue(number, 5)
                if number % 10 == 0:
                    await asyncio.sleep(0)
            for writer in writers:
                await writer.aclose()
            await asyncio.gather(*receiving)
            assert sorted(received) == sorted((number % 4, number) for number in range(200))
