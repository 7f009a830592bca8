"""The windows of a writer and of its remote readers, call by call."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioshm.queue.remote.window import Missing, ReceiveWindow, SendWindow
from aioshm.queue.remote.wire import MAX_RANGES, WireError


@dataclass(frozen=True)
class Message:
    nbytes: int = 1


def sending(*sizes: int, readers: int = 1, messages: int = 8, nbytes: int = 100) -> SendWindow[Message]:
    window: SendWindow[Message] = SendWindow(messages, nbytes)
    for rank in range(readers):
        window.join(rank)
    for size in sizes:
        window.sent(Message(size))
    return window


def receiving(*arrived: int, messages: int = 8, nbytes: int = 800) -> ReceiveWindow[str]:
    window: ReceiveWindow[str] = ReceiveWindow(messages, nbytes)
    for seq in arrived:
        assert window.arrived(seq, f"m{seq}", 10)
    return window


def line(window: ReceiveWindow[str]) -> list[str | Missing]:
    return [message for message, _ in window.ready]


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


def test_what_is_remembered_of_a_connection_is_bounded() -> None:
    window = sending(messages=4)
    for seq in range(1000):
        window.sent(Message())
        assert window.resend(0, seq, seq) == [Message()]
        window.acknowledged(0, seq + 1)
    assert sum(map(len, window._again.values())) <= 5
    window.leave(0)
    assert not window._again


@pytest.mark.parametrize("consumed", [-1, 4, 2**63])
def test_nobody_has_finished_with_what_was_not_sent(consumed: int) -> None:
    window = sending(1, 1, 1)
    with pytest.raises(WireError, match=f"acknowledges {consumed} of 3"):
        window.acknowledged(0, consumed)
    assert (len(window), window.readers) == (3, {0: 0})


@pytest.mark.parametrize(("first", "last"), [(2, 3), (3, 3), (2**62, 2**63), (2, 1)])
def test_nobody_asks_for_what_was_never_sent(first: int, last: int) -> None:
    with pytest.raises(WireError, match="are asked for"):
        sending(1, 1, 1).resend(0, first, last)


def test_what_lies_beyond_the_window_cannot_have_been_sent() -> None:
    window = receiving(0, messages=2)
    assert window.arrived(1, "m1", 10)
    for seq in (2, 2**64 - 1):
        with pytest.raises(WireError, match=f"message {seq} came while 0 is not finished with"):
            window.arrived(seq, "too early", 10)
    assert window.to_ask_for() == [], "nor is anything behind it missing"
    window.finished()
    assert window.arrived(2, "m2", 10)


def test_gaps_are_asked_for_once() -> None:
    window = receiving(0, messages=100)
    assert window.to_ask_for() == []
    for seq in (3, 4, 7):
        window.arrived(seq, f"m{seq}", 10)
    assert window.to_ask_for() == [(1, 2), (5, 6)]
    assert window.to_ask_for() == []
    window.arrived(10, "m10", 10)
    assert window.to_ask_for() == [(8, 9)], "only what is new"
    window.arrived(5, "m5", 10)
    window.ask_again()
    assert window.to_ask_for() == [(1, 2), (6, 6), (8, 9)], "what has come meanwhile is not asked for"
    assert window.to_ask_for() == []


def test_a_request_names_a_bounded_number_of_runs() -> None:
    odd = range(1, 400, 2)
    window = receiving(*odd, messages=1000)
    runs = window.to_ask_for()
    assert len(runs) == MAX_RANGES
    assert runs[:-1] == [(seq, seq) for seq in range(0, 2 * MAX_RANGES - 2, 2)]
    assert runs[-1] == (2 * MAX_RANGES - 2, 398), "the rest, with some that is here"
    window = receiving(*odd[:MAX_RANGES], messages=1000)
    assert window.to_ask_for() == [(seq, seq) for seq in range(0, 2 * MAX_RANGES, 2)]


@settings(deadline=None)
@given(st.permutations(range(20)), st.integers(0, 20), st.integers(0, 25))
def test_losses_and_arrivals_in_any_order(order: list[int], before: int, end: int) -> None:
    window = receiving(messages=20)
    for seq in order[:before]:
        window.arrived(seq, f"m{seq}", 1)
    window.lose(end)
    for seq in order[before:]:
        window.arrived(seq, f"m{seq}", 1)
    expected = 0
    for message in list(line(window)):
        if isinstance(message, Missing):
            assert message.first == expected
            assert not set(order[:before]).intersection(range(expected, message.last + 1))
            expected = message.last + 1
        else:
            assert message == f"m{expected}"
            expected += 1
        window.finished()
        assert window.taken == expected
    assert expected == max(20, end)
    assert not window._early


@pytest.mark.parametrize(
    ("messages", "nbytes", "size", "after"),
    [(16, 10**6, 1, 2), (17, 10**6, 1, 3), (1, 10**6, 1, 1), (10**6, 800, 25, 4), (10**6, 801, 25, 5), (8, 1, 0, 1)],
)
def test_an_eighth_of_the_window_is_acknowledged_at_once(messages: int, nbytes: int, size: int, after: int) -> None:
    window: ReceiveWindow[str] = ReceiveWindow(messages, nbytes)
    for round_ in range(2):
        for count in range(1, after + 1):
            assert not window.must_acknowledge()
            window.arrived(window.next, "m", size)
            window.finished()
            assert window.must_acknowledge() == (count == after), f"round {round_}"
        window.acknowledged()
