"""A blocking call that finds nothing looks on for a moment before it runs its loop, where messages come soon."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from faces import reading

from aioshm.ring.atomics import native_core
from aioshm.wait.rhythm import Plan

LONG_NS = 30_000_000_000


def _never(*_args: object, **_kwargs: object) -> Any:
    raise AssertionError("the loop was run")


@pytest.mark.skipif(not native_core, reason="without it, every message is received by the loop")
def test_a_message_that_comes_soon_needs_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(reader: Any) -> list[Any]:
        received = [reader.dequeue(10)]
        reader.held.end.linger_ns = LONG_NS
        monkeypatch.setattr(reader.held.loop, "run", _never)
        received.append(reader.dequeue(10))
        monkeypatch.undo()
        return received

    with reading(read) as (writer, thread):
        writer.enqueue("first")
        while writer.stats().backlog:
            time.sleep(0.001)
        writer.enqueue("second")
        assert thread.result() == ["first", "second"]


def test_a_writer_that_waits_for_room_is_woken_first() -> None:
    def read(reader: Any) -> int:
        reader.dequeue(10)
        for number in range(300):
            reader.held.end.linger_ns = LONG_NS  # without a wake-up, both would wait for that long
            assert reader.dequeue(10) == number
        return reader.stats().messages  # type: ignore[no-any-return]

    with reading(read, chunks=2) as (writer, thread):
        writer.enqueue("first")
        for number in range(300):
            writer.enqueue(number, 10)
        assert thread.result() == 301


@pytest.mark.skipif(not native_core, reason="without it, every message is received by the loop")
def test_a_cpu_is_handed_on_before_the_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_on = threading.Event()
    sent = threading.Event()

    def hand_on() -> None:
        handed_on.set()
        assert sent.wait(20)

    def read(reader: Any) -> list[Any]:
        received = [reader.dequeue(10)]
        monkeypatch.setattr(os, "sched_yield", hand_on)
        monkeypatch.setattr(reader.held.loop, "run", _never)
        received.append(reader.dequeue(10))
        monkeypatch.undo()
        return received

    with reading(read) as (writer, thread):
        writer.enqueue("question")
        assert handed_on.wait(20)
        writer.enqueue("next one")
        sent.set()
        assert thread.result() == ["question", "next one"]


@pytest.mark.skipif(not native_core, reason="without it, every message is sent by the loop")
def test_messages_that_are_milliseconds_apart_need_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(reader: Any) -> list[Any]:
        return [reader.dequeue(10) for _ in range(6)]

    with reading(read) as (writer, thread):
        writer.enqueue(0)
        monkeypatch.setattr(writer.held.loop, "run", _never)
        for number in range(1, 6):
            time.sleep(0.02)
            writer.enqueue(number)
        monkeypatch.undo()
        assert thread.result() == list(range(6))


def _expect_soon(reader: Any) -> None:
    """Let the next wait sleep for a moment, and then expect a message within the next minute."""
    now = time.monotonic_ns()
    plan = Plan(wake_at_ns=now + 2_000_000, until_ns=now + 2 * LONG_NS)
    reader.held.gate.poller._predictor.plan = lambda *_: plan


@pytest.mark.skipif(not native_core, reason="without it, every message is received by the loop")
def test_a_message_in_its_window_is_received_outside_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    watching = threading.Event()

    def read(reader: Any) -> list[Any]:
        received = [reader.dequeue(10)]
        _expect_soon(reader)
        watch = reader.held.gate.poller.watch

        def watched(*args: Any) -> bool:
            monkeypatch.setattr(reader.held.loop, "run", _never)
            watching.set()
            return watch(*args)  # type: ignore[no-any-return]

        reader.held.gate.poller.watch = watched
        received.append(reader.dequeue(30))
        monkeypatch.undo()
        return received

    with reading(read) as (writer, thread):
        writer.enqueue("first")
        assert watching.wait(30)
        writer.enqueue("second")
        assert thread.result() == ["first", "second"]


def _linger(linger_ns: int) -> Callable[[Any], None]:
    return lambda reader: setattr(reader.held.end, "linger_ns", linger_ns)


@pytest.mark.parametrize(
    "begin", [_linger(1000), _linger(LONG_NS), _expect_soon], ids=["a brief look", "a long look", "a window"]
)
def test_no_look_outlasts_the_timeout(begin: Callable[[Any], None]) -> None:
    def read(reader: Any) -> list[Any]:
        received = [reader.dequeue(10)]
        begin(reader)
        with pytest.raises(TimeoutError):
            reader.dequeue(0.02)
        return received

    with reading(read) as (writer, thread):
        writer.enqueue("only")
        assert thread.result() == ["only"]
