"""Streams of one worker of a group: its generators' items, in order, no further ahead than agreed, and ended early."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import Any

import numpy as np
import pytest
import worker_targets as targets
from iterating import END, WAYS, by_aclosing, by_for
from loops import turns
from support import cancelled

from aioshm import Options, QueueClosed, RequestAborted, WorkerDied, WorkerError
from aioshm.engine import Restart, WorkerGroup

pytestmark = pytest.mark.slow_on_uvloop

GENERATORS = ["count", "count_slowly"]
LEFT = ("GeneratorExit", "CancelledError")
"""The exceptions that end a generator: at a ``yield``, and at an ``await``."""


def group_of(n_workers: int = 1, **options: Any) -> WorkerGroup:
    return WorkerGroup(targets.Streaming, n_workers, **options)


async def ended(group: WorkerGroup, *ends: str, rank: int = 0) -> None:
    """Wait until a worker's generators have ended in these ways."""
    async with asyncio.timeout(30):
        while len(seen := (await group.call(rank, "state"))[1]) < len(ends):
            await asyncio.sleep(0.005)
    assert all(end == wanted or (wanted == "left" and end in LEFT) for end, wanted in zip(seen, ends, strict=True)), (
        seen
    )


async def is_idle_in_the_end(group: WorkerGroup) -> None:
    """Wait until everything has ended in the worker, and see that it is idle for the driver, too."""
    async with asyncio.timeout(30):
        while group._session.ranks[0].sent:
            await group.call(0, "add")
    assert await group.call_any("add", timeout=60) == 0


async def test_items_come_in_order_of_generators_of_either_kind_and_of_other_iterables() -> None:
    async with group_of(2) as group:
        for method in GENERATORS:
            for prefetch in (1, 2, 5, 100):
                stream = group.stream(1, method, 25, prefetch=prefetch)
                assert [item async for item in stream] == list(range(25))
        assert [item async for item in group.stream(None, "counting_later", 3)] == [0, 1, 2]
        assert [item async for item in group.stream(0, targets.Streaming.count, 0)] == []
        await ended(group, *["done"] * 8, rank=1)
        array = np.arange(100_000, dtype=np.float32)
        async for row in group.stream(0, "double", array[:3000].reshape(3, 1000)):
            assert row.shape == (1000,)


async def test_stream_taken_by_a_builtin_gives_items_and_the_end() -> None:
    async with group_of() as group:
        for way in WAYS:
            stream = group.stream(0, "count", 2)
            assert await way(stream) == 0, way
            if way not in (by_aclosing, by_for):  # these two end the stream
                assert await way(stream) == 1, way
                assert await way(stream) == END, way
            await stream.aclose()


async def test_two_streams_and_calls_run_side_by_side() -> None:
    async with group_of() as group:
        streams = [group.stream(0, method, 20, prefetch=2) for method in GENERATORS]
        for number in range(20):
            assert [await anext(stream) for stream in streams] == [number, number]
            assert await group.call(0, "add", number) == number
            assert await group.collective_rpc("add", (number,)) == [number]
        for stream in streams:
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        stream = group.stream(0, "wait_and_count", 3)
        for number in range(3):  # the generator awaits the event that the consumer's call sets
            item = asyncio.ensure_future(anext(stream))
            await group.call(0, "set_event")
            assert await item == number
        await stream.aclose()


async def test_a_worker_is_no_further_ahead_than_agreed() -> None:
    async with group_of() as group:
        for method in GENERATORS:
            stream = group.stream(0, method, None, prefetch=8)
            for taken in range(1, 30):
                assert await anext(stream) == taken - 1
            latest = -2
            async with asyncio.timeout(30):
                while latest != (latest := (await group.call(0, "state"))[0]):
                    await asyncio.sleep(0.02)
            assert 29 - 1 <= latest < 29 + 8
            await stream.aclose()
        await ended(group, "left", "left")


async def test_large_items_do_not_hold_up_other_calls() -> None:
    async with group_of(max_chunk_bytes=1 << 16, max_chunks=2) as group:
        stream = group.stream(0, "count", 20, size=1 << 20, prefetch=10)
        assert (await anext(stream))[0] == 0
        for number in range(20):  # the ring is full of large items
            assert await group.call(0, "add", number, timeout=60) == number
        assert [number async for number, _ in stream] == list(range(1, 20))


async def test_stream_left_early_closes_the_generator() -> None:
    async with group_of() as group:
        for method in GENERATORS:
            async for number in group.stream(0, method):
                if number == 3:
                    break
            async with aclosing(group.stream(0, method)) as stream:
                assert await anext(stream) == 0
            await group.stream(0, method).aclose()  # never begun
        await ended(group, *["left"] * 4)
        assert await group.call_any("state") == await group.call(0, "state")


async def test_stream_dropped_in_another_thread_closes_the_generator() -> None:
    async with group_of() as group:
        dropped = [group.stream(0, "count")]
        assert await anext(dropped[0]) == 0
        await asyncio.to_thread(dropped.clear)
        await is_idle_in_the_end(group)


async def test_consumer_that_is_cancelled_closes_the_generator_at_its_await() -> None:
    async with group_of() as group:
        stream = group.stream(0, "count_slowly", None, targets.LONG_S)
        consumer = asyncio.ensure_future(anext(stream))
        probe = group.stream(0, "watch", prefetch=1)
        await anext(probe)  # the stream before has begun
        await cancelled(consumer)
        await ended(group, "CancelledError")
        await probe.aclose()
        with pytest.raises(TimeoutError, match=r"^count_slowly: no answer from Worker_0 \(pid \d+\) within 0.05 s"):
            await anext(group.stream(0, "count_slowly", None, targets.LONG_S, timeout=0.05))
        await ended(group, "CancelledError", "CancelledError")


async def test_timeout_for_one_item_ends_nothing() -> None:
    async with group_of() as group:
        for method in GENERATORS:
            stream = group.stream(0, method, 3, prefetch=1, timeout=0.001)
            busy = asyncio.create_task(group.call(0, "slowly", 0.05))  # before its turn
            await asyncio.sleep(0)
            items: list[int] = []
            timeouts = 0
            while True:
                try:
                    items.append(await anext(stream))
                except TimeoutError:
                    timeouts += 1
                except StopAsyncIteration:
                    break
            assert items == [0, 1, 2]
            assert timeouts
            await busy
        await ended(group, "done", "done")
        busy = asyncio.create_task(group.call(0, "slowly", 0.3))
        await asyncio.sleep(0)
        stream = group.stream(None, "count", 2)
        with pytest.raises(TimeoutError, match=r"no idle worker.* within 0\.001 s"):
            await stream.next(timeout=0.001)
        with pytest.raises(ValueError, match="timeout must be"):
            await stream.next(-1)
        later = asyncio.create_task(group.call_any("state"))
        assert await stream.next(timeout=60) == 0
        assert await stream.next() == 1
        assert (await later)[0] == 1, "the call that came later went first"
        with pytest.raises(StopAsyncIteration):
            await stream.next(60)
        await busy
        await is_idle_in_the_end(group)


async def test_stream_that_was_left_raises_instead_of_ending() -> None:
    async with group_of() as group:
        for way in ("aclose", "cancelled", "aclose while it waits for its turn"):
            stream = group.stream(0, "count_slowly", None, 0.01, timeout=0.02)
            if way == "aclose while it waits for its turn":
                busy = asyncio.create_task(group.call(0, "slowly", 0.1))
                await asyncio.sleep(0)
                with pytest.raises(TimeoutError):
                    await anext(stream)
            else:
                with suppress(TimeoutError):
                    await anext(stream)
            if way == "cancelled":
                waiting = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
                while waiting.done():  # an item had arrived already
                    waiting = asyncio.ensure_future(anext(stream))
                    await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait([waiting])
            else:
                await stream.aclose()
            with pytest.raises(RequestAborted, match="count_slowly: the stream was left before its last item"):
                await anext(stream)
        await busy
        failing = group.stream(0, "count", 1, fail=True)
        assert await anext(failing) == 0
        for _ in range(2):
            with pytest.raises(WorkerError):
                await anext(failing)
        await is_idle_in_the_end(group)


async def test_stream_cancelled_at_any_moment_loses_no_item_of_another_stream() -> None:
    async with group_of() as group:
        other = group.stream(0, "count", prefetch=3)
        for number in range(40):
            taken: list[int] = []

            async def consume(method: str, taken: list[int]) -> None:
                async with aclosing(group.stream(0, method, prefetch=2)) as stream:
                    async for item in stream:
                        taken.append(item)

            consumer = asyncio.create_task(consume(GENERATORS[number % 2], taken))
            await turns(number // 2)
            await cancelled(consumer)
            assert taken == list(range(len(taken)))
            assert await anext(other) == number
        await other.aclose()
        await is_idle_in_the_end(group)


async def test_an_exception_comes_behind_the_items_before_it() -> None:
    async with group_of() as group:
        for method in GENERATORS:
            items = []
            with pytest.raises(WorkerError, match=f"{method} failed: rank 0: ValueError: rank 0 does") as caught:
                async for item in group.stream(0, method, 5, fail=True):
                    items.append(item)
            assert items == [0, 1, 2, 3, 4]
            assert "in fail\n" in caught.value.errors[0].traceback
        with pytest.raises(WorkerError, match="the result of a streamed method must be iterable, not int"):
            await anext(group.stream(0, "add"))
        with pytest.raises(WorkerError, match="AttributeError"):
            await anext(group.stream(0, "nothing_of_the_kind"))
        with pytest.raises(WorkerError, match="does not like it"):
            await anext(group.stream(0, "fail"))


async def test_items_that_cannot_be_sent_or_received_end_it() -> None:
    async with group_of(options=Options(max_message_bytes=100_000)) as group:
        for method, args in (("faulty_items", ("",)), ("count", (None, False, 100_000)), ("faulty_items", ("driver",))):
            with pytest.raises(WorkerError, match=r"CodecError|MessageTooLarge"):
                async for item in group.stream(0, method, *args):
                    assert item == 0
            if args != ("driver",):  # the worker has noticed the error
                assert "went on" not in (await group.call(0, "state"))[1]
        await is_idle_in_the_end(group)
        stream = group.stream(0, "close_badly", prefetch=1)
        assert await anext(stream) == 0
        await stream.aclose()
        assert await group.call_any("add", timeout=60) == 0


async def test_death_is_raised_after_earlier_items_and_ends_no_stream_of_another_worker() -> None:
    async with group_of(2, restart=Restart(max_restarts=1000, backoff_s=0.001)) as group:
        other = group.stream(1, "count")
        for how in ("SIGKILL", "_exit"):
            pid = await group.call(0, "pid", timeout=60)  # the second time of the replacement
            items = []
            with pytest.raises(WorkerDied, match=rf"pid {pid}\)"):
                async for item in group.stream(0, "count_and_end", 5, how, prefetch=100):
                    items.append(item)
            assert items == [0, 1, 2, 3, 4]
            assert await anext(other) == (0 if how == "SIGKILL" else 1)
        assert await group.call(0, "add", timeout=60) == 0
        await other.aclose()


@pytest.mark.parametrize(
    ("options", "error"), [({"prefetch": 0}, ValueError), ({"prefetch": "1"}, TypeError), ({"timeout": -1}, ValueError)]
)
async def test_bad_arguments_are_named_at_once(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        group_of().stream(None, "count", **options)
    with pytest.raises(ValueError, match="rank must be below 1, not 1"):
        group_of().stream(1, "count")


async def test_streams_end_with_their_group() -> None:
    async with group_of() as group:
        stream = group.stream(0, "count")
        assert await anext(stream) == 0
        unused = group.stream(0, "count")
    taken = 0
    with pytest.raises(QueueClosed, match="closed"):
        async for _ in stream:
            taken += 1
    assert taken < 16
    for _ in range(2):
        with pytest.raises(QueueClosed, match="the group of workers was closed"):
            await anext(unused)
