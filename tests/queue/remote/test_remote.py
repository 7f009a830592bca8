"""Queues with remote readers when nothing goes wrong, and their windows, also call by call."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from remotes import ready_ends, wide_writer

from aioshm import MessageQueue, QueueFull
from aioshm.codec.frames import RAW
from aioshm.codec.pickle5 import PickleCodec
from aioshm.queue.remote.window import Outgoing, ReceiveWindow, SendWindow
from aioshm.queue.remote.wire import ADDRESS_BYTES, ONE_FRAME_BYTES, Data, WireError


@pytest.mark.parametrize(("n_local", "secure"), [(0, False), (1, True)], ids=["plain", "encrypted"])
async def test_sizes_around_every_bound(n_local: int, secure: bool) -> None:
    bounds = (1, 4096, ONE_FRAME_BYTES, 65_536, 1_000_000)  # a chunk, a frame, what pyzmq copies
    payload = bytes(range(256)) * 4000
    async with ready_ends(n_local, 1, codec="raw", secure=secure) as (writer, readers):
        for size in sorted({size + change for size in bounds for change in (-1, 0, 1)}):
            await writer.enqueue(payload[:size], 5)
            for reader in readers:
                assert await reader.dequeue(5) == payload[:size]


async def test_how_large_messages_may_be_is_for_the_writer_to_say() -> None:
    async with wide_writer(0, 1, codec="raw", max_message_bytes=100_000, chunk=200_000) as writer:
        own = msgspec.structs.replace(writer.export_handle().options, max_message_bytes=10)
        async with MessageQueue.create_from_handle(writer.export_handle(), 0, options=own) as reader:
            await asyncio.gather(writer.wait_until_ready(5), reader.wait_until_ready(5))
            await writer.enqueue(bytes(100_000))
            assert len(await reader.dequeue(5)) == 100_000
            async with writer.acquire_write(5) as buffer:
                buffer[:3] = b"raw"
            assert len(await reader.dequeue(5)) == 200_000
            assert reader.stats().reconnects == 0


async def test_an_object_is_encoded_once_for_all_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = PickleCodec()
    encode = Mock(wraps=codec.encode)
    monkeypatch.setattr(codec, "encode", encode)
    async with ready_ends(1, 2, codec=codec) as (writer, readers):
        sent = ["small", b"L" * 1_000_000, np.arange(10_000)]
        await writer.enqueue(sent[0])
        writer.enqueue_nowait(sent[1])
        await writer.enqueue_many(sent[2:])
        for reader in readers:
            for obj in sent:
                assert np.array_equal(await reader.dequeue(5), obj)
        assert encode.call_count == len(sent)


# Windows


@pytest.mark.parametrize("bounds", [{"remote_window": 3}, {"remote_window_bytes": 30_000}], ids=["messages", "bytes"])
async def test_a_full_window(bounds: dict[str, int]) -> None:
    async with ready_ends(0, 1, codec="raw", **bounds) as (writer, (reader,)):
        for number in range(3):
            writer.enqueue_nowait(bytes([number]) * 9_900)
        with pytest.raises(QueueFull, match=r"the window of the remote readers is full: rank 0 \(pid \d+ on "):
            writer.enqueue_nowait(bytes(9_900))
        with pytest.raises(TimeoutError, match=r"the window of the remote readers is full: rank 0 "):
            await writer.enqueue(bytes(9_900), 0.02)
        with pytest.raises(TimeoutError, match="the window of the remote readers is full"):
            async with writer.acquire_write(0.02):
                pytest.fail("the window is full")
        waiting = asyncio.ensure_future(writer.enqueue(b"fourth"))
        assert await reader.dequeue(5) == bytes([0]) * 9_900
        await asyncio.wait_for(waiting, 5)
        assert [await reader.dequeue(5) for _ in range(3)] == [bytes([1]) * 9_900, bytes([2]) * 9_900, b"fourth"]


async def test_batches_keep_to_the_window() -> None:
    async with ready_ends(0, 1, codec="raw", remote_window=100, remote_window_bytes=10_000) as (writer, (reader,)):
        largest = 0

        async def send() -> None:
            for size in (0, 10, 90, 200, 3000, 9_948):
                await writer.enqueue_many([bytes(size)] * 150, 10)
                async with writer.acquire_write(10) as buffer:
                    buffer[:1] = b"x"
            await writer.aclose()

        sending = asyncio.ensure_future(send())
        async for _ in reader:
            largest = max(largest, writer.stats().kept_bytes)
            assert writer.stats().kept <= 100
        await sending
        assert 9_000 < largest <= 10_000


def message(seq: int) -> Data:
    return Data(RAW, 0, 0, seq, 0, memoryview(b""), b"", 0, 0)


def sending(count: int) -> SendWindow:
    window = SendWindow(8, 1000)
    window.join(0)
    for _ in range(count):
        window.sent(Outgoing(b""))
    return window


def receiving(*arrived: int, messages: int) -> ReceiveWindow:
    window = ReceiveWindow(messages, 800)
    for seq in arrived:
        receive(window, seq)
    return window


def receive(window: ReceiveWindow, seq: int, nbytes: int = 10) -> None:
    if window.expects(seq):
        window.arrived(message(seq), nbytes)


def test_messages_are_sent_again_once_over_each_connection() -> None:
    window = sending(4)
    assert len(window.resend(0, 1)) == 3
    assert window.resend(0, 1) == window.resend(0, 3) == [], "all are on their way"
    window.sent(Outgoing(b"x"))
    assert [again.nbytes for again in window.resend(0, 4)] == [ADDRESS_BYTES + 1]
    window.connected(0)
    assert len(window.resend(0, 3)) == 2


@pytest.mark.parametrize("seq", [-1, 4, 2**63])
def test_nobody_has_finished_with_or_asks_for_what_was_not_sent(seq: int) -> None:
    window = sending(3)
    with pytest.raises(WireError, match=f"acknowledges {seq} of 3"):
        window.acknowledged(0, seq)
    assert (len(window), window.readers) == (3, {0: 0})
    for first in {3, max(3, seq)}:
        with pytest.raises(WireError, match=f"asks for message {first} of 3"):
            window.resend(0, first)


def test_what_lies_beyond_the_window_cannot_have_been_sent() -> None:
    window = receiving(0, 1, messages=2)
    for seq in (2, 2**64 - 1):
        with pytest.raises(WireError, match=f"message {seq} came while 0 is not finished with"):
            window.expects(seq)
    assert window.to_ask_for() is None, "nor is anything before it missing"
    window.finished()
    assert window.expects(2)


def test_gap_is_asked_for_once_over_each_connection() -> None:
    window = receiving(0, 0, messages=100)
    assert window.to_ask_for() is None
    receive(window, 3)
    assert window.to_ask_for() == 1
    receive(window, 4)
    assert window.to_ask_for() is None
    for seq in (1, 2, 3):
        receive(window, seq)
    window.ask_again()
    assert window.to_ask_for() == 4
    receive(window, 4)
    assert window.to_ask_for() is None
    assert len(window.ready) == 5


@pytest.mark.parametrize(
    ("messages", "nbytes", "size", "after"), [(17, 10**6, 1, 3), (10**6, 801, 25, 5), (1, 1, 0, 1)]
)
def test_an_eighth_of_the_window_is_acknowledged_at_once(messages: int, nbytes: int, size: int, after: int) -> None:
    window = ReceiveWindow(messages, nbytes)
    for round_ in range(2):
        for count in range(1, after + 1):
            assert not window.must_acknowledge()
            receive(window, window.next, size)
            window.finished()
            assert window.must_acknowledge() == (count == after), f"round {round_}"
        window.acknowledged()
