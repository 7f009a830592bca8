"""Trace contexts in slots, in both cores: each message has its writer's of that moment, and garbage is none."""

from __future__ import annotations

from typing import Any

import pytest
from pairs_of_cores import NewPair, Pair

from aioshm.ring import layout as at

NONE = bytes(at.TRACE_BYTES)


def trace(number: int) -> bytes:
    return at.TRACE.pack(1, 1, number.to_bytes(16, "big"), number.to_bytes(8, "big"))


def traced(new_pair: NewPair, n_reader: int = 1, chunks: int = 3, **sizes: Any) -> Pair:
    return new_pair(n_reader, chunks, traced=True, **sizes)


def test_each_message_has_the_context_of_its_moment(new_pair: NewPair) -> None:
    pair = traced(new_pair, 2)
    for number in (1, 2, 3, 4):
        pair.writer.trace = trace(number) if number != 3 else NONE
        assert pair.writer.send(b"x" * 50) is None
        assert [reader.take() for reader in pair.readers] == [b"x" * 50] * 2
        assert pair.reader.traces(1) == [trace(number) if number != 3 else NONE]
    for reader in pair.readers:
        assert reader.traces(3) == [trace(2), NONE, trace(4)]
        assert reader.traces(99) == [trace(1), trace(2), NONE, trace(4)]
        assert reader.traces(0) == []
        assert reader.garbled == 0


def test_the_latest_are_kept(new_pair: NewPair) -> None:
    pair = traced(new_pair, 1, 8)
    for number in range(1, at.TRAIL + 10):
        pair.writer.trace = trace(number)
        assert pair.writer.put(b"")
        pair.reader.take()
    assert pair.reader.traces(1 << 40) == [trace(number) for number in range(10, at.TRAIL + 10)]


@pytest.mark.parametrize(
    ("found", "garbled"),
    [
        (bytes([2]) + trace(1)[1:], 1),
        (at.TRACE.pack(1, 1, bytes(16), b"12345678"), 1),
        (at.TRACE.pack(1, 1, b"1234567812345678", bytes(8)), 1),
        (at.TRACE.pack(0, 1, b"1234567812345678", b"12345678"), 0),
    ],
    ids=["unknown version", "no trace id", "no span id", "none, and leftovers"],
)
def test_garbage_is_ignored_and_counted(new_pair: NewPair, found: bytes, garbled: int) -> None:
    pair = traced(new_pair)
    pair.writer.put(b"x")
    start = pair.ring.layout.slot(0) + pair.ring.layout.trace_at
    pair.ring.view[start : start + at.TRACE_BYTES] = found
    assert pair.reader.take() == b"x", "the message is none the worse"
    assert pair.reader.traces(1) == [NONE]
    assert pair.reader.garbled == garbled
