"""What did not fit a chunk has not arrived, never will, or is not what a slot says: a typed error, and no hang."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from overflowing import BOTH_WAYS, overflow_of, withhold
from pairs import attached
from slots import slot_of

from aioshm import CorruptSlot, MessageQueue, MessagesLost, PeerDied, QueueCancelled, QueueEmpty, SharedMemoryError
from aioshm.lifeline import sockets
from aioshm.queue.local.overflow import pack_marker
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
            with pytest.raises(TimeoutError, match="the body of message 1"):
                await reader.dequeue(timeout)
            for block in (reader.acquire_read, reader.lease):
                with pytest.raises(TimeoutError):
                    async with block(timeout):
                        pytest.fail("there is nothing to read")
            with pytest.raises(TimeoutError):
                await reader.dequeue_many(2, timeout)
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
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
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
        for connection in list(writer.end.ring.listener._connections.values()):
            connection.close()
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

            def refuse(*_: object, **__: object) -> None:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")

            patch.setattr(mmap, "mmap", refuse)
            for _ in range(2):
                with pytest.raises(SharedMemoryError, match="message 0 of"):
                    await reader.dequeue(5)
        assert await reader.dequeue(5) == b"x" * BIG


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
