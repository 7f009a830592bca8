"""A blocking call that finds nothing looks on for a moment before it runs its loop, where messages come soon."""

from __future__ import annotations

import time
from typing import Any

import pytest
from faces import reading

LONG_NS = 30_000_000_000


def _never(*_args: object, **_kwargs: object) -> Any:
    raise AssertionError("the loop was run")


def test_a_message_that_comes_soon_needs_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(reader: Any) -> list[Any]:
        received = [reader.dequeue(10)]
        reader._end.linger_ns = LONG_NS
        monkeypatch.setattr(reader._loop, "run", _never)
        received.append(reader.dequeue(10))
        monkeypatch.undo()
        return received

    with reading(read) as (writer, thread):
        writer.enqueue("first")
        while writer.stats().backlog:
            time.sleep(0.001)
        writer.enqueue("second")
        assert thread.result() == ["first", "second"]


def test_it_ends_after_its_time() -> None:
    def read(reader: Any) -> list[Any]:
        received = [reader.dequeue(10)]
        reader._end.linger_ns = 1000
        with pytest.raises(TimeoutError):
            reader.dequeue(0.01)
        return received

    with reading(read) as (writer, thread):
        writer.enqueue("only")
        assert thread.result() == ["only"]


def test_a_writer_that_waits_for_room_is_woken_first() -> None:
    def read(reader: Any) -> int:
        reader.dequeue(10)
        for number in range(300):
            reader._end.linger_ns = LONG_NS  # without a wake-up, both would wait for that long
            assert reader.dequeue(10) == number
        return reader.stats().messages  # type: ignore[no-any-return]

    with reading(read, chunks=2) as (writer, thread):
        writer.enqueue("first")
        for number in range(300):
            writer.enqueue(number, 10)
        assert thread.result() == 301
