"""The backlog of a subscriber's endpoint: its bound and its order."""

from __future__ import annotations

from aioshm.events.protocol.wire import pack_seq
from aioshm.events.subscribe.backlog import FRAME_OVERHEAD, MESSAGE_OVERHEAD, RECONNECTED, Backlog

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


def test_markers_stay_in_order_when_the_messages_between_them_are_dropped() -> None:
    backlog = Backlog(4 * SIZE)
    put(backlog, 0, 1, connection="a")
    backlog.note("a")
    backlog.note(RECONNECTED)
    put(backlog, 2, connection="b")
    backlog.note("b")
    put(backlog, 3, 4, connection="c")
    shrink(backlog)
    assert taken(backlog) == ["a", RECONNECTED, "b", 3, 4]
