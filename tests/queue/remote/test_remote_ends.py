"""Ends with a network between them that come, go, are killed or stopped, and do not run for a while."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest
from children import CHILD, child
from faces import Thread
from remotes import ready_ends, wide_writer
from support import until

from aioshm import MessageQueue, Options, PeerDied, ReaderEvicted, blocking

pytestmark = pytest.mark.slow_on_uvloop

TIMEOUT_S = 0.8
LONGER_S = 2 * TIMEOUT_S
"""Longer than any end may be silent."""


# Attaching


async def test_writer_that_is_closed_reports_no_death_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    writer = wide_writer(0, 2, remote_timeout=0.2)
    readers = [MessageQueue.create_from_handle(writer.export_handle(), rank) for rank in range(2)]
    async with writer, readers[0], readers[1]:
        receiving = [asyncio.ensure_future(reader.dequeue(10)) for reader in readers]
        await asyncio.sleep(0.1)  # both greetings wait for the writer
        await writer.enqueue("x", 10)
        assert await asyncio.gather(*receiving) == ["x", "x"]
        closing = asyncio.ensure_future(writer.aclose())
        for reader in readers:
            assert [message async for message in reader] == []
        await closing
    await asyncio.sleep(0.4)
    assert " died" not in caplog.text


# Loops that do not run


async def test_a_loop_that_is_blocked_for_longer_than_the_timeout_is_not_dead() -> None:
    async with ready_ends(0, 2, remote_timeout=TIMEOUT_S) as (writer, readers):
        for number in range(5):
            await writer.enqueue(number)
        receiving = [asyncio.ensure_future(reader.dequeue(5)) for reader in readers]
        time.sleep(LONGER_S)
        assert await asyncio.gather(*receiving) == [0, 0]
        for number in range(1, 5):
            for reader in readers:
                assert await reader.dequeue(5) == number
        assert (writer.stats().resent, readers[0].stats().reconnects) == (0, 0)


# The blocking API


def test_blocking_ends_that_make_no_calls_for_a_while_are_not_dead() -> None:
    options = Options(remote_timeout=TIMEOUT_S, remote_window=10)
    with blocking.MessageQueue(1, 0, connect_ip="127.0.0.1", options=options) as writer:
        with blocking.MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            thread = Thread(reader.wait_until_ready, 10)
            writer.wait_until_ready(10)
            thread.result()
            for number in range(10):
                writer.enqueue(number, 5)
            time.sleep(LONGER_S)
            with pytest.raises(TimeoutError, match="the window of the remote readers is full"):
                writer.enqueue(10, 0.05)
            assert [reader.dequeue(5) for _ in range(10)] == list(range(10))
            writer.enqueue(10, 5)
            assert reader.dequeue(5) == 10


@pytest.mark.parametrize("makes_calls", [True, False], ids=["reading", "doing nothing"])
def test_a_blocking_writer_that_closes(makes_calls: bool) -> None:
    with blocking.MessageQueue(1, 0, connect_ip="127.0.0.1", options=Options(remote_timeout=TIMEOUT_S)) as writer:
        handle = writer.export_handle()
        closed = threading.Event()

        def read() -> list[Any]:
            with blocking.MessageQueue.create_from_handle(handle, 0) as reader:
                reader.wait_until_ready(10)
                assert makes_calls or closed.wait(20)
                return list(reader)

        thread = Thread(read)
        writer.wait_until_ready(10)
        for number in range(100):
            writer.enqueue((number, bytes(10_000)))
        began = time.monotonic()
        writer.close()
        assert time.monotonic() - began < (1 if makes_calls else 2) * TIMEOUT_S
        closed.set()
        assert thread.result() == [(number, bytes(10_000)) for number in range(100)]


# Ends that nobody closes


@pytest.mark.parametrize("role", ["leave_open", "end_amid"])
def test_python_ends_all_the_same(role: str) -> None:
    done = subprocess.run([sys.executable, str(CHILD), role], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


# Readers in processes that are killed or stopped


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


async def test_evicted_reader_gets_its_backlog_and_no_later_message() -> None:
    async with ready_ends(0, 2, codec="raw") as (writer, (evicted, other)):
        await writer.enqueue_many([b"0", b"1"])
        await until(lambda: evicted.stats().backlog == 2, "both messages")
        writer.dismiss(0)
        link: Any = evicted.end.source
        await until(lambda: link.gone is not None, "the refusal")
        assert link.sockets._data._socket.closed, "else it connects again, and no window bounds what comes"
        await writer.enqueue(b"2")
        assert [await other.dequeue(20) for _ in range(3)] == [b"0", b"1", b"2"]
        assert [await evicted.dequeue(20) for _ in range(2)] == [b"0", b"1"]
        with pytest.raises(ReaderEvicted):
            await evicted.dequeue(20)
