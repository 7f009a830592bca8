"""Ends with a network between them that come, go, and do not run for a while."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from faces import Thread
from remotes import ready_ends, wide_writer
from support import eventually

from aioshm import MessageQueue, Options, RoleError, blocking

TIMEOUT_S = 0.8
LONGER_S = 2 * TIMEOUT_S
"""Longer than any end may be silent."""


# Attaching


async def test_readers_that_are_awaited_before_the_writer() -> None:
    writer = wide_writer(0, 2)
    readers = [MessageQueue.create_from_handle(writer.export_handle(), rank) for rank in range(2)]
    async with writer, readers[0], readers[1]:
        receiving = [asyncio.ensure_future(reader.dequeue(10)) for reader in readers]
        with pytest.raises(TimeoutError, match="does not answer: does its event loop run"):
            async with asyncio.timeout(5):
                while True:
                    await readers[0].wait_until_ready(0.1)
                    pytest.fail("nobody let it in")
        with pytest.raises(TimeoutError, match="not attached yet: rank 0, rank 1"):
            await writer.wait_until_ready(0)
        with pytest.raises(RoleError, match="not ready"):
            readers[0].dequeue_nowait()
        with pytest.raises(RoleError, match="not ready"):
            writer.enqueue_nowait("x")
        await writer.enqueue("x", 10)
        assert await asyncio.gather(*receiving) == ["x", "x"]


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")
async def test_ipv6() -> None:
    async with ready_ends(1, 1, connect_ip="::1") as (writer, readers):
        remote = writer.export_handle().remote
        assert remote is not None
        assert remote.data.startswith("tcp://[::1]:")
        assert remote.control.startswith("tcp://[::1]:")
        for payload in ("x", b"L" * 1_000_000):
            await writer.enqueue(payload)
            for reader in readers:
                assert await reader.dequeue(5) == payload


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


def test_forgotten_ends_warn_and_leak_nothing() -> None:
    def open_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    async def attach(writer: MessageQueue, reader: MessageQueue) -> None:
        await asyncio.gather(writer.wait_until_ready(10), reader.wait_until_ready(10))

    before = open_files(), threading.active_count()
    for awaited in (False, True):
        writer = wide_writer(0, 1)
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        if awaited:
            asyncio.run(attach(writer, reader))
        for name in ("remote reader", "writer"):
            with pytest.warns(ResourceWarning, match=f"{name} of queue .* was not closed"):
                if name == "remote reader":
                    del reader
                else:
                    del writer
                gc.collect()
    eventually(lambda: (open_files(), threading.active_count()) == before, "the end of all sockets and threads")


# Loops that do not run


@pytest.mark.slow_on_uvloop
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


BEGINNING = """
import asyncio, threading
import aioshm.blocking
from aioshm import MessageQueue

async def attached():
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    await asyncio.gather(writer.wait_until_ready(10), reader.wait_until_ready(10))
    await writer.enqueue(bytearray(1_000_000))
    assert len(await reader.dequeue(10)) == 1_000_000
    return writer, reader
"""

ENDINGS = {
    "kept by modules": """
kept = asyncio.run(attached())
never_awaited = MessageQueue(1, 0, connect_ip="127.0.0.1")
writer = aioshm.blocking.MessageQueue(1, 0, connect_ip="127.0.0.1")
handle = writer.export_handle()
def read():
    global reader
    reader = aioshm.blocking.MessageQueue.create_from_handle(handle, 0)
    assert reader.dequeue(10) == "text"
thread = threading.Thread(target=read)
thread.start()
writer.enqueue("text", 10)
thread.join()
""",
    "an error": """
async def main():
    ends = await attached()
    raise SystemExit(0)
asyncio.run(main())
""",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_python_ends_all_the_same(ending: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING + ENDINGS[ending]],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (done.returncode, done.stderr) == (0, "")
