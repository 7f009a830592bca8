"""What did not fit a chunk has not arrived, never will, or is not what a slot says: a typed error, and no hang."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from children import child
from overflowing import BOTH_WAYS, cut_lifelines, overflow_of, sockets_of_zeromq, withhold
from pairs import attached
from receiving import acquire_read, dequeue, dequeue_many, dequeue_nowait, lease
from slots import slot_of
from support import cancelled, descriptor_limit, eventually, raising

from aioshm import (
    CorruptSlot,
    MessageQueue,
    MessagesLost,
    Options,
    OutOfDescriptors,
    PeerDied,
    QueueCancelled,
    QueueEmpty,
    SharedMemoryError,
)
from aioshm.lifeline import sockets
from aioshm.queue.local import overflow_sockets
from aioshm.queue.local.overflow import pack_marker
from aioshm.queue.remote import wire
from aioshm.ring.layout import SLOT_HEADER_BYTES

BIG = 50_000


@asynccontextmanager
async def withheld(way: str, **options: Any) -> AsyncIterator[tuple[Any, MessageQueue, Callable[[], None]]]:
    """Give a queue to the block whose large message does not reach its reader until what is given with it is called."""
    async with attached(overflow=way, **options) as (writer, (reader,)):
        await writer.enqueue("all have subscribed")
        assert await reader.dequeue(5) == "all have subscribed"
        while way == "zmq" and not overflow_of(writer)._subscribed:
            await asyncio.sleep(0.001)
        release = withhold(writer)
        await writer.enqueue(b"x" * BIG)
        await writer.enqueue("next")
        yield writer, reader, release


@BOTH_WAYS
async def test_waiting_for_one_ends_when_it_arrives(way: str) -> None:
    async with withheld(way) as (_writer, reader, release):
        waiting = asyncio.ensure_future(reader.dequeue(20))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        release()
        assert await waiting == b"x" * BIG
        assert await reader.dequeue(5) == "next"


@BOTH_WAYS
async def test_giving_up_waiting_loses_nothing(way: str) -> None:
    async with withheld(way) as (_writer, reader, release):
        for timeout in (0, 0.01):
            for receive in (dequeue, dequeue_many, lease, acquire_read):
                with pytest.raises(TimeoutError, match="the body of message 1"):
                    await receive(reader, timeout=timeout)
        with pytest.raises(QueueEmpty, match="the body of message 1"):
            reader.dequeue_nowait()
        cancel = asyncio.Event()
        waiting = asyncio.ensure_future(reader.dequeue(20, cancel))
        await asyncio.sleep(0.01)
        cancel.set()
        with pytest.raises(QueueCancelled):
            await waiting
        waiting = asyncio.ensure_future(reader.dequeue(20))
        await asyncio.sleep(0.01)
        await cancelled(waiting)
        release()
        while True:
            try:
                assert reader.dequeue_nowait() == b"x" * BIG
                break
            except QueueEmpty:  # where ZeroMQ has yet to bring it
                assert way == "zmq"
                await asyncio.sleep(0)
        assert await reader.dequeue(5) == "next"


@BOTH_WAYS
async def test_a_writer_that_closed_before_it_arrived(way: str) -> None:
    async with withheld(way) as (writer, reader, _release):
        waiting = asyncio.ensure_future(reader.dequeue(20))
        await asyncio.sleep(0.01)
        await writer.aclose()
        with pytest.raises(MessagesLost):
            await waiting
        with pytest.raises(MessagesLost):
            reader.dequeue_nowait()


@BOTH_WAYS
async def test_a_writer_that_died_before_it_arrived(way: str) -> None:
    """Its sockets may outlive it, where a process that was forked from it holds them open."""
    async with withheld(way, remote_timeout=0.2) as (writer, reader, _release):
        waiting = asyncio.ensure_future(reader.dequeue(20))
        await asyncio.sleep(0.01)
        cut_lifelines(writer)
        for act in (lambda: waiting, lambda: reader.dequeue(5)):
            with pytest.raises(PeerDied, match="body of message 1"):
                await act()


@BOTH_WAYS
async def test_every_damaged_byte_of_a_marker_is_noticed(way: str) -> None:
    async with attached(overflow=way) as (writer, (reader,)):
        for number, at in enumerate(range(32, SLOT_HEADER_BYTES)):
            await writer.enqueue(b"x" * BIG)
            await writer.enqueue(number)
            slot_of(writer, 2 * number)[at] ^= 0x5A
            with pytest.raises(CorruptSlot):
                if number % 2:
                    reader.dequeue_nowait()
                else:
                    async with reader.acquire_read(5):
                        pytest.fail("damaged bytes were handed out")
            assert await reader.dequeue(5) == number


@BOTH_WAYS
async def test_an_older_messages_marker_is_none_of_this_one(way: str) -> None:
    async with attached(chunks=1, overflow=way) as (writer, (reader,)):
        await writer.enqueue(b"x" * BIG)
        assert await reader.dequeue(5) == b"x" * BIG
        await writer.enqueue("in the slot")
        slot_of(writer, 1)[0] = 2  # OVERFLOW, with the marker of message 0 behind it
        with pytest.raises(CorruptSlot):
            await reader.dequeue(5)
        await writer.enqueue("next")
        assert await reader.dequeue(5) == "next"


@pytest.mark.parametrize("size", [BIG * 2, 2**40, 2**64 - 1])
async def test_a_marker_of_more_than_its_segment_has(size: int) -> None:
    async with attached() as (writer, (reader,)):
        for call in (lambda: reader.dequeue(5), lambda: reader.acquire_read(5).__aenter__()):
            seq = writer.stats().messages
            await writer.enqueue(b"x" * BIG)
            await writer.enqueue("next")
            pack_marker(slot_of(writer, seq), writer.end.ring.secret, seq, 0, size)  # type: ignore[attr-defined]
            with pytest.raises(CorruptSlot, match="its overflow segment has fewer bytes"):
                await call()
            assert await reader.dequeue(5) == "next"


async def test_a_reader_without_room_for_it_can_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with attached() as (writer, (reader,)):
        await writer.enqueue(b"x" * BIG)
        with monkeypatch.context() as patch:
            patch.setattr(mmap, "mmap", raising(OSError(errno.ENOMEM, "Cannot allocate memory")))
            for _ in range(2):
                with pytest.raises(SharedMemoryError, match="message 0 of"):
                    await reader.dequeue(5)
        assert await reader.dequeue(5) == b"x" * BIG


async def test_reader_without_a_descriptor_is_told_by_every_call_and_loses_nothing() -> None:
    async with withheld("segments") as (writer, reader, hand_over):
        await writer.enqueue(b"y" * BIG)
        waiting = asyncio.ensure_future(reader.dequeue(20))
        await asyncio.sleep(0)
        with descriptor_limit(3):
            hand_over()
            with pytest.raises(OutOfDescriptors):
                await waiting
            for receive in (dequeue, dequeue_nowait, dequeue_many, lease, acquire_read):
                with pytest.raises(OutOfDescriptors, match=r"message 1 of 50\d+ bytes .*RLIMIT_NOFILE.*ulimit"):
                    await receive(reader, timeout=20)
        assert reader.dequeue_nowait() == b"x" * BIG
        assert [await reader.dequeue(5) for _ in range(2)] == ["next", b"y" * BIG]


async def test_a_descriptor_that_was_lost_on_the_way_in_shifts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system cannot keep it in the socket, a process with too many open files gets the byte only."""
    async with attached() as (writer, (reader,)):
        with monkeypatch.context() as patch:
            receive = sockets.receive
            lost: list[bool] = []

            def lossy(sock: socket.socket, flags: int = 0) -> tuple[bytes, list[int], bool]:
                data, fds, cut = receive(sock, flags)
                if fds and not lost:
                    lost.append(True)
                    for fd in fds:
                        os.close(fd)
                    fds, cut = [], True
                return data, fds, cut

            patch.setattr(sockets, "_PEEKS", False)
            patch.setattr(sockets, "receive", lossy)
            await writer.enqueue(b"1" * BIG)  # which may let the loop run, and so the descriptor in
            await writer.enqueue(b"2" * BIG)
            with pytest.raises(CorruptSlot, match="too many open files"):
                await reader.dequeue(5)
        assert await reader.dequeue(5) == b"2" * BIG


# Over ZeroMQ


def subscription_of(reader: Any) -> Any:
    return reader.end.source.overflow


@pytest.mark.slow_on_uvloop
class TestSubscribing:
    async def test_who_does_not_know_the_secret_gets_nothing(self) -> None:
        async with attached(overflow="zmq") as (writer, (reader,)):
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stranger = context.socket(zmq.SUB)
            try:
                path = writer.end.ring.overflow._file._path  # type: ignore[attr-defined]
                stranger.connect(f"ipc://{path}")
                for topic in (b"", bytes(20), wire.address(bytes(16), 0)):
                    stranger.setsockopt(zmq.SUBSCRIBE, topic)
                for _ in range(20):
                    await writer.enqueue(b"x" * BIG)
                    assert len(await reader.dequeue(5)) == BIG
                assert not stranger.poll(50)
            finally:
                stranger.close(linger=0)
                context.term()

    async def test_only_this_user_reaches_the_socket_file_and_closing_removes_it(self, base: Path) -> None:
        run = base / "run"
        async with attached(overflow="zmq", runtime_dir=str(run)):
            (path,) = run.iterdir()
            assert stat.S_ISSOCK(path.stat().st_mode)
            assert stat.S_IMODE(run.stat().st_mode) == 0o700
        assert not list(run.iterdir())

    def test_a_directory_that_cannot_be_had_is_named(self, base: Path) -> None:
        (base / "file").touch()
        with pytest.raises(SharedMemoryError, match="AIOSHM_RUNTIME_DIR"):
            MessageQueue(1, 1, options=Options(overflow="zmq", runtime_dir=str(base / "file")))

    async def test_reader_that_cannot_subscribe_releases_the_ring(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with MessageQueue(1, 1, options=Options(overflow="zmq")) as writer:
            reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
            with monkeypatch.context() as patch:
                patch.setattr(overflow_sockets, "OverflowSubscriber", raising(SharedMemoryError(12, "no sockets")))
                waiting = asyncio.ensure_future(writer.wait_until_ready(5))
                with pytest.raises(SharedMemoryError, match="no sockets"):
                    await reader.wait_until_ready(5)
            waiting.cancel()
            await reader.aclose()


@pytest.mark.slow_on_uvloop
class TestZeroMQ:
    async def test_a_body_whose_slot_was_not_published_is_never_anothers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with attached(overflow="zmq") as (writer, (reader,)):
            with monkeypatch.context() as patch:
                patch.setattr(overflow_sockets, "pack_marker", raising(KeyboardInterrupt()))
                with pytest.raises(KeyboardInterrupt):
                    await writer.enqueue(b"0" * BIG)
            for number in b"12":
                await writer.enqueue(bytes([number]) * BIG)
                assert await reader.dequeue(5) == bytes([number]) * BIG
            assert subscription_of(reader)._arrived == {}
            assert len(overflow_of(writer)._kept) == 1

    @pytest.mark.parametrize("damage", [b"", b"x" * 36, b"x" * 100])
    async def test_what_is_no_body(self, damage: bytes) -> None:
        async with attached(overflow="zmq") as (writer, (reader,)):
            release = withhold(writer)
            await writer.enqueue(b"x" * BIG)
            await writer.enqueue("next")
            waiting = asyncio.ensure_future(reader.dequeue(20))
            await asyncio.sleep(0)
            publisher: Any = overflow_of(writer)
            while not publisher._subscribed:
                await asyncio.sleep(0.001)
            publisher._publisher.socket.send(wire.address(publisher._secret, 0) + damage)
            with pytest.raises(CorruptSlot, match="slot of message 0: damaged: rank 0 was sent a damaged body 0"):
                await waiting
            release()
            assert await reader.dequeue(5) == "next"

    async def test_no_memory_for_a_copy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with attached(overflow="zmq") as (writer, (reader,)):
            with monkeypatch.context() as patch:
                patch.setattr(overflow_sockets, "pack", raising(MemoryError()))
                for _ in range(2):
                    with pytest.raises(SharedMemoryError, match=r"message 0 of 50\d+ bytes"):
                        await writer.enqueue(b"x" * BIG)
            await writer.enqueue(b"y" * BIG)
            assert await reader.dequeue(5) == b"y" * BIG

    @pytest.mark.parametrize("size", [10_000, 3_000_000])
    async def test_a_writer_that_is_killed(self, size: int, monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
        """What has arrived is received; then, at the latest, the death is told."""
        monkeypatch.setenv("AIOSHM_OVERFLOW", "zmq")
        monkeypatch.setenv("AIOSHM_RUNTIME_DIR", str(base / "run"))
        async with child("write", "8", str(size), "10") as writer:
            async with MessageQueue.create_from_handle(await writer.says("{"), 0) as reader:
                await reader.wait_until_ready(20)
                await writer.says("written")
                assert await reader.dequeue(20) == (0, bytes(size))
                writer.signal(signal.SIGKILL)
                received = 1
                with pytest.raises(PeerDied, match="writer"):
                    while True:
                        number, payload = await reader.dequeue(20)
                        assert (number, payload) == (received, bytes([received]) * size)
                        received += 1
                assert await writer.end() == -signal.SIGKILL

    async def test_a_writer_that_was_forgotten_leaves_no_socket(self, recwarn: pytest.WarningsRecorder) -> None:
        before = sockets_of_zeromq()
        writer = MessageQueue(1, 1, options=Options(overflow="zmq"))
        assert sockets_of_zeromq() == before + 1
        del writer
        eventually(lambda: sockets_of_zeromq() == before, "the end of its sockets")
        assert [str(each.message) for each in recwarn if issubclass(each.category, ResourceWarning)]
