"""How queues that are merged begin and end: not ready, closed, killed, damaged; the others go on."""

from __future__ import annotations

import asyncio
import pickle
import signal
from typing import Any

import pytest
from children import child
from merging import BIG, asleep, outcome, poller_of, queues
from overflowing import BOTH_WAYS, cut_lifelines, withhold
from receiving import Decoded
from slots import slot_of
from support import cancelled_after, raising

from aioshm import (
    CodecError,
    CorruptSlot,
    HandleError,
    MessageQueue,
    MessagesLost,
    PeerDied,
    ReaderEvicted,
    SharedMemoryError,
)
from aioshm.queue.merge import Merged, merge


async def _rest(merged: Merged) -> list[tuple[int, Any]]:
    async with asyncio.timeout(20):
        return [item async for item in merged]


class TestAttaching:
    async def test_readers_that_are_not_ready_are_made_ready(self) -> None:
        async with queues(2, 1, ready=False) as (writers, readers):
            merged = merge(readers, errors="yield")
            waiting = asyncio.ensure_future(anext(merged))
            await asyncio.gather(*(writer.wait_until_ready(10) for writer in writers))
            await writers[2].enqueue("first")
            assert await waiting == (2, "first")
            for rank, writer in enumerate(writers):
                await writer.enqueue(rank)
            assert sorted([await anext(merged) for _ in range(3)]) == [(0, 0), (1, 1), (2, 2)]
            assert all(reader.stats().ready for reader in readers.values())

    async def test_giving_up_leaves_no_task(self) -> None:
        async with queues(2, 1, ready=False) as (writers, readers):
            merged = merge(readers, errors="yield")
            for turns in range(8):
                assert await cancelled_after(anext(merged), turns) is None
            await asyncio.gather(*(end.wait_until_ready(10) for end in [*writers, *readers.values()]))
            tasks = asyncio.all_tasks()
            await writers[2].enqueue("here")
            assert await anext(merged) == (2, "here")
            assert asyncio.all_tasks() == tasks

    @pytest.mark.slow_on_uvloop
    async def test_one_that_is_closed_while_it_attaches(self) -> None:
        async with queues(2, 1, ready=False) as (_, readers):
            merged = merge(readers, errors="yield")
            waiting = await asleep(merged)
            for reader in readers.values():
                assert not waiting.done()
                await reader.aclose()
            with pytest.raises(StopAsyncIteration):
                await asyncio.wait_for(waiting, 5)

    @pytest.mark.slow_on_uvloop
    async def test_one_that_cannot_attach_is_reported(self) -> None:
        async with queues(1) as (writers, readers), child("write", "0", "0") as writer:
            handle = await writer.says("{")
            writer.signal(signal.SIGSTOP)
            async with MessageQueue.create_from_handle(handle, 0) as reader:
                merged = merge({4: reader, **readers}, errors="yield")
                waiting = await asleep(merged)
                await writers[0].enqueue(1)
                assert await waiting == (0, 1)
                waiting = await asleep(merged)
                writer.signal(signal.SIGKILL)
                rank, error = await outcome(waiting)
                assert rank == 4
                assert isinstance(error, (PeerDied, HandleError))
                assert merged.failed == {4: error}
                await writers[0].aclose()
                assert await _rest(merged) == []

    async def test_a_remote_one_whose_address_is_malformed_is_reported(self) -> None:
        async with queues(1, 1, ready=False) as (writers, readers):
            readers[1].end.source.start = raising(HandleError("not a handle: no such thing"))  # type: ignore[attr-defined]
            merged = merge(readers, errors="yield")
            rank, error = await anext(merged)
            assert (rank, str(error), merged.failed) == (1, "not a handle: no such thing", {1: error})
            waiting = asyncio.ensure_future(anext(merged))
            await writers[0].wait_until_ready(10)
            await writers[0].enqueue("on")
            assert await waiting == (0, "on")


class TestEnds:
    @pytest.mark.slow_on_uvloop
    async def test_a_killed_writer_is_reported_and_the_rest_goes_on(self) -> None:
        async with queues(1, 1) as (writers, readers), child("write", "5", "300000") as writer:
            async with MessageQueue.create_from_handle(await writer.says("{"), 0) as reader:
                await reader.wait_until_ready(20)
                await writer.says("written")
                await writer.kill()
                merged = merge({**readers, -3: reader})
                for number in range(5):
                    assert await anext(merged) == (-3, (number, bytes([number]) * 300_000))
                rank, error = await outcome(anext(merged))
                assert (rank, error.side, error.pid) == (-3, "writer", writer.pid)
                assert merged.failed == {-3: error}
                for number in range(10):
                    await writers[number % 2].enqueue(number)
                    assert await anext(merged) == (number % 2, number)
                merged.remove(1)
                merged.add(-3, readers[1])
                await writers[1].enqueue("replaced")
                assert await anext(merged) == (-3, "replaced")
                assert merged.failed == {}

    @pytest.mark.parametrize("slow", ["block", "skip"])
    async def test_one_that_is_dismissed_is_reported_once(self, slow: str) -> None:
        async with queues(2, slow_reader=slow) as (writers, readers):
            merged = merge(readers, errors="yield")
            await writers[1].enqueue("on")
            assert await anext(merged) == (1, "on")
            writers[0].dismiss(0)
            writers[1].enqueue_nowait(b"x" * BIG)  # so that the merge looks into both rings, before the loop runs
            items = [await anext(merged), await anext(merged)]
            await writers[1].aclose()
            items += await _rest(merged)
            assert sorted(rank for rank, _ in items) == [0, 1]
            assert isinstance(merged.failed[0], ReaderEvicted)

    @pytest.mark.parametrize("slow", ["block", "skip"])
    async def test_one_that_is_closed_between_two_messages_drops_out(self, slow: str) -> None:
        async with queues(2, slow_reader=slow) as (writers, readers):
            merged = merge(readers)
            await writers[0].enqueue("last")
            assert await anext(merged) == (0, "last")
            await readers[0].aclose()
            await writers[1].enqueue("on")
            assert await anext(merged) == (1, "on")
            await readers[1].aclose()
            assert await _rest(merged) == []

    @pytest.mark.parametrize("others", [1, 4])
    async def test_a_death_is_seen_beside_streams_that_never_end(self, others: int) -> None:
        async with queues(others + 1) as (writers, readers):
            queue: Any = writers[-1]
            await queue.enqueue("last words")
            cut_lifelines(queue)  # as the system does for a process that is killed
            for writer in writers[:-1]:
                writer.enqueue_nowait("flood")
            items = []
            merged = merge(readers, errors="yield")
            for _ in range(1000):
                rank, obj = await anext(merged)
                if rank < others:
                    writers[rank].enqueue_nowait("flood")
                else:
                    items.append(obj)
            assert items == ["last words", merged.failed[others]]


class TestDamage:
    @pytest.mark.parametrize("errors", ["raise", "yield"])
    async def test_a_damaged_slot_is_reported_and_its_queue_goes_on(self, errors: Any) -> None:
        async with queues(2) as (writers, readers):
            for number in range(3):
                await writers[0].enqueue(number)
                await writers[1].enqueue(number)
            slot_of(writers[0], 1)[8] ^= 0xFF  # its number
            merged = merge(readers, errors=errors)
            items = [await outcome(anext(merged)) for _ in range(6)]
            assert [rank for rank, _ in items] == [0, 1] * 3
            assert isinstance(items[2][1], CorruptSlot)
            assert errors == "raise" or items[2][1].__traceback__ is None, "it holds on to nothing"
            assert [obj for _, obj in items if isinstance(obj, int)] == [0, 0, 1, 2, 2]
            assert merged.failed == {}

    @pytest.mark.slow_on_uvloop
    @pytest.mark.parametrize(("n_remote", "errors"), [(0, "raise"), (1, "yield")])
    @pytest.mark.parametrize("size", [0, BIG])
    async def test_what_cannot_be_decoded_is_reported(self, n_remote: int, size: int, errors: Any) -> None:
        async with queues(2 - n_remote, n_remote) as (writers, readers):
            merged = merge(readers, errors=errors)
            for number in range(20):  # in both ways
                await writers[1].enqueue(pickle.PickleBuffer(b"x" * 2000) if number % 3 else number)
                await writers[1].enqueue(Decoded(fails=True, size=size))
                await anext(merged)
                rank, error = await outcome(anext(merged))
                assert (rank, type(error), type(error.__cause__)) == (1, CodecError, LookupError)
            assert merged.failed == {}

    async def test_messages_that_are_lost_are_reported(self) -> None:
        async with queues(1, 1) as (writers, readers):
            merged = merge(readers)
            waiting = await asleep(merged)
            readers[1].end.source.window.lose(2)  # type: ignore[attr-defined]
            for number in range(4):
                await writers[1].enqueue(number)
            rank, error = await outcome(waiting)
            assert (rank, error.first, error.last) == (1, 0, 1)
            assert [await anext(merged) for _ in range(2)] == [(1, 2), (1, 3)]
            assert merged.failed == {}

    @BOTH_WAYS
    async def test_an_overflow_that_is_late_holds_only_its_queue_up(self, way: str) -> None:
        async with queues(2, overflow=way) as (writers, readers):
            release = withhold(writers[0])
            await writers[0].enqueue(b"x" * BIG)
            merged = merge(readers, errors="yield")
            for number in range(20):
                await writers[1].enqueue(number)
                assert await anext(merged) == (1, number)
            waiting = await asleep(merged)
            parks = poller_of(merged).stats.parks
            await asyncio.sleep(0.1)
            assert poller_of(merged).stats.parks == parks, "it sleeps"
            release()
            assert await asyncio.wait_for(waiting, 5) == (0, b"x" * BIG)

    async def test_a_message_for_which_there_is_no_room_is_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with queues(2) as (writers, readers):
            await writers[0].enqueue(b"x" * BIG)
            merged = merge(readers, errors="yield")
            with monkeypatch.context() as patch:
                patch.setattr(readers[0].end.source.overflow, "body", raising(SharedMemoryError("no room")))  # type: ignore[attr-defined]
                for _ in range(3):
                    rank, error = await anext(merged)
                    assert (rank, type(error), merged.failed) == (0, SharedMemoryError, {})
            assert await anext(merged) == (0, b"x" * BIG)

    @BOTH_WAYS
    @pytest.mark.parametrize("closes", [True, False])
    async def test_an_overflow_that_never_comes_is_an_end(self, closes: bool, way: str) -> None:
        async with queues(2, overflow=way, remote_timeout=0.2) as (writers, readers):
            queue: Any = writers[0]
            withhold(queue)
            await queue.enqueue(b"x" * BIG)
            merged = merge(readers, errors="yield")
            waiting = await asleep(merged)
            if closes:
                await queue.aclose()
            cut_lifelines(queue)
            rank, error = await asyncio.wait_for(waiting, 5)
            assert (rank, type(error)) == (0, MessagesLost if closes else PeerDied)
            assert merged.failed == {0: error}
            await writers[1].aclose()
            assert await _rest(merged) == []
