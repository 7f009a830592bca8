"""Ends whose calls block, used and closed by several threads."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from faces import READS, WRITES, Thread, handling, interrupt_after, pair
from receiving import Decoded, while_decoding
from support import eventually

from aioshm import Options, PeerClosed, QueueCancelled, QueueClosed, QueueEmpty, QueueFull, RoleError, blocking
from aioshm.process.loop_thread import process_lock
from aioshm.queue.membership import ReaderJoined, ReaderLeft


def fill(writer: blocking.MessageQueue) -> int:
    with suppress(QueueFull):
        for sent in itertools.count():
            writer.enqueue_nowait(sent)
    return sent


def until_it_waits(end: blocking.MessageQueue) -> None:
    eventually(lambda: end.held.lock.owner, "the call to wait")


@pytest.mark.parametrize("remote", [False, True])
def test_threads_that_send_at_once(remote: bool) -> None:
    count = 150 if remote else 500

    def send(name: int) -> None:
        for number in range(count):
            payload = bytes([number % 251]) * (9000 if number % 97 == 5 else number % 60)
            if number % 11 == 3:
                writer.enqueue_many([(name, number, payload)], 60)
            elif number % 13 == 7:
                with writer.acquire_write(60) as chunk:
                    chunk[:8] = name.to_bytes(4, "little") + number.to_bytes(4, "little")
            else:
                writer.enqueue((name, number, payload), 60)

    with pair(remote=remote) as (writer, reader):
        threads = [Thread(send, name) for name in range(3)]
        received: dict[int, list[int]] = {name: [] for name in range(3)}
        for _ in range(3 * count):
            message = reader.dequeue(60)
            if isinstance(message, bytearray):
                name, number = int.from_bytes(message[:4], "little"), int.from_bytes(message[4:8], "little")
            else:
                name, number, payload = message
                assert payload == bytes([number % 251]) * len(payload)
            received[name].append(number)
        for thread in threads:
            thread.result()
        assert received == {name: list(range(count)) for name in range(3)}


def test_threads_that_receive_at_once() -> None:
    with pair() as (writer, reader):
        threads = [Thread(lambda: list(reader)) for _ in range(3)]
        for number in range(500):
            writer.enqueue(number, 60)
        writer.close()
        parts = [thread.result(60) for thread in threads]
        assert sorted(itertools.chain(*parts)) == list(range(500))
        assert all(part == sorted(part) for part in parts)


@pytest.mark.usefixtures("short_goodbye")
@pytest.mark.parametrize(("wait", "remote"), [*((wait, False) for wait in READS if wait != "merge"), ("dequeue", True)])
def test_closing_ends_what_waits_in_another_thread(wait: str, remote: bool) -> None:
    with pair(remote=remote) as (_, reader):
        waiting = Thread(READS[wait], reader)
        until_it_waits(reader)
        reader.close()
        with pytest.raises(QueueClosed, match="this end was closed"):
            waiting.result()
        with pytest.raises(QueueClosed):
            reader.dequeue()


@pytest.mark.parametrize("remote", [False, True])
def test_closing_ends_what_waits_to_send(remote: bool) -> None:
    for wait in WRITES.values():
        with pair(remote=remote) as (writer, reader):
            sent = fill(writer)
            threads = [Thread(wait, writer) for _ in range(3)]
            until_it_waits(writer)
            closing = Thread(writer.close)  # which waits until remote readers have everything
            for thread in threads:
                with pytest.raises(QueueClosed, match="this end was closed"):
                    thread.result()
            assert list(reader) == list(range(sent))
            closing.result()


def test_membership_goes_on_after_another_thread_took_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    come, taken = threading.Event(), threading.Event()

    def run_until_taken(call: Any) -> Any:
        outcome = run(call)
        come.set()
        assert taken.wait(20)
        return outcome

    with blocking.MessageQueue(0, options=Options(max_readers=2)) as writer:
        writer.wait_until_ready(20)
        changes = writer.membership()
        run = writer.held.run
        monkeypatch.setattr(writer.held, "run", run_until_taken)
        waiting = Thread(next, changes)
        with blocking.MessageQueue.create_from_handle(writer.export_handle()) as reader:
            reader.wait_until_ready(20)
            assert come.wait(20)
            assert type(next(changes)) is ReaderJoined
            taken.set()
        assert type(waiting.result()) is ReaderLeft


@pytest.mark.parametrize("elsewhere", [False, True])
def test_closing_waits_for_no_block(elsewhere: bool) -> None:
    with pair(chunk=1 << 20) as (writer, reader):
        writer.enqueue(np.full(600_000, 3, np.uint8))  # large enough for the lease to show where it lies
        with reader.lease(20) as array, pytest.raises(QueueClosed, match="this end was closed"):
            with writer.acquire_write(20) as chunk:
                for end in (reader, writer):
                    Thread(end.close).result() if elsewhere else end.close()
                assert (array == 3).all()
                chunk[:3] = b"not"
        assert (array == 3).all()
        assert (reader.held.closed, writer.held.closed) == (True, True)
        assert writer.stats().messages == 1


def test_a_second_thread_waits_for_its_turn() -> None:
    with pair() as (writer, reader):
        sent = fill(writer)
        first = Thread(writer.enqueue, "first", 60)
        until_it_waits(writer)
        with pytest.raises(TimeoutError, match="another thread's call, or its block, did not end in time"):
            writer.enqueue("too late", 0.01)
        with pytest.raises(QueueFull, match="another thread waits here"):
            writer.enqueue_nowait("too early")
        second = Thread(writer.enqueue, "second", 60)
        assert [reader.dequeue(20) for _ in range(sent + 2)] == [*range(sent), "first", "second"]
        first.result()
        second.result()
        waiting = Thread(reader.dequeue)
        until_it_waits(reader)
        with pytest.raises(QueueEmpty, match="another thread waits here"):
            reader.dequeue_nowait()
        writer.enqueue("last")
        assert waiting.result() == "last"


@pytest.mark.parametrize("timeout", [0.001, 0.11])
def test_timeout_or_cancel_ends_while_another_thread_waits(timeout: float) -> None:
    with pair() as (writer, reader):
        waiting = Thread(reader.dequeue)
        until_it_waits(reader)
        took_s = []
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                reader.dequeue(timeout)
            took_s.append(time.monotonic() - began)
        assert min(took_s) < timeout + 0.05
        cancel = threading.Event()
        cancel.set()
        for call in (reader.dequeue, lambda *limits: reader.lease(*limits).__enter__()):
            with pytest.raises(QueueCancelled):
                call(10, cancel)
        writer.enqueue("last")
        assert waiting.result() == "last"


@pytest.mark.parametrize("sends", [False, True])
def test_threads_that_wait_again_at_once_take_turns(sends: bool) -> None:
    with pair() as (writer, reader):
        calls = [0, 0]

        def run(number: int) -> None:
            while sum(calls) < 100:
                if sends:
                    writer.enqueue(number, 20)
                else:
                    reader.dequeue(20)
                calls[number] += 1

        threads = [Thread(run, number) for number in range(2)]
        while any(thread.running for thread in threads):
            time.sleep(0.001)  # both threads wait by now
            with suppress(TimeoutError):  # the threads have ended just now
                if sends:
                    reader.dequeue(0.1)
                else:
                    writer.enqueue(None, 0.1)
        for thread in threads:
            thread.result()
        assert min(calls) >= 10


def test_message_of_a_thread_that_waited_for_the_turn_wakes_a_sleeping_reader() -> None:
    with pair() as (writer, reader):
        writer.enqueue("first")
        assert reader.dequeue(20) == "first"
        waiting = Thread(reader.dequeue)
        eventually(lambda: writer.held.end.ring.ring.readers_parked[0], "the reader to sleep")  # type: ignore[union-attr]
        process_lock.acquire(threading.get_ident())
        try:
            sending = Thread(writer.enqueue, "second", 60)
            eventually(lambda: process_lock.waiting, "the wait for the turn")
        finally:
            process_lock.release()
        assert waiting.result() == "second"
        sending.result()


def test_a_second_thread_waits_for_a_block() -> None:
    with pair() as (writer, reader):
        with writer.acquire_write(20) as chunk:
            with pytest.raises(TimeoutError, match="another thread's call, or its block"):
                Thread(writer.enqueue, "x", 0.01).result()
            with pytest.raises(QueueFull):
                Thread(writer.enqueue_nowait, "x").result()
            with pytest.raises(RoleError, match="inside of a block that has its slot"):
                writer.enqueue("x")
            after = Thread(writer.enqueue, "after", 60)
            chunk[:5] = b"block"
        after.result()
        assert [bytes(reader.dequeue(20)[:5]), reader.dequeue(20)] == [b"block", "after"]


def test_a_block_may_end_in_another_thread() -> None:
    with pair() as (writer, reader):
        block = writer.acquire_write(20)
        block.__enter__()[:1] = b"x"
        Thread(block.__exit__, None, None, None).result()
        writer.enqueue("after", 20)
        assert [bytes(reader.dequeue(20)[:1]), reader.dequeue(20)] == [b"x", "after"]


def test_block_that_is_collected_inside_of_another_call_leaves_that_call_the_lock() -> None:
    blocks: list[Any] = []
    owners: list[int] = []

    class Dropping:
        def __reduce__(self) -> Any:
            blocks.clear()
            owners.append(process_lock.owner)
            return str, ("dropped",)

    with pair() as (writer, reader), pair() as (other, lender):
        other.enqueue("leased")
        blocks.append(lender.lease(20))
        assert blocks[0].__enter__() == "leased"
        writer.enqueue(Dropping())
        assert (reader.dequeue(20), lender.held.lock.owner) == ("dropped", 0)
        assert owners == [threading.get_ident()]


def test_a_codec_is_used_by_one_thread_at_a_time() -> None:
    inside, most = 0, 0

    class Slow:
        def __reduce__(self) -> Any:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            time.sleep(0.0001)  # other threads run
            inside -= 1
            return str, ("slow",)

    with pair(chunks=64) as (writer, reader):

        def send() -> None:
            for _ in range(50):
                writer.enqueue_many([Slow()], 60)
                writer.enqueue(Slow(), 60)

        threads = [Thread(send) for _ in range(3)]
        assert [reader.dequeue(60) for _ in range(300)] == ["slow"] * 300
        for thread in threads:
            thread.result()
    assert most == 1


@pytest.mark.parametrize("end", ["reader", "writer"])
def test_closing_in_a_signal_handler(end: str) -> None:
    with pair() as (writer, reader):
        closed = reader if end == "reader" else writer
        sent = fill(writer)
        if end == "reader":
            for _ in range(sent):
                reader.dequeue()
        with handling(lambda *_: closed.close()):
            interrupting = interrupt_after(until_it_waits, closed)
            with pytest.raises(QueueClosed, match="this end was closed"):
                reader.dequeue() if end == "reader" else writer.enqueue("x")
            interrupting.result()
            assert closed.held.closed


@pytest.mark.parametrize("signals", [False, True])
def test_closing_in_a_call_that_has_no_need_to_wait(signals: bool) -> None:
    with pair() as (writer, reader), handling(lambda *_: reader.close()):
        with while_decoding(partial(signal.raise_signal, signal.SIGUSR1) if signals else reader.close):
            writer.enqueue(Decoded(), 20)
            assert reader.dequeue(20) == "decoded"
            eventually(lambda: reader.held.closed, "the end to close")
        with pytest.raises(PeerClosed, match="every reader has left"):
            while True:
                writer.enqueue("nobody reads this", 20)
