"""Ends on other hosts that are killed, stopped, or leave."""

from __future__ import annotations

import asyncio
import signal
import time

import psutil
import pytest
from children import child
from remotes import wide_writer
from support import HELPERS, until

from aioshm import MessageQueue, PeerDied, QueueClosed, QueueFull

pytestmark = pytest.mark.slow_on_uvloop

TIMEOUT_S = 0.8
SLACK_S = 0.5
"""For a machine with other things to do."""

WRITER = HELPERS / "remote_child.py"


# Readers


async def test_a_killed_reader_is_named_to_the_writer() -> None:
    async with wide_writer(0, 1, remote_timeout=TIMEOUT_S, remote_window=3) as writer:
        async with child("idle", writer.export_handle().to_json(), "0") as reader:
            await writer.wait_until_ready(20)
            await reader.says("ready")
            with pytest.raises(QueueFull):
                for _ in range(10):
                    writer.enqueue_nowait("fill")
            reader.signal(signal.SIGKILL)
            await reader.end()
            began = time.monotonic()
            with pytest.raises(PeerDied) as caught:
                while True:
                    await writer.enqueue("into the void")
            assert time.monotonic() - began < TIMEOUT_S + SLACK_S
            assert (caught.value.rank, caught.value.pid, caught.value.side) == (0, reader.pid, "reader")
            with pytest.raises(PeerDied):
                writer.enqueue_nowait("and again")
            assert writer.stats().kept == 0


async def test_a_reader_that_is_stopped_for_a_while_loses_nothing() -> None:
    async with wide_writer(0, 1, remote_timeout=2 * TIMEOUT_S, remote_window=100) as writer:
        async with child("collect", writer.export_handle().to_json(), "0") as reader:
            await writer.wait_until_ready(20)
            await reader.says("ready")
            number = 0

            async def send(until: float) -> None:
                nonlocal number
                while time.monotonic() < until:
                    await writer.enqueue((number, bytes([number % 256]) * (number % 20_000)))
                    number += 1

            await send(time.monotonic() + 0.1)
            reader.signal(signal.SIGSTOP)
            sending = asyncio.ensure_future(send(time.monotonic() + 1.2 * TIMEOUT_S))
            await asyncio.sleep(1.2 * TIMEOUT_S)  # ZeroMQ has given its connection up by then
            assert not sending.done(), "the window is full"
            reader.signal(signal.SIGCONT)
            await sending
            await writer.aclose()
            await reader.says(f"{number} then closed")


async def test_a_reader_that_is_stopped_for_too_long_is_dead_and_learns_of_it() -> None:
    async with wide_writer(0, 1, remote_timeout=TIMEOUT_S) as writer:
        async with child("collect", writer.export_handle().to_json(), "0") as reader:
            await writer.wait_until_ready(20)
            await reader.says("ready")
            for number in range(10):
                await writer.enqueue((number, b""))
            await until(lambda: not writer.stats().kept, "the end of reading")
            reader.signal(signal.SIGSTOP)
            number = 10
            with pytest.raises(PeerDied):
                while True:
                    await writer.enqueue((number, b""))
                    number += 1
            reader.signal(signal.SIGCONT)
            received, _, how = (await reader.says()).partition(" ")
            assert 10 <= int(received) <= number
            assert how.startswith("then PeerDied the writer (pid ")


async def test_nothing_is_kept_for_a_stopped_reader_that_was_evicted() -> None:
    options = {"remote_timeout": 30.0, "remote_window": 4, "slow_reader": "evict"}
    async with wide_writer(0, 2, codec="raw", **options) as writer:
        handle = writer.export_handle()
        async with MessageQueue.create_from_handle(handle, 0) as reader:
            async with child("idle", handle.to_json(), "1") as stopped:
                await asyncio.gather(writer.wait_until_ready(20), reader.wait_until_ready(20))
                await stopped.says("ready")
                stopped.signal(signal.SIGSTOP)
                before = psutil.Process().memory_info().rss
                for number in range(50):
                    await writer.enqueue(bytes([number]) * (1 << 20), 20)
                    assert (await reader.dequeue(20))[0] == number
                    assert psutil.Process().memory_info().rss - before < 30 << 20
                assert [each.rank for each in writer.readers if each.state == "attached"] == [0]


# Writers


async def test_a_writer_killed_in_the_middle_of_its_stream() -> None:
    async with child("stream", str(TIMEOUT_S), "200000", script=WRITER) as writer:
        async with MessageQueue.create_from_handle(await writer.says("{"), 0) as reader:
            received = 0
            with pytest.raises(PeerDied):
                while True:
                    number, payload = await reader.dequeue(20)
                    assert (number, payload) == (received, bytes([received % 256]) * 200_000)
                    received += 1
                    if received == 20:
                        writer.signal(signal.SIGKILL)


async def test_a_writer_that_closes_before_anything_was_read() -> None:
    async with child("close", "10", "100", "100000", script=WRITER) as writer:
        async with MessageQueue.create_from_handle(await writer.says("{"), 0) as reader:
            await reader.wait_until_ready(20)
            await writer.says("closed")
            assert await writer.end() == 0
            for number in range(100):
                assert await reader.dequeue(5) == (number, bytes([number % 256]) * 100_000)
            with pytest.raises(QueueClosed, match="the writer has closed the queue"):
                await reader.dequeue(5)
            with pytest.raises(QueueClosed):
                reader.dequeue_nowait()
