"""The API for threads without an event loop: alone, with the other one, and how its calls and its ends end."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from faces import Thread, child, make_writer, pair
from support import eventually, forked

from aioshm import CodecError, QueueCancelled, QueueClosed, QueueEmpty, QueueFull, RoleError, blocking


def test_ways_out_of_waiting() -> None:
    with pair() as (writer, reader):
        for call in (reader.dequeue, lambda timeout: reader.dequeue_many(2, timeout)):
            with pytest.raises(TimeoutError, match="message 0 did not come in time"):
                call(0.02)
        with pytest.raises(TimeoutError):
            with reader.lease(0.01):
                pytest.fail("nothing was there")
        cancel = threading.Event()
        setting = threading.Timer(0.05, cancel.set)
        setting.start()
        for call in (reader.dequeue, lambda **kw: reader.dequeue_many(2, **kw)):
            with pytest.raises(QueueCancelled, match="the cancel event is set"):
                call(cancel=cancel)
        for block in (reader.lease, reader.acquire_read):
            with pytest.raises(QueueCancelled):
                with block(cancel=cancel):
                    pytest.fail("nothing was there")
        setting.join()
        with pytest.raises(QueueEmpty, match="no message has arrived"):
            reader.dequeue_nowait()
        with pytest.raises(ValueError, match="max_items"):
            reader.dequeue_many(0)
        for refused in (lambda: reader.enqueue(1), reader.acquire_write):
            with pytest.raises(RoleError, match="belongs to the queue's writer"):
                refused()
        with pytest.raises(RoleError, match="belongs to the queue's reader"):
            writer.dequeue()
        reader.close()
        with pytest.raises(QueueClosed, match="every reader has left"):
            while True:
                writer.enqueue("x", 5)


def test_a_full_ring() -> None:
    with pair(chunks=2) as (writer, reader):
        writer.enqueue_many([1, 2])
        with pytest.raises(QueueFull, match="rank 0"):
            writer.enqueue_nowait(3)
        with pytest.raises(TimeoutError, match="no slot became free: rank 0"):
            writer.enqueue(3, 0.02)
        with pytest.raises(CodecError, match="function"):
            writer.enqueue(lambda: None)
        sending = Thread(writer.enqueue, 3, 10)
        assert [reader.dequeue(10) for _ in range(3)] == [1, 2, 3]
        sending.result()


def test_a_running_loop_is_refused() -> None:
    async def in_a_loop() -> None:
        for call in (reader.wait_until_ready, reader.dequeue_nowait, lambda: reader.dequeue_many(1)):
            with pytest.raises(RoleError, match=r"use aioshm\.MessageQueue there"):
                call()

    with pair() as (writer, reader):
        writer.enqueue("kept")
        asyncio.run(in_a_loop())
        assert reader.dequeue(10) == "kept"


def _is_refused(writer: blocking.MessageQueue) -> bool:
    with pytest.raises(RoleError, match="forked"):
        writer.enqueue("from the child")
    return True


def test_a_forked_child_is_refused_and_harms_nobody() -> None:
    with pair() as (writer, reader):
        receiving = Thread(lambda: list(reader))
        writer.enqueue("before")
        assert forked(_is_refused, writer)()
        for number in range(100):  # woken as before
            writer.enqueue(number, 10)
        writer.close()
        assert receiving.result() == ["before", *range(100)]


@pytest.mark.parametrize("n_local", [0, 1])
def test_read_acquired_before_attaching_or_after_an_interrupted_merge_gives_the_bytes(n_local: int) -> None:
    def send() -> None:
        for _ in range(3):
            with writer.acquire_write(20, nbytes=4) as chunk:
                chunk[:4] = b"abcd"

    with blocking.MessageQueue(1, n_local, connect_ip="127.0.0.1") as writer:
        with blocking.MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            sending = Thread(send)
            for merges in (False, False, True):
                if merges:
                    reader.held.loop().run(blocking.merge({0: reader})._merging.wait)
                with reader.acquire_read(20) as view:
                    assert bytes(view[:4]) == b"abcd"
            sending.result()


# Closing


def test_closing() -> None:
    with pair():
        pass  # which has started the background loop
    before = len(os.listdir("/proc/self/fd"))
    with make_writer() as writer:
        with blocking.MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            with pytest.raises(TimeoutError, match="the writer does not answer"):
                reader.wait_until_ready(0.01)
            reader.close()
            reader.close()
        with pytest.raises(QueueClosed):
            reader.dequeue()
        waiting = Thread(writer.wait_until_ready)
        eventually(lambda: writer.held.lock.owner, "the call to wait")
        writer.aclose()
        with pytest.raises(QueueClosed, match="this end was closed"):
            waiting.result()
    for call in (lambda: writer.enqueue(1), lambda: writer.enqueue_many([1]), writer.wait_until_ready):
        with pytest.raises(QueueClosed, match="this end was closed"):
            call()
    assert repr(writer).startswith("<blocking <writer of queue")
    assert writer.stats().messages == 0
    writer.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


CLOSES_AT_EXIT = """
import atexit, threading
ends = []
atexit.register(lambda: [end.close() for end in ends])  # runs after what aioshm registers
from aioshm.blocking import MessageQueue
ends += [writer := MessageQueue(1), reader := MessageQueue.create_from_handle(writer.export_handle(), 0)]
threading.Thread(target=writer.wait_until_ready).start()
reader.wait_until_ready()
"""


def test_closing_after_the_background_loop_has_ended() -> None:
    done = subprocess.run([sys.executable, "-c", CLOSES_AT_EXIT], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("side", ["writer", "reader"])
def test_closing_before_a_sleeping_peer_was_woken(side: str) -> None:
    with pair() as (writer, reader):
        end = reader
        call: Callable[[], Any] = reader.dequeue
        if side == "writer":
            end = writer
            call = partial(writer.enqueue, 1)
        end.held.state.defer_wakeup()  # as the core does; a handler of a signal raises before the wake-up, or closes
        end.close()
        end.close()
        with pytest.raises(QueueClosed, match="this end was closed"):
            call()


# When nothing goes wrong


def test_every_way_to_send_meets_every_way_to_receive() -> None:
    with pair(codec="raw", chunks=8) as (writer, reader):
        writer.enqueue(b"one")
        writer.enqueue_many([b"two", b"333"])
        with writer.acquire_write(10) as chunk:
            chunk[:3] = b"444"
        assert writer.broadcast_object(b"five") == b"five"
        writer.enqueue_nowait(b"six")
        received = [reader.dequeue(10), *reader.dequeue_many(1, 10)]
        with reader.lease(10) as obj:
            received.append(bytes(obj))
        with reader.acquire_read(10) as view:
            received.append(bytes(view[:3]))
        received += [reader.broadcast_object(), reader.dequeue_nowait()]
        assert received == [b"one", b"two", b"333", b"444", b"five", b"six"]
        assert writer.stats().messages == 6


def test_other_processes() -> None:
    with make_writer() as writer, child("collect", writer.export_handle().to_json()) as reader:
        for number in range(1000):
            writer.enqueue((number, bytes([number % 256]) * (9000 if number % 99 == 5 else 50)), 20)
        writer.close()
        reader.says("ready")
        reader.says("1000 then closed")
        assert reader.end() == (0, "")


# Blocks


@pytest.mark.parametrize(
    ("block", "error"), [("lease", KeyboardInterrupt), ("lease", StopIteration), ("acquire_read", GeneratorExit)]
)
def test_what_a_block_raises_is_not_changed(block: str, error: type[BaseException]) -> None:
    with pair(chunks=1) as (writer, reader):
        writer.enqueue(np.zeros(100), 10)
        mine = error("mine")
        with pytest.raises(error) as caught:
            with getattr(reader, block)(10):
                raise mine
        assert caught.value is mine
        with pytest.raises(error):
            with writer.acquire_write(10):
                raise error
        writer.enqueue("next", 10)
        assert reader.dequeue(10) == "next"
        assert writer.stats().messages == 2
