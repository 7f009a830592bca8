"""The backlog of a subscriber's endpoint: its bound, its order, and what it says of what it dropped."""

from __future__ import annotations

import pytest

from aioshm.events.protocol.wire import pack_seq
from aioshm.events.subscribe.backlog import CAME_BACK, FRAME_OVERHEAD, MESSAGE_OVERHEAD, Backlog

PAYLOAD = bytes(1000)
SIZE = MESSAGE_OVERHEAD + 3 * FRAME_OVERHEAD + 1 + 8 + len(PAYLOAD)


def put(backlog: Backlog, *numbers: int, topic: bytes = b"t", connection: object = 1) -> None:
    for number in numbers:
        backlog.put(connection, [topic, pack_seq(number), PAYLOAD])


def shrink(backlog: Backlog) -> None:
    while backlog.is_shrinking:
        backlog.shrink()


def taken(backlog: Backlog) -> list[object]:
    """Take all entries: numbers of messages, connections of markers."""
    found: list[object] = []
    while (entry := backlog.take()) is not None:
        connection, frames, _ = entry
        found.append(connection if frames is None else int.from_bytes(frames[1], "big"))
    return found


def test_message_larger_than_the_bound_is_kept_if_it_is_the_newest() -> None:
    backlog = Backlog(SIZE // 2)
    put(backlog, 0)
    shrink(backlog)
    assert taken(backlog) == [0]
    put(backlog, 1, 2)
    shrink(backlog)
    assert taken(backlog) == [2]
    assert backlog.dropped == 1


def test_many_messages_are_dropped_in_several_calls() -> None:
    backlog = Backlog(40_000 * SIZE)
    put(backlog, *range(40_001))
    calls = 0
    while backlog.is_shrinking:
        backlog.shrink()
        calls += 1
    assert calls > 2
    assert (backlog.size, backlog.dropped) == (20_000 * SIZE, 20_001)
    assert backlog.dropped_between(b"t", 0, 50_000) == (0, 20_000)


def test_markers_stay_in_order_when_the_messages_between_them_are_dropped() -> None:
    backlog = Backlog(4 * SIZE)
    put(backlog, 0, 1, connection="a")
    backlog.note("a")
    backlog.note(CAME_BACK)
    put(backlog, 2, connection="b")
    backlog.note("b")
    put(backlog, 3, 4, connection="c")
    shrink(backlog)
    assert taken(backlog) == ["a", CAME_BACK, "b", 3, 4]


@pytest.mark.parametrize(
    ("topic", "first", "last", "expected"),
    [
        (b"t", 0, 100, (10, 12)),
        (b"t", 11, 11, (11, 11)),
        (b"t", 12, 100, (12, 12)),
        (b"t", 0, 9, None),
        (b"t", 13, 100, None),
        (b"u", 0, 100, (70, 71)),
        (b"v", 0, 100, None),
        (None, 0, 100, (10, 71)),
    ],
)
def test_dropped_numbers_are_known_by_topic(
    topic: bytes | None, first: int, last: int, expected: tuple[int, int] | None
) -> None:
    backlog = Backlog(7 * SIZE)
    for at in range(4):
        put(backlog, 10 + at)
        put(backlog, 70 + at, topic=b"u", connection=2)
    shrink(backlog)
    assert backlog.dropped == 5
    assert backlog.dropped_between(topic, first, last) == expected


def test_garbage_is_dropped_and_named_by_nobody() -> None:
    backlog = Backlog(1000)
    for _ in range(100):
        backlog.put(1, [b"t"])
        backlog.put(1, [b"t", b"no number", b""])
        shrink(backlog)
    assert backlog.dropped
    assert backlog.dropped_between(None, 0, 2**64) is None


def test_memory_of_dropped_numbers_is_bounded() -> None:
    backlog = Backlog(2 * SIZE)
    for number in range(5000):
        put(backlog, 2 * number, topic=b"%d" % number, connection=number)
        shrink(backlog)
    assert len(backlog._ranges) <= 1024
    for number in range(5000):
        put(backlog, 2 * number)
        shrink(backlog)
        backlog.take()
    assert all(len(ranges) <= 4 for ranges in backlog._ranges.values())
