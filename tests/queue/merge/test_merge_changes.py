"""Queues join and leave a merge while it is iterated over, and their errors come out of it, on both faces."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from faces import Thread
from faces import child as blocking_child
from merging import all_asleep, asleep, blocking_queues, queues, take
from receiving import Decoded
from support import eventually

from aioshm import CodecError, EndClosed, MessageQueue, PeerDied, QueueRestarted, RoleError, blocking, merge
from aioshm.queue.merge import Merged


class TestAdding:
    @pytest.mark.parametrize("remote", [False, True])
    async def test_one_that_is_added_to_a_merge_that_sleeps_wakes_it(self, remote: bool) -> None:
        async with queues(2 - remote, remote, ready=False) as (writers, readers):
            merged = merge({0: readers[0]})
            waiting = asyncio.ensure_future(anext(merged))
            await writers[0].wait_until_ready(20)
            await writers[0].enqueue("before", 20)
            assert await waiting == (0, "before")
            waiting = await asleep(merged)
            merged.add(7, readers[1])
            await writers[1].wait_until_ready(20)  # to which the waiting task has it attach
            await writers[1].enqueue("added", 20)
            assert await waiting == (7, "added")
            await writers[0].enqueue("still", 20)
            assert await anext(merged) == (0, "still")

    async def test_before_anything_is_iterated_over_and_to_nothing(self) -> None:
        async with queues(2) as (writers, readers):
            merged: Merged[Any] = merge({})
            assert [item async for item in merged] == []
            for rank, writer in enumerate(writers):
                merged.add(rank, readers[rank])
                await writer.enqueue(rank, 20)
            assert sorted([await anext(merged), await anext(merged)]) == [(0, 0), (1, 1)]

    async def test_what_cannot_be_added(self) -> None:
        async with queues(2) as (writers, readers):
            merged: Merged[Any] = merge({0: readers[0]})
            waiting = await asleep(merged)
            for rank, reader, error, text in (
                (0, readers[1], ValueError, r"rank 0 is taken by .*remove\(0\) first"),
                (1, readers[0], ValueError, "is there already, as rank 0"),
                ("1", readers[1], TypeError, "rank must be an int, not '1'"),
                (1, readers[1].end, TypeError, "reader must be a MessageQueue"),
                (1, writers[0], RoleError, "reader must be a reader; this is a writer"),
            ):
                with pytest.raises(error, match=text):
                    merged.add(rank, reader)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=r"rank 5 is not in this merge: there is \[0\]"):
                merged.remove(5)
            for call in (lambda: merged.add(1, readers[1]), lambda: merged.remove(0)):
                with pytest.raises(RoleError, match="another event loop"):
                    await asyncio.to_thread(call)
            with pytest.raises(ValueError, match='errors must be "raise" or "yield", not 1'):
                merge({}, errors=1)  # type: ignore[arg-type]
            assert not waiting.done()
            await writers[0].enqueue("on", 20)
            assert await waiting == (0, "on")
            await merged.aclose()
            with pytest.raises(EndClosed, match="merge the readers anew"):
                merged.add(1, readers[1])


class TestRemoving:
    @pytest.mark.parametrize("spins", [False, True])
    async def test_its_owner_is_woken_however_the_merge_goes_on(self, spins: bool) -> None:
        """The merge raises and lowers the flags of what it sleeps for, and no other flag."""
        async with queues(2, wait="adaptive" if spins else "park") as (writers, readers):
            merged = merge(readers)
            for number in range(10):
                waiting = await asleep(merged)
                merged.remove(1)
                direct = asyncio.ensure_future(readers[1].dequeue(20))
                await asyncio.sleep(0)
                await writers[0].enqueue(number, 20)
                assert await waiting == (0, number)
                await writers[1].enqueue(number, 20)
                assert await direct == number
                merged.add(1, readers[1])

    async def test_the_last_one_ends_the_iteration_which_one_that_is_added_begins_again(self) -> None:
        async with queues(2) as (writers, readers):
            merged = merge({0: readers[0]})
            waiting = await asleep(merged)
            merged.remove(0)
            with pytest.raises(StopAsyncIteration):
                await asyncio.wait_for(waiting, 20)
            merged.add(0, readers[1])
            await writers[1].enqueue("again", 20)
            assert await anext(merged) == (0, "again")


async def test_writer_that_comes_back_is_raised_once_and_its_queue_goes_on() -> None:
    def make() -> MessageQueue:
        return MessageQueue(1, 1, name="merged-again", max_chunk_bytes=4096, max_chunks=4)

    async with queues(1) as (writers, readers), MessageQueue.attach("merged-again", 0, reconnect=True) as reader:
        merged = merge(readers)
        merged.add(5, reader)
        for incarnation in range(3):
            async with make() as writer:
                sending = asyncio.ensure_future(writer.enqueue(incarnation, 20))
                if incarnation:
                    with pytest.raises(QueueRestarted) as caught:
                        await asyncio.wait_for(anext(merged), 20)
                    assert caught.value.rank == 5
                assert await asyncio.wait_for(anext(merged), 20) == (5, incarnation)
                await sending
                await writers[0].enqueue("steady", 20)
                assert await anext(merged) == (0, "steady")
        assert merged.failed == {}


class TestBlocking:
    def test_one_is_added_and_one_removed_while_a_thread_waits(self) -> None:
        with blocking_queues(3) as (writers, readers):
            merged = blocking.merge({0: readers[0], 1: readers[1]})
            waiting = Thread(take, merged, 2)
            all_asleep({0: readers[0], 1: readers[1]})
            merged.add(7, readers[2])
            writers[2].enqueue("added", 20)
            eventually(lambda: readers[2].messages == 1, "the message of the queue that was added")
            all_asleep(readers)
            merged.remove(1)
            writers[1].enqueue("its own", 20)
            assert readers[1].dequeue(20) == "its own"
            writers[0].enqueue("still", 20)
            assert waiting.result() == [(7, "added"), (0, "still")]

    def test_a_death_is_raised_once_with_the_rank_and_the_rest_goes_on(self) -> None:
        with blocking_queues(2) as (writers, readers), blocking_child("write", "2", "0") as dying:
            with blocking.MessageQueue.create_from_handle(dying.says('{"type"'), 0) as reader:
                merged = blocking.merge({**readers, 7: reader})
                assert take(merged, 2) == [(7, (0, b"")), (7, (1, b""))]
                dying.process.kill()
                with pytest.raises(PeerDied) as caught:
                    next(merged)
                assert (caught.value.rank, merged.failed) == (7, {7: caught.value})
                writers[1].enqueue("on", 20)
                assert next(merged) == (1, "on")
                writers[0].enqueue(Decoded(fails=True), 20)
                with pytest.raises(CodecError) as damage:
                    next(merged)
                assert damage.value.rank == 0
                merged.remove(7)
                assert merged.failed == {}
                with pytest.raises(ValueError, match="rank 7 is not in this merge"):
                    merged.remove(7)

    def test_a_storm_of_changes_loses_nothing(self) -> None:
        """Two threads iterate, one changes what is merged, and takes messages itself meanwhile."""
        with blocking_queues(3) as (writers, readers):
            count, stop = 200, threading.Event()
            received: dict[int, list[int]] = {rank: [] for rank in readers}
            lock = threading.Lock()
            merged = blocking.merge(readers)

            def note(rank: int, number: int) -> None:
                with lock:
                    received[rank].append(number)

            def iterate() -> None:
                for rank, number in merged:
                    note(rank, number)

            def write(rank: int) -> None:
                for number in range(count):
                    writers[rank].enqueue(number, 60)

            def change(choose: Callable[[int], int]) -> None:
                while not stop.is_set():
                    rank = choose(3)
                    merged.remove(rank)
                    if choose(2):
                        for number in readers[rank].dequeue_many(4, 60) if len(received[rank]) < count - 50 else ():
                            note(rank, number)
                    merged.add(rank, readers[rank])
                    stop.wait(choose(3) / 1000)

            threads = [Thread(iterate), Thread(iterate), *(Thread(write, rank) for rank in readers)]
            changing = Thread(change, random.Random(5).randrange)
            eventually(lambda: all(len(numbers) >= count for numbers in received.values()), "all messages")
            stop.set()
            changing.result()
            merged.close()
            for thread in threads:
                thread.result()
            assert all(sorted(numbers) == list(range(count)) for numbers in received.values())
