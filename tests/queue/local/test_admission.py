"""Readers that go before all are ready, at every moment: their places are free for others, and nothing was lost."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import msgspec
import pytest
from children import child
from faces import Thread
from pairs import EITHER_PLACE
from remotes import wide_writer
from support import cancelled_after, eventually, until

from aioshm import MessageQueue, PeerDied, blocking
from aioshm.process.proc import process_state


async def check(writer: MessageQueue, ranks: Sequence[int] = (0,), *others: MessageQueue, **own: Any) -> None:
    """Let new readers of these ranks, and others, find the writer, and pass a few messages."""
    async with AsyncExitStack() as stack:
        readers = list(others)
        for rank in ranks:
            reader = MessageQueue.create_from_handle(writer.export_handle(), rank, **own)
            readers.append(await stack.enter_async_context(reader))
        await asyncio.gather(*(end.wait_until_ready(20) for end in (writer, *readers)))
        for number in range(10):
            await writer.enqueue(number, 10)
            assert [await reader.dequeue(10) for reader in readers] == [number] * len(readers)


def pid_of(writer: Any, rank: int) -> int:
    """Return which process the writer has admitted for a rank; 0 for none."""
    slot = writer.end.registry.slots[rank]
    return 0 if slot.reader is None else slot.pid


def reaches(writer: Any, rank: int) -> bool:
    """Return whether a remote reader can be sent to."""
    reader = writer.end.registry.slots[rank].reader
    return bool(writer.end.network.sockets.reaches(reader.identity))


def missing(writer: Any) -> str:
    """Return whom the writer waits for, in words."""
    return ", ".join(writer.end.registry.missing())


class TestAReaderThatCloses:
    @pytest.mark.usefixtures("short_goodbye")
    @EITHER_PLACE
    async def test_before_the_writer_was_there(self, n_local: int, n_remote: int) -> None:
        async with wide_writer(n_local, n_remote) as writer:
            handle = writer.export_handle()
            for _ in range(2):
                async with MessageQueue.create_from_handle(handle, 0) as early:
                    with pytest.raises(TimeoutError):
                        await early.wait_until_ready(0.05)
            await check(writer)

    @EITHER_PLACE
    async def test_at_any_turn_of_the_loop(self, n_local: int, n_remote: int) -> None:
        """The writer waits all the time, one reader from the beginning, and one more comes last."""
        async with wide_writer(n_local * 3, n_remote * 3) as writer:
            handle = writer.export_handle()
            ready = asyncio.ensure_future(writer.wait_until_ready(60))
            async with MessageQueue.create_from_handle(handle, 1) as other:
                waiting = asyncio.ensure_future(other.wait_until_ready(60))
                for turns in [*range(12), 20, 40, 80]:
                    async with MessageQueue.create_from_handle(handle, 0) as early:
                        await cancelled_after(early.wait_until_ready(), turns)
                for proven in (False, True):
                    async with MessageQueue.create_from_handle(handle, 0) as early:
                        giving_up = asyncio.ensure_future(early.wait_until_ready())
                        await until(lambda: pid_of(writer, 0), "admission")
                        await until(lambda wanted=proven: not wanted or "rank 0" not in missing(writer), "proof")
                        giving_up.cancel()
                assert [ready.done(), waiting.done()] == [False, False]
                await check(writer, [0, 2], other)
                await asyncio.gather(ready, waiting)

    @EITHER_PLACE
    async def test_is_named_to_a_writer_that_waits(self, n_local: int, n_remote: int) -> None:
        async with wide_writer(n_local * 2, n_remote * 2) as writer:
            handle = writer.export_handle()
            ready = asyncio.ensure_future(writer.wait_until_ready(60))
            async with MessageQueue.create_from_handle(handle, 0) as early:
                giving_up = asyncio.ensure_future(early.wait_until_ready())
                await until(lambda: pid_of(writer, 0), "admission")
                giving_up.cancel()
            await until(lambda: "has left" in missing(writer), "the departure")
            ready.cancel()
            with pytest.raises(TimeoutError, match=r"rank 0 \(pid \d+.* has left\), rank 1$"):
                await writer.wait_until_ready(0.1)


@pytest.mark.slow_on_uvloop
class TestAReaderThatDies:
    async def test_before_the_writer_was_there_was_never_there(self) -> None:
        async with wide_writer(1, 0) as writer:
            handle = writer.export_handle()
            async with child("sleep_before_attaching", handle.to_json(), "0") as victim:
                await victim.says("dialled")
                await victim.kill()
            await check(writer)

    async def test_once_admitted_is_named_once_and_replaced(self) -> None:
        async with wide_writer(2, 0) as writer:
            handle = writer.export_handle()
            ready = asyncio.ensure_future(writer.wait_until_ready(60))
            async with child("collect", handle.to_json(), "1") as victim:
                await until(lambda: pid_of(writer, 1), "admission")
                await victim.kill()
            with pytest.raises(PeerDied, match="before all readers were ready") as caught:
                await ready
            assert (caught.value.rank, caught.value.pid, caught.value.side) == (1, victim.pid, "reader")
            with pytest.raises(TimeoutError, match=rf"rank 0, rank 1 \(pid {victim.pid} has died\)$"):
                await writer.wait_until_ready(0.05)
            await check(writer, [0, 1])

    async def test_once_admitted_and_replaced_at_once_is_not_named(self) -> None:
        async with wide_writer(1, 0) as writer:
            handle = writer.export_handle()
            with pytest.raises(TimeoutError):
                await writer.wait_until_ready(0)
            async with child("sleep_before_attaching", handle.to_json(), "0") as victim:
                await until(lambda: pid_of(writer, 0) == victim.pid, "admission")
                await victim.kill()
                async with MessageQueue.create_from_handle(handle, 0) as reader:
                    await until(lambda: pid_of(writer, 0) not in (0, victim.pid), "the successor's admission")
                    await check(writer, [], reader)

    async def test_unnoticed_is_noticed_before_all_are_said_to_be_ready(self) -> None:
        """The writer's loop stands still meanwhile."""
        async with wide_writer(1, 0) as writer:
            handle = writer.export_handle()
            with pytest.raises(TimeoutError):
                await writer.wait_until_ready(0)
            async with child("collect", handle.to_json(), "0") as victim:
                await until(lambda: pid_of(writer, 0) and not missing(writer), "proof")
                victim.signal(signal.SIGKILL)
                eventually(lambda: process_state(victim.pid) in {"zombie", "gone"}, "its end")
                with pytest.raises(PeerDied):
                    await writer.wait_until_ready(20)
                await victim.end()
            await check(writer)

    async def test_on_another_host_makes_way_for_the_next(self) -> None:
        async with wide_writer(0, 1) as writer:
            handle = writer.export_handle()
            for when in ("before the writer was there", "once admitted"):
                async with child("collect", handle.to_json(), "0") as victim:
                    if when == "once admitted":
                        with suppress(TimeoutError):
                            await writer.wait_until_ready(0)
                        await until(lambda pid=victim.pid: pid_of(writer, 0) == pid, "admission")
                        await until(lambda: missing(writer) == "", "proof")
                    else:
                        await asyncio.sleep(0.5)  # so that its greeting is likely to be there; either is to work
                    await victim.kill()
                    if when == "once admitted":  # until ZeroMQ knows of the death, all are ready: that is another case
                        await until(lambda: not reaches(writer, 0), "the end of its connection")
            await check(writer)

    async def test_on_another_host_is_named_once_if_nobody_comes(self) -> None:
        async with wide_writer(0, 1, remote_timeout=0.3) as writer:
            handle = writer.export_handle()
            with suppress(TimeoutError):
                await writer.wait_until_ready(0)
            async with child("attach_without_data", handle.to_json(), "0") as victim:
                await until(lambda: pid_of(writer, 0) == victim.pid, "admission")
                await victim.kill()
            with pytest.raises(PeerDied) as caught:
                await writer.wait_until_ready(20)
            assert (caught.value.rank, caught.value.pid) == (0, victim.pid)
            await check(writer, options=msgspec.structs.replace(handle.options, remote_timeout=10))


def test_a_reader_that_is_forgotten_leaves_its_place_free() -> None:
    """Its loop has ended, and nobody has closed it."""

    async def give_up(end: Any) -> None:
        with suppress(TimeoutError):
            await end.wait_until_ready(0.01)

    with blocking.MessageQueue(1, 1, max_chunk_bytes=4096, max_chunks=4, slots=4) as writer:
        handle = writer.export_handle()
        reader = MessageQueue.create_from_handle(handle, 0)
        asyncio.run(give_up(reader))
        with pytest.warns(ResourceWarning, match="was not closed"):
            del reader
            gc.collect()
        with blocking.MessageQueue.create_from_handle(handle, 0) as successor:
            sending = Thread(writer.enqueue, "hello", 20)
            assert successor.dequeue(20) == "hello"
            sending.result()
