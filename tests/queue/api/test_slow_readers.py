"""What becomes of readers that are too slow: waited for, evicted, or let lose the oldest; others lose nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pairs import attached
from receiving import dequeue, dequeue_many, dequeue_nowait, lease
from remotes import ready_ends, wide_writer
from replacing import becomes, lose_reader
from support import until

from aioshm import CodecError, MessageQueue, MessagesLost, Options, PeerClosed, QueueFull, ReaderEvicted, merge
from aioshm.errors import HandleError
from aioshm.queue.local import copying
from aioshm.queue.registry import ReaderRegistry, ReaderSlot

pytestmark = pytest.mark.slow_on_uvloop

CHUNKS = 4


@asynccontextmanager
async def three_ends(slow: Any, remote: int = 0) -> AsyncIterator[tuple[MessageQueue, MessageQueue, MessageQueue]]:
    """Give a ready writer, a reader that it waits for, and one that it need not wait for, to the block."""
    writer = wide_writer(2 - remote, remote, chunks=CHUNKS, remote_window=8)
    handle = writer.export_handle()
    patient = MessageQueue.create_from_handle(handle, 0, slow_reader="block")
    async with writer, patient, MessageQueue.create_from_handle(handle, 1, slow_reader=slow) as other:
        await asyncio.gather(*(end.wait_until_ready(20) for end in (writer, patient, other)))
        yield writer, patient, other


async def publish(writer: MessageQueue, patient: MessageQueue, numbers: range, size: int = 10) -> None:
    """Publish messages, each of which the reader that is waited for takes at once."""
    for number in numbers:
        await writer.enqueue((number, bytes([number % 256]) * size), 20)
        assert await patient.dequeue(20) == (number, bytes([number % 256]) * size)


async def received(reader: MessageQueue, end: int) -> list[int | tuple[int, int]]:
    """Return what a reader gets of messages up to an end: their numbers, and the runs of those that are lost."""
    got: list[int | tuple[int, int]] = []
    at = expected = 0
    while at < end:
        try:
            number, content = await reader.dequeue(20)
        except MessagesLost as lost:
            got.append((lost.first, lost.last))
            first, at = lost.first, lost.last + 1
        else:
            assert content == bytes([number % 256]) * len(content)
            got.append(number)
            first, at = number, number + 1
        assert first == expected, "nothing is left out"
        expected = at
    return got


class TestSkip:
    @pytest.mark.parametrize("size", [10, 3000, 50_000], ids=["inline", "large", "overflow"])
    async def test_the_oldest_are_lost_to_it_alone(self, size: int) -> None:
        async with three_ends("skip") as (writer, patient, other):
            await publish(writer, patient, range(50), size)
            assert await received(other, 50) == [(0, 45), 46, 47, 48, 49]
            await publish(writer, patient, range(50, 52), size)
            assert [(await other.dequeue(20))[0] for _ in range(2)] == [50, 51]
            assert writer.stats().readers == 2

    async def test_raw_slots(self) -> None:
        async with attached(chunks=CHUNKS, slow_reader="skip") as (writer, (reader,)):
            for number in range(10):
                async with writer.acquire_write(20) as chunk:
                    chunk[:1] = bytes([number])
            with pytest.raises(MessagesLost, match="messages 0 to 5 are lost: this reader was too slow"):
                await reader.dequeue(20)
            async with reader.acquire_read(20) as raw:
                assert (raw[0], len(raw), raw.readonly) == (6, 4096, True)
            async with reader.lease(20) as raw:
                assert (raw[0], raw.readonly) == (7, True)
            assert [(await reader.dequeue(20))[0] for _ in range(2)] == [8, 9]

    @pytest.mark.parametrize("size", [3000, 50_000])
    async def test_a_lease_holds_nobody_up_and_stays_what_it_is(self, size: int) -> None:
        async with three_ends("skip") as (writer, patient, other):
            await publish(writer, patient, range(1), size)
            async with other.lease(20) as (number, content):
                await publish(writer, patient, range(1, 30), size)
                assert (number, bytes(content)) == (0, bytes(size))
            assert bytes(content) == bytes(size)
            with pytest.raises(MessagesLost) as lost:
                await other.dequeue(20)
            assert (lost.value.first, lost.value.last) == (1, 25)
            assert [(await other.dequeue(20))[0] for _ in range(4)] == [26, 27, 28, 29]

    async def test_message_that_is_overwritten_while_it_is_copied_is_lost(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with attached(chunks=CHUNKS, slow_reader="skip") as (writer, (reader,)):

            def copy_a_lap_too_late(body: memoryview) -> Any:
                monkeypatch.undo()
                for number in range(1, CHUNKS + 1):
                    writer.enqueue_nowait((number, b""))
                return copying.own_copy(body)

            monkeypatch.setattr(copying, "own_copy", copy_a_lap_too_late)
            await writer.enqueue((0, bytes(50_000)), 20)
            assert await received(reader, CHUNKS + 1) == [(0, 0), 1, 2, 3, 4]

    async def test_error_of_the_codec_is_a_codec_error(self) -> None:
        class Failing:
            name = "failing"
            code = 77

            def encode(self, obj: bytes) -> Any:
                return [obj], [memoryview(bytes(9000))]

            def decode(self, main: Any, buffers: Any) -> bytes:
                if main == b"bad":
                    raise ValueError("bad")
                return bytes(main)

        async with ready_ends(1, 0, codec=Failing(), slow_reader="skip") as (writer, (reader,)):
            for receive in (dequeue, dequeue_nowait, dequeue_many, lease):
                await writer.enqueue_many([b"bad", b"good"], 20)
                with pytest.raises(CodecError, match="cannot decode a failing message: ValueError: bad"):
                    await receive(reader, timeout=20)
                assert await reader.dequeue_many(10**20, 20) == [b"good"]
            await writer.enqueue_many([b"bad", b"good"], 20)
            merged = merge({0: reader}, errors="yield")
            assert type((await anext(merged))[1]) is CodecError
            assert await anext(merged) == (0, b"good")

    async def test_after_the_writer_has_closed(self) -> None:
        async with three_ends("skip") as (writer, patient, other):
            await publish(writer, patient, range(6), 50_000)
            await writer.aclose()
            assert await received(other, 6) == [(0, 1), 2, 3, 4, 5]
            with pytest.raises(PeerClosed):
                await other.dequeue(20)

    @pytest.mark.parametrize("slow", ["skip", "block", "evict"])
    async def test_replacement_of_a_reader_that_died_laps_ago_gets_what_is_left(self, slow: Any) -> None:
        async with wide_writer(1, 0, chunks=CHUNKS, on_reader_death="hold", slow_reader="skip") as writer:
            await lose_reader(writer)
            await becomes(writer, 0, "held")
            for number in range(5 * CHUNKS):
                await writer.enqueue((number, b""), 20)
            async with MessageQueue.create_from_handle(writer.export_handle(), 0, slow_reader=slow) as heir:
                if slow != "block":
                    with pytest.raises(MessagesLost, match="messages 0 to 15 are lost"):
                        await heir.dequeue(20)
                assert [(await heir.dequeue(20))[0] for _ in range(4)] == [16, 17, 18, 19]

    async def test_a_reader_that_is_waited_for_is_waited_for(self) -> None:
        async with three_ends("skip") as (writer, patient, other):
            for number in range(CHUNKS):
                writer.enqueue_nowait((number, b""))
            with pytest.raises(QueueFull, match=r"no slot is free: rank 0 \(pid \d+, \w+\)$"):
                writer.enqueue_nowait("x")
            waiting = asyncio.ensure_future(writer.enqueue((CHUNKS, b"")))
            await asyncio.sleep(0)
            assert not waiting.done()
            assert (await patient.dequeue(20))[0] == 0
            await asyncio.wait_for(waiting, 20)
            assert [(await patient.dequeue(20))[0] for _ in range(CHUNKS)] == list(range(1, CHUNKS + 1))
            assert (await received(other, CHUNKS + 1))[-CHUNKS:] == list(range(1, CHUNKS + 1))


class TestEvict:
    async def test_who_is_a_ring_behind_is_evicted(self, caplog: pytest.LogCaptureFixture) -> None:
        async with three_ends("evict") as (writer, patient, other):
            await publish(writer, patient, range(CHUNKS))
            assert writer.stats().readers == 2
            await publish(writer, patient, range(CHUNKS, 20))
            assert writer.stats().readers == 1
            assert f"reader 1 (pid {os.getpid()}) was too slow and was evicted, {CHUNKS} messages behind" in caplog.text
            for _ in range(3):
                advice = r"<local reader .*>: too slow: .* more slots .* more max_chunks\) .* slow_reader='skip'"
                with pytest.raises(ReaderEvicted, match=advice):
                    await other.dequeue(20)
            with pytest.raises(ReaderEvicted):
                async for _ in other:
                    pass
            with pytest.raises(HandleError, match=rf"rank 1 is taken: its reader \(pid {os.getpid()} was evicted\)"):
                async with MessageQueue.create_from_handle(writer.export_handle(), 1) as late:
                    await late.dequeue(20)

    async def test_reader_that_receives_just_before_its_eviction_loses_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        evict_slow = ReaderRegistry.evict_slow
        async with three_ends("evict") as (writer, patient, other):
            got = []

            def receive_first(registry: ReaderRegistry, slot: ReaderSlot) -> None:
                got.append(other.dequeue_nowait()[0])
                evict_slow(registry, slot)

            monkeypatch.setattr(ReaderRegistry, "evict_slow", receive_first)
            await publish(writer, patient, range(CHUNKS + 1))
            assert got == [0]
            with pytest.raises(ReaderEvicted):
                await other.dequeue(20)

    async def test_the_last_reader(self) -> None:
        async with attached(chunks=CHUNKS, slow_reader="evict") as (writer, _):
            with pytest.raises(PeerClosed, match="every reader has left"):
                for number in range(CHUNKS + 2):
                    await writer.enqueue(number, 20)


async def test_slow_reader_other_than_block_is_refused_with_zeromq() -> None:
    with pytest.raises(ValueError, match="slow_reader='skip' does not go with overflow='zmq': use"):
        Options(slow_reader="skip", overflow="zmq")
    async with wide_writer(1, 0, overflow="zmq") as writer:
        with pytest.raises(ValueError, match="slow_reader='evict' does not go with overflow='zmq'"):
            MessageQueue.create_from_handle(writer.export_handle(), 0, slow_reader="evict")


class TestOverTheNetwork:
    async def test_skip(self) -> None:
        async with three_ends("skip", remote=2) as (writer, patient, other):
            await publish(writer, patient, range(40))
            await until(lambda: other.stats().messages + other.stats().backlog == 40, "the last one")
            got = await received(other, 40)
            lost = got[0]
            assert isinstance(lost, tuple)
            assert (lost[0], got[1:]) == (0, list(range(lost[1] + 1, 40)))
            assert len(got) in (9, 10), "a window of the newest"
            await publish(writer, patient, range(40, 43))
            assert [(await other.dequeue(20))[0] for _ in range(3)] == [40, 41, 42]

    async def test_evict(self, caplog: pytest.LogCaptureFixture) -> None:
        async with three_ends("evict", remote=2) as (writer, patient, other):
            await publish(writer, patient, range(8))
            with pytest.raises(QueueFull, match=r"the window of the remote readers is full: .*rank 1"):
                writer.enqueue_nowait("not now")
            await publish(writer, patient, range(8, 20))
            assert writer.stats().readers == 1
            assert "was too slow and was evicted, 8 messages behind" in caplog.text
            assert [(await other.dequeue(20))[0] for _ in range(8)] == list(range(8))
            with pytest.raises(ReaderEvicted, match="a larger remote_window allows longer pauses"):
                while True:
                    await other.dequeue(20)
