"""Giving up waiting on merged queues loses nothing, and who may not wait is told so."""

from __future__ import annotations

import asyncio
import os
import random
import weakref
from contextlib import suppress
from typing import Any

import pytest
from merging import BIG, asleep, poller_of, queues
from support import forked

from aioshm import RoleError
from aioshm.queue.merge import merge


class TestGivingUp:
    @pytest.mark.slow_on_uvloop
    async def test_random_cancellations_lose_nothing(self) -> None:
        rng = random.Random(1)
        async with queues(2, 1) as (writers, readers):
            merged = merge(readers)
            sent, received = [0, 0, 0], [0, 0, 0]

            def message(which: int, number: int) -> tuple[int, bytes]:
                return number, bytes([which]) * (BIG if number % 19 == 3 else number % 50)

            async def send() -> None:
                for _ in range(rng.randrange(4)):
                    which = rng.randrange(3)
                    await writers[which].enqueue(message(which, sent[which]))
                    sent[which] += 1

            async def receive(turns: int | None) -> bool:
                waiting = asyncio.ensure_future(anext(merged))
                for _ in range(1_000_000 if turns is None else turns):
                    if waiting.done():
                        break
                    await asyncio.sleep(0)
                waiting.cancel()
                with suppress(asyncio.CancelledError):
                    rank, obj = await waiting
                    assert obj == message(rank, received[rank])
                    received[rank] += 1
                    return True
                return False

            cancellations = 0
            while cancellations < 1000:
                sending = asyncio.ensure_future(send()) if rng.random() < 0.5 else None
                cancellations += not await receive(rng.randrange(8))
                while sending is not None and not sending.done():
                    await receive(50)
            while received != sent:
                await receive(None)
            await merged.aclose()
            for which in range(3):
                await writers[which].enqueue("direct")
                assert await readers[which].dequeue(5) == "direct"

    async def test_breaking_out_and_beginning_again(self) -> None:
        async with queues(3) as (writers, readers):
            fds = len(os.listdir("/proc/self/fd"))
            for number in range(6):
                merged = merge(readers)
                waiting = await asleep(merged)
                await writers[number % 3].enqueue(number)
                await waiting
                del waiting
                await writers[number % 3].enqueue(number)
                async for item in merged:
                    assert item == (number % 3, number)
                    poller_of(merged)._timer.arm(1 << 62)  # as a wait before a window does
                    break
                gone = weakref.ref(merged)
                del merged
                assert gone() is None, "nothing but the caller has kept it"
            assert len(os.listdir("/proc/self/fd")) == fds
            await writers[0].enqueue("direct")
            assert await readers[0].dequeue(5) == "direct"

    async def test_closing_it_ends_a_wait_and_leaves_the_readers(self) -> None:
        async with queues(2, 1) as (writers, readers):
            merged = merge(readers)
            waiting = [await asleep(merged), asyncio.ensure_future(anext(merged))]
            await asyncio.sleep(0)
            await writers[1].enqueue("kept")
            await merged.aclose()
            await merged.aclose()
            merged.remove(2)
            for each in waiting:
                with pytest.raises(StopAsyncIteration):
                    await asyncio.wait_for(each, 5)
            assert await readers[1].dequeue(5) == "kept"
            await writers[0].enqueue("direct")
            assert await readers[0].dequeue(5) == "direct"


def _is_refused(merged: Any) -> bool:
    """Return whether a forked child, which also forgets the merge, is refused."""
    try:
        merged._loop = None
        merged._take(merged._running[0])
    except RoleError as error:
        return "forked" in str(error)
    finally:
        merged.__del__()
    return False


class TestRefusals:
    async def test_arguments(self) -> None:
        async with queues(2) as (writers, readers):
            for wrong, error, named in [
                ([readers[0]], TypeError, "mapping"),
                ({"0": readers[0]}, TypeError, "keys"),
                ({True: readers[0]}, TypeError, "keys"),
                ({0: "queue"}, TypeError, r"readers\[0\]"),
                ({7: writers[0]}, RoleError, r"readers\[7\] must be a reader"),
                ({0: readers[0], 5: readers[0]}, ValueError, r"readers\[0\] and readers\[5\]"),
            ]:
                with pytest.raises(error, match=named):
                    merge(wrong)  # type: ignore[arg-type]
            assert repr(merge(readers)) == "<Merged of 2 queues>"

    async def test_a_reader_that_another_merge_waits_for(self) -> None:
        async with queues(3) as (writers, readers):
            one, other = merge({0: readers[0], 1: readers[1]}), merge({2: readers[2], 1: readers[1]})
            waiting = await asleep(one)
            for _ in range(2):
                with pytest.raises(RoleError, match="another merge is waiting"):
                    await anext(other)
            await writers[1].enqueue("first")
            assert await waiting == (1, "first")
            await writers[1].enqueue("second")
            assert await anext(other) == (1, "second"), "the first one does not wait any more"
            await writers[0].enqueue("third")
            assert await anext(one) == (0, "third")

    async def test_another_thread(self) -> None:
        async with queues(2) as (writers, readers):
            begun, fresh = merge(readers), merge(readers)
            await writers[0].enqueue(0)
            assert await anext(begun) == (0, 0)
            await writers[0].enqueue(1)
            errors: list[BaseException] = []

            async def receive() -> None:
                for merged in (begun, fresh):
                    with pytest.raises(RoleError, match="belongs to another") as caught:
                        await anext(merged)
                    errors.append(caught.value)

            await asyncio.to_thread(asyncio.run, receive())
            assert len(errors) == 2
            assert await anext(begun) == (0, 1)

    async def test_a_forked_child(self) -> None:
        async with queues(2) as (writers, readers):
            merged = merge(readers)
            waiting = await asleep(merged)
            poller_of(merged)._timer.arm(1 << 62)
            assert forked(_is_refused, merged)()
            await writers[1].enqueue("kept")
            assert await waiting == (1, "kept")
            await merged.aclose()
