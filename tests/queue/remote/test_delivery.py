"""The windows of a writer and of its remote readers, call by call."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioshm.codec.frames import RAW
from aioshm.queue.remote.window import Missing, Outgoing, ReceiveWindow, SendWindow
from aioshm.queue.remote.wire import ADDRESS_BYTES, Data, WireError


def message(seq: int) -> Data:
    return Data(RAW, 0, 0, seq, 0, memoryview(b""), b"", 0, 0)


def sending(count: int = 0, messages: int = 8, nbytes: int = 1000) -> SendWindow:
    window = SendWindow(messages, nbytes)
    window.join(0)
    for _ in range(count):
        window.sent(Outgoing(b""))
    return window


def receiving(*arrived: int, messages: int = 8, nbytes: int = 800) -> ReceiveWindow:
    window = ReceiveWindow(messages, nbytes)
    for seq in arrived:
        receive(window, seq)
    return window


def receive(window: ReceiveWindow, seq: int, nbytes: int = 10) -> None:
    if window.expects(seq):
        window.arrived(message(seq), nbytes)


@settings(deadline=None)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=30), st.integers(1, 6), st.integers(1, 100))
def test_parts_are_as_large_as_the_window_allows(sizes: list[int], messages: int, nbytes: int) -> None:
    window = sending(messages=messages, nbytes=nbytes)
    while sizes:
        count = window.part(sizes)
        part, rest = sizes[:count], sizes[count:]
        assert part
        assert len(part) == 1 or (len(part) <= messages and sum(part) <= nbytes)
        if rest:
            assert len(part) == messages or sum(part) + rest[0] > nbytes, "one more would have been too much"
        assert window.room(len(part), sum(part))
        sizes = rest


def test_messages_are_sent_again_once_over_each_connection() -> None:
    window = sending(4)
    assert len(window.resend(0, 1)) == 3
    assert window.resend(0, 1) == window.resend(0, 3) == [], "all are on their way"
    window.sent(Outgoing(b"x"))
    assert [again.nbytes for again in window.resend(0, 4)] == [ADDRESS_BYTES + 1]
    window.connected(0)
    assert len(window.resend(0, 3)) == 2


@pytest.mark.parametrize("seq", [-1, 4, 2**63])
def test_nobody_has_finished_with_or_asks_for_what_was_not_sent(seq: int) -> None:
    window = sending(3)
    with pytest.raises(WireError, match=f"acknowledges {seq} of 3"):
        window.acknowledged(0, seq)
    assert (len(window), window.readers) == (3, {0: 0})
    for first in {3, max(3, seq)}:
        with pytest.raises(WireError, match=f"asks for message {first} of 3"):
            window.resend(0, first)


def test_what_lies_beyond_the_window_cannot_have_been_sent() -> None:
    window = receiving(0, 1, messages=2)
    for seq in (2, 2**64 - 1):
        with pytest.raises(WireError, match=f"message {seq} came while 0 is not finished with"):
            window.expects(seq)
    assert window.to_ask_for() is None, "nor is anything before it missing"
    window.finished()
    assert window.expects(2)


def test_gap_is_asked_for_once_over_each_connection() -> None:
    window = receiving(0, 0, messages=100)
    assert window.to_ask_for() is None
    receive(window, 3)
    assert window.to_ask_for() == 1
    receive(window, 4)
    assert window.to_ask_for() is None
    for seq in (1, 2, 3):
        receive(window, seq)
    window.ask_again()
    assert window.to_ask_for() == 4
    receive(window, 4)
    assert window.to_ask_for() is None
    assert len(window.ready) == 5


@pytest.mark.parametrize("end", [0, 2, 5])
def test_lost_messages_are_named(end: int) -> None:
    window = receiving(0, 1, 4)
    window.lose(end)
    lost = [found for found, _ in window.ready if isinstance(found, Missing)]
    assert lost == ([Missing(2, 4)] if end == 5 else [])
    for _ in range(len(window.ready)):
        window.finished()
    assert window.taken == max(2, end)


@pytest.mark.parametrize(
    ("messages", "nbytes", "size", "after"), [(17, 10**6, 1, 3), (10**6, 801, 25, 5), (1, 1, 0, 1)]
)
def test_an_eighth_of_the_window_is_acknowledged_at_once(messages: int, nbytes: int, size: int, after: int) -> None:
    window = ReceiveWindow(messages, nbytes)
    for round_ in range(2):
        for count in range(1, after + 1):
            assert not window.must_acknowledge()
            receive(window, window.next, size)
            window.finished()
            assert window.must_acknowledge() == (count == after), f"round {round_}"
        window.acknowledged()
