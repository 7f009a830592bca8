"""Readers that come after all were ready: in the place of one that is gone, or in one that nobody has had."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
from contextlib import AsyncExitStack
from typing import Any

import pytest
from children import child
from faces import Thread, make_writer
from pairs import EITHER_PLACE
from remotes import ready_ends, wide_writer
from replacing import becomes, bereaved, joined, received
from support import until

from aioshm import (
    ChangesLost,
    HandleError,
    MessageQueue,
    NoPlaceVacant,
    Options,
    PeerClosed,
    PeerDied,
    ReaderDied,
    ReaderEvicted,
    ReaderJoined,
    ReaderLeft,
    blocking,
)
from aioshm.queue.ends.writer import Writer
from aioshm.queue.membership import KEPT_CHANGES

LARGE = 20_000
"""Bytes that do not fit a chunk here."""


async def test_changes_are_told_in_order_whatever_comes_in_between() -> None:
    """A newcomer is told of a turn of the loop after it was admitted; who is dismissed meanwhile has come before."""
    async with wide_writer(1, 0, max_readers=2) as writer, MessageQueue.create_from_handle(writer.export_handle(), 0):
        await writer.wait_until_ready(20)
        changes = writer.membership(20)
        newcomer = MessageQueue.create_from_handle(writer.export_handle(), 1)
        assert isinstance(writer.end, Writer)
        while writer.end.registry.slots[1].reader is None:
            await asyncio.sleep(0)
        writer.dismiss(1)
        told = [await anext(changes), await anext(changes)]
        await newcomer.aclose()
    assert [type(change) for change in told] == [ReaderJoined, ReaderLeft]


class TestReplaced:
    """Its first message is the next one that is sent, whatever its predecessor had read."""

    @pytest.mark.parametrize(("remote", "backing"), [(0, "memfd"), (0, "named"), (2, "memfd")])
    async def test_after_it_left(self, remote: int, backing: Any) -> None:
        async with ready_ends(2 - remote, remote, backing=backing) as (writer, (patient, leaver)):
            changes = writer.membership(20)
            await writer.enqueue("before", 20)
            await leaver.aclose()
            await becomes(writer, 1, "left")
            taken = []
            for number in range(10):
                await writer.enqueue(number, 20)
                taken.append(await patient.dequeue(20))
            async with joined(writer, 1) as newcomer:
                await writer.enqueue("after", 20)
                assert await newcomer.dequeue(20) == "after"
                assert newcomer.stats().messages == 12, "numbers are those of all messages"
                assert taken + await received(patient, 2) == ["before", *range(10), "after"]
                assert await anext(changes) == ReaderLeft(1, os.getpid(), 0)
                assert await anext(changes) == ReaderJoined(1, os.getpid(), 11)
                info = writer.readers[1]
                assert (info.rank, info.pid, info.host, info.state) == (1, os.getpid(), platform.node(), "attached")

    @pytest.mark.parametrize("overflow", ["segments", "zmq"])
    async def test_what_does_not_fit_a_chunk_reaches_it(self, overflow: Any) -> None:
        async with ready_ends(2, 0, overflow=overflow) as (writer, (patient, leaver)):
            for size in (LARGE, 2 * LARGE):
                await writer.enqueue(bytes(size), 20)
            for reader in (patient, leaver):
                assert list(map(len, await received(reader, 2))) == [LARGE, 2 * LARGE]
            await leaver.aclose()
            await becomes(writer, 1, "left")
            async with joined(writer, 1) as newcomer:
                for size in (LARGE, 3 * LARGE, 2 * LARGE):
                    await writer.enqueue(bytes(size), 20)
                for reader in (patient, newcomer):
                    assert list(map(len, await received(reader, 3))) == [LARGE, 3 * LARGE, 2 * LARGE]

    async def test_while_a_slot_is_being_filled(self) -> None:
        async with ready_ends(2, 0, codec="raw") as (writer, (patient, leaver)):
            await leaver.aclose()
            await becomes(writer, 1, "left")
            async with writer.acquire_write(20, nbytes=1) as room:
                async with MessageQueue.create_from_handle(writer.export_handle(), 1) as newcomer:
                    await newcomer.wait_until_ready(20)
                    room[:] = b"x"
                    assert newcomer.stats().messages == 0, "its first message is this one"
            assert bytes(await patient.dequeue(20)) == b"x"

    def test_on_the_blocking_face(self) -> None:
        with blocking.MessageQueue(1) as writer:
            handle = writer.export_handle()

            def read_one() -> Any:
                with blocking.MessageQueue.create_from_handle(handle) as reader:
                    return reader.dequeue(20)

            first = Thread(read_one)
            writer.wait_until_ready(20)
            changes = writer.membership(20)
            writer.enqueue(0, 20)
            assert first.result() == 0
            assert isinstance(next(changes), ReaderLeft)
            second = Thread(read_one)
            joining = next(changes)
            assert isinstance(joining, ReaderJoined)
            assert joining.first == 1
            writer.enqueue(1, 20)
            assert second.result() == 1
            with pytest.raises(PeerClosed):
                while True:
                    writer.enqueue(2, 20)
            third = Thread(read_one)
            while writer.readers[0].state != "attached":
                pass
            writer.enqueue(3, 20)
            assert third.result() == 3
            with pytest.raises(TimeoutError, match="no reader has attached, left or died in time"):
                for _ in writer.membership(0.01):
                    pass
        assert list(writer.membership()) == []
        assert writer.readers == ()


@pytest.mark.slow_on_uvloop
@EITHER_PLACE
@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "dismissed"])
async def test_error_of_a_death_ends_when_the_reader_is_replaced(n_local: int, n_remote: int, replaced: bool) -> None:
    async with bereaved(n_local, n_remote) as (writer, patient, pid), AsyncExitStack() as stack:
        await becomes(writer, 1, "died")
        for _ in range(2):
            with pytest.raises(PeerDied, match=str(pid)) as caught:
                await writer.enqueue("x", 20)
            assert caught.value.rank == 1
        readers = [patient]
        if replaced:
            readers.append(await stack.enter_async_context(joined(writer, 1)))
        else:
            writer.dismiss(1)
        for number in range(9):
            await writer.enqueue(number, 20)
            assert [await reader.dequeue(20) for reader in readers] == [number] * len(readers)


class TestDismiss:
    @EITHER_PLACE
    async def test_one_that_lives(self, n_local: int, n_remote: int) -> None:
        async with ready_ends(2 * n_local, 2 * n_remote, remote_window=4) as (writer, (patient, idle)):
            changes = writer.membership(20)
            for number in range(4):
                await writer.enqueue(number, 20)
                assert await patient.dequeue(20) == number
            waiting = asyncio.ensure_future(writer.enqueue(4))
            await asyncio.sleep(0)
            assert not waiting.done()
            writer.dismiss(1)
            await asyncio.wait_for(waiting, 20)
            for _ in range(2):
                with pytest.raises(ReaderEvicted, match="the writer has dismissed this reader"):
                    await received(idle, 6 if n_remote else 1)  # a remote reader has received some before
            left = await anext(changes)
            assert isinstance(left, ReaderLeft)
            assert (left.rank, left.evicted) == (1, True)
            if n_local:
                evicted = rf"rank 1 is taken: its reader \(pid {os.getpid()} was evicted\)"
                with pytest.raises(HandleError, match=evicted):
                    async with joined(writer, 1):
                        pass
            await idle.aclose()
            async with joined(writer, 1) as newcomer:
                await writer.enqueue(5, 20)
                assert await newcomer.dequeue(20) == 5
                assert await received(patient, 2) == [4, 5]

    async def test_in_the_middle_of_a_lease(self) -> None:
        """What the evicted one gives back does not count for its successor."""
        async with ready_ends(2, 0) as (writer, (patient, idle)):
            await writer.enqueue(0, 20)
            async with idle.lease():
                writer.dismiss(1)
            for number in range(1, 9):
                assert await patient.dequeue(20) == number - 1
                await writer.enqueue(number, 20)
            with pytest.raises(ReaderEvicted):
                await idle.dequeue(20)

    @EITHER_PLACE
    async def test_one_that_never_came(self, n_local: int, n_remote: int) -> None:
        async with wide_writer(2 * n_local, 2 * n_remote) as writer:
            waiting = asyncio.ensure_future(writer.wait_until_ready(20))
            async with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
                await becomes(writer, 0, "attached")
                writer.dismiss(1)
                await waiting
                for number in range(9):
                    await writer.enqueue(number, 20)
                    assert await reader.dequeue(20) == number

    async def test_nobodys_rank(self) -> None:
        async with wide_writer(1, 1) as writer:
            with pytest.raises(ValueError, match=r"rank must be a reader's, one of \(0, 1\), not 2"):
                writer.dismiss(2)
        with pytest.raises(Exception, match="this end was closed"):
            writer.dismiss(0)

    def test_while_another_thread_waits_for_it(self) -> None:
        with make_writer(1, chunks=1) as writer:
            handle = writer.export_handle()
            attached = Thread(lambda: blocking.MessageQueue.create_from_handle(handle, 0))
            with attached.result() as reader:
                ready = Thread(reader.wait_until_ready, 20)
                writer.wait_until_ready(20)
                ready.result()
                writer.enqueue(0, 20)
                waiting = Thread(writer.enqueue, 1, 60)
                while writer.held.lock.owner == 0:
                    pass
                writer.dismiss(0)
                with pytest.raises(PeerClosed, match="every reader has left"):
                    waiting.result()


class TestMaxReaders:
    async def test_nobody_waits_for_them(self) -> None:
        async with wide_writer(1, 0, max_readers=3) as writer:
            handle = writer.export_handle()
            async with MessageQueue.create_from_handle(handle) as reader:
                await writer.wait_until_ready(20)
                await writer.enqueue(0, 20)
                async with joined(writer) as second, joined(writer) as third:
                    assert [end.stats().rank for end in (reader, second, third)] == [0, 1, 2]
                    who = ", ".join(rf"rank {rank} by pid {os.getpid()}, which lives \(\w+\)" for rank in range(3))
                    with pytest.raises(NoPlaceVacant, match=f"no place is vacant: {who}"):
                        async with joined(writer):
                            pass
                    await writer.enqueue(1, 20)
                    assert await second.dequeue(20) == await third.dequeue(20) == 1
                    await second.aclose()
                    await becomes(writer, 1, "left")
                    async with joined(writer) as again:
                        assert again.stats().rank == 1, "the lowest that is vacant"
                assert await received(reader, 2) == [0, 1]

    @pytest.mark.parametrize("far", [False, True], ids=["local", "remote"])
    async def test_of_a_queue_that_waits_for_nobody(self, far: bool) -> None:
        async with wide_writer(0, 0, max_readers=2, connect_ip="127.0.0.1") as writer:
            for number in range(9):
                await writer.enqueue(number, 20)
            async with joined(writer, far=far) as reader:
                await writer.enqueue(9, 20)
                assert await reader.dequeue(20) == 9
                assert reader.stats().messages == 10
            await becomes(writer, 0, "left")
            for number in range(9):
                await writer.enqueue(number, 20)
            assert writer.stats().kept == 0

    @pytest.mark.parametrize(("n_reader", "most"), [(2, 1), (0, 1 << 17), (1, -1), (1, "2")])
    async def test_out_of_range(self, n_reader: int, most: Any) -> None:
        with pytest.raises((ValueError, TypeError), match="max_readers"):
            MessageQueue(n_reader, n_reader, options=Options(max_readers=most))

    async def test_ranks_beside_those_that_were_chosen(self) -> None:
        async with MessageQueue(2, 2, [1, 3], options=Options(max_readers=4)) as writer:
            assert writer.export_handle().local_reader_ranks == (1, 3, 2, 4)


class TestHistory:
    @pytest.mark.parametrize(
        ("n_local", "n_remote", "sent", "wanted", "first"),
        [(1, 0, 6, wanted, first) for wanted, first in ((0, 6), (3, 3), (100, 2))]
        + [(0, 1, 9, wanted, first) for wanted, first in ((1, 8), (100, 5))],
    )
    async def test_comes_first(self, n_local: int, n_remote: int, sent: int, wanted: int, first: int) -> None:
        async with ready_ends(n_local, n_remote, max_readers=2, remote_history=4) as (writer, (reader,)):
            for number in range(sent):
                await writer.enqueue((number, b"in the slot"), 20)
                await reader.dequeue(20)
            await until(lambda: writer.stats().kept == 0, "all are acknowledged")
            changes = writer.membership(20)
            async with joined(writer, far=bool(n_remote), history=wanted) as newcomer:
                assert await anext(changes) == ReaderJoined(1, os.getpid(), first)
                numbers = [number for number, _ in await received(newcomer, sent - first)]
                assert numbers == list(range(first, sent))
                await writer.enqueue((sent, b""), 20)
                assert (await newcomer.dequeue(20))[0] == sent

    @pytest.mark.parametrize("overflow", ["segments", "zmq"])
    async def test_of_what_does_not_fit_a_chunk(self, overflow: Any) -> None:
        async with ready_ends(1, 0, max_readers=2, overflow=overflow) as (writer, (reader,)):
            for number in (0, 1):
                await writer.enqueue(bytes([number]) * LARGE, 20)
                await reader.dequeue(20)
            async with joined(writer, history=4) as newcomer:
                # The body of the first one is gone, in the place of which the second one lies.
                assert await received(newcomer, 1) == [bytes([1]) * LARGE]
                await writer.enqueue(2, 20)
                assert await newcomer.dequeue(20) == await reader.dequeue(20) == 2

    @pytest.mark.parametrize("history", [-1, "2", 1 << 63, None])
    async def test_out_of_range(self, history: Any) -> None:
        async with wide_writer(1, 0) as writer:
            with pytest.raises((ValueError, TypeError), match="history"):
                MessageQueue.create_from_handle(writer.export_handle(), 0, history=history)


class TestMembership:
    async def test_tells_who_comes_and_goes(self) -> None:
        async with wide_writer(1, 0, max_readers=2, on_reader_death="evict") as writer:
            handle, changes, me = writer.export_handle(), writer.membership(20), os.getpid()
            async with MessageQueue.create_from_handle(handle, 0) as reader:
                assert await anext(changes) == ReaderJoined(0, me, 0), "also before all are ready"
                await writer.wait_until_ready(20)
                await writer.enqueue(0, 20)
                async with child("idle", handle.to_json(), "1") as doomed:
                    assert await anext(changes) == ReaderJoined(1, doomed.pid, 1)
                    await writer.enqueue(1, 20)
                    infos = writer.readers
                    assert [(info.rank, info.pid, info.state, info.lag) for info in infos] == [
                        (0, me, "attached", 2),
                        (1, doomed.pid, "attached", 1),
                    ]
                    assert infos[0].host
                    assert infos[0].joined_at > 0
                    doomed.signal(signal.SIGKILL)
                    assert await anext(changes) == ReaderDied(1, doomed.pid, 1)
                await received(reader, 1)
                writer.dismiss(0)
                assert await anext(changes) == ReaderLeft(0, me, 1, evicted=True)
            async with joined(writer, 0):
                assert await anext(changes) == ReaderJoined(0, me, 2)
            assert await anext(changes) == ReaderLeft(0, me, 2)
            waiting = asyncio.ensure_future(anext(changes, None))
            await writer.aclose()
            assert await waiting is None, "the end of the iteration"
            assert [change async for change in changes] == []

    async def test_keeps_so_many(self) -> None:
        async with wide_writer(0, 0, max_readers=1) as writer:
            changes = writer.membership(20)
            await writer.wait_until_ready(20)
            for number in range(KEPT_CHANGES + 2):
                writer.end.registry.report(ReaderJoined(0, 1, number))  # type: ignore[union-attr]
            assert await anext(changes) == ChangesLost(2)
            assert await anext(changes) == ReaderJoined(0, 1, 2)
