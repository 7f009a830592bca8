"""Ctrl-C, and deaths, while a blocking end waits; storms of signals in busy streams, in ``storm_child.py``."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
from faces import READS, WRITES, Thread, child, handling, interrupt_after, make_writer, pair
from support import HELPERS, eventually, raising

from aioshm import PeerDied, blocking


class _Late(Exception):
    pass


class _Tripping:
    """While it is decoded, a signal comes whose handler runs as soon as Python looks for signals again."""

    def __reduce__(self) -> Any:
        return _thread.interrupt_main, (signal.SIGUSR1,)


@pytest.mark.parametrize("merged", [False, True])
def test_a_signal_that_comes_while_the_core_decodes_loses_nothing(merged: bool) -> None:
    """Also where the reader has to wake the writer, which waits for a free slot, before it returns the message."""

    def write() -> None:
        writer.wait_until_ready(20)
        for number in range(100):
            writer.enqueue((number, _Tripping()), 20)

    with make_writer() as writer, blocking.MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
        writing = Thread(write)
        reader.wait_until_ready(20)
        received: list[int] = []
        interrupted = 0
        stream = blocking.merge({0: reader})
        eventually(lambda: writer.stats().parks > 0, "the writer to sleep")
        with handling(raising(_Late())):
            while len(received) < 100:
                obj = None
                try:
                    obj = next(stream)[1] if merged else reader.dequeue(20)
                    time.sleep(0)  # handlers run here at the latest
                except _Late:
                    interrupted += 1
                if obj is not None:
                    received.append(obj[0])
        writing.result()
    assert received == list(range(100))
    assert interrupted == 100


def test_ctrl_c_that_nobody_catches() -> None:
    with make_writer() as writer, child("uncaught", writer.export_handle().to_json()) as reader:
        writer.wait_until_ready(20)
        reader.says("ready")
        process = psutil.Process(reader.pid)
        eventually(lambda: process.status() == psutil.STATUS_SLEEPING, "the reader to sleep")
        began = time.monotonic()
        os.kill(reader.pid, signal.SIGINT)
        status, said = reader.end()
        assert time.monotonic() - began < 5
        assert status == -signal.SIGINT
        assert said.splitlines()[-1] == "KeyboardInterrupt"
        assert "never retrieved" not in said
        assert "destroyed" not in said


def test_the_writer_is_killed_while_the_reader_waits() -> None:
    with child("write", "20", "100") as writer:
        with blocking.MessageQueue.create_from_handle(writer.says('{"type"'), 0) as reader:
            reader.wait_until_ready(20)
            received = [reader.dequeue(20) for _ in range(20)]
            assert [number for number, _ in received] == list(range(20))
            killing = Thread(lambda: (time.sleep(0.05), writer.process.kill()))
            with pytest.raises(PeerDied) as caught:
                reader.dequeue(20)
            killing.result()
            assert (caught.value.pid, caught.value.side) == (writer.pid, "writer")
            with pytest.raises(PeerDied):
                reader.dequeue_nowait()


def test_an_idle_reader_burns_no_cpu() -> None:
    with make_writer() as writer, child("idle", writer.export_handle().to_json()) as reader:
        writer.wait_until_ready(20)
        reader.says("ready")
        writer.enqueue(1)
        reader.says("waiting")
        time.sleep(0.5)  # what is measured
        writer.enqueue(2)
        assert float(reader.says()) < 0.05


SOON_S = 0.05
TRIES = 10
"""The machine may be busy: one try of so many has to be that fast."""


def interrupt(call: Any, end: blocking.MessageQueue, waits: Any) -> float:
    """Raise in a call that waits; return how many seconds later the exception leaves it."""
    raised: list[float] = []

    def handle(*_: object) -> None:
        raised.append(time.monotonic())
        raise _Late

    with handling(handle):
        sending = interrupt_after(eventually, waits, "the call to wait")
        with pytest.raises(_Late):
            call(end)
        took_s = time.monotonic() - raised[0]
        sending.result()
        return took_s


@pytest.mark.parametrize("how", READS)
def test_exception_of_a_handler_leaves_a_waiting_read_and_the_message_stays(how: str) -> None:
    with pair() as (writer, reader):
        took_s: list[float] = []
        while len(took_s) < 3 or (min(took_s) >= SOON_S and len(took_s) < TRIES):
            took_s.append(interrupt(READS[how], reader, lambda: reader.held.lock.owner))
            writer.enqueue(len(took_s), 20)
            assert reader.dequeue(20) == len(took_s)
        assert min(took_s) < SOON_S, took_s


@pytest.mark.parametrize("how", WRITES)
def test_exception_of_a_handler_leaves_a_waiting_write_and_nothing_is_sent(how: str) -> None:
    with pair() as (writer, reader):
        writer.enqueue_many(range(4), 20)
        took_s: list[float] = []
        while not took_s or (min(took_s) >= SOON_S and len(took_s) < TRIES):
            took_s.append(interrupt(WRITES[how], writer, lambda: writer.held.lock.owner))
        assert min(took_s) < SOON_S, took_s
        assert writer.messages == 4
        assert reader.dequeue_many(9, 20) == [*range(4)]
        writer.enqueue("after", 20)
        assert reader.dequeue(20) == "after"


# Storms


SCRIPT = str(HELPERS / "storm_child.py")
SIGNALS = 100
STORMS = [("pickle", "wide", True), ("raw", "local", False), ("msgpack", "remote", True)]


@pytest.mark.parametrize(("codec", "where", "native"), STORMS)
@pytest.mark.parametrize("end", ["reader", "writer"])
def test_storm_loses_nothing(end: str, codec: str, where: str, native: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, end, codec, where, str(SIGNALS)],
        env={**os.environ, "AIOSHM_NATIVE": "1" if native else "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{done.stdout} {done.stderr[-3000:]}"
    messages, interrupts = map(int, done.stdout.split())
    assert messages > 50
    assert interrupts > SIGNALS // 4
