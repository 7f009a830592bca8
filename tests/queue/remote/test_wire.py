"""Frames and control messages: a valid message, or a `WireError`, whatever the bytes are."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioshm.codec.frames import HEADER, INLINE, MAX_BUFFERS, OVERFLOW, RAW
from aioshm.lifeline.protocol import ANY_RANK
from aioshm.queue.remote import wire
from aioshm.queue.remote.wire import HEAD_BYTES, MAX_CONTROL_BYTES, PART_BYTES, WireError
from aioshm.ring.layout import VERSION

SECRET = bytes(range(wire.SECRET_BYTES))
NUMBERS = st.integers(0, 2**63 - 1)
RANKS = st.integers(0, wire.MAX_RANK)
TEXTS = st.text(max_size=50)

TOPICS = st.binary(min_size=wire.SECRET_BYTES, max_size=wire.SECRET_BYTES)
FROM_READER: dict[type, st.SearchStrategy[Any]] = {
    wire.Hello: st.builds(
        wire.Hello,
        NUMBERS,
        st.binary(max_size=32),
        st.binary(max_size=64),
        st.integers(ANY_RANK, wire.MAX_RANK),
        NUMBERS,
        TEXTS,
        st.booleans(),
        topic=TOPICS,
        history=NUMBERS,
    ),
    wire.Acknowledge: st.builds(wire.Acknowledge, NUMBERS),
    wire.Resend: st.builds(wire.Resend, NUMBERS),
    wire.Finished: st.builds(wire.Finished),
    wire.Leave: st.builds(wire.Leave),
}
FROM_WRITER: dict[type, st.SearchStrategy[Any]] = {
    wire.Welcome: st.builds(
        wire.Welcome, NUMBERS, TEXTS, RANKS, st.integers(0, wire.MAX_SEQ), TOPICS, NUMBERS, NUMBERS
    ),
    wire.Wait: st.builds(wire.Wait, TEXTS),
    wire.Refused: st.builds(wire.Refused, TEXTS, st.booleans(), st.booleans(), st.booleans()),
    wire.Go: st.builds(wire.Go),
    wire.Tick: st.builds(wire.Tick),
    wire.Left: st.builds(wire.Left),
    wire.Closing: st.builds(wire.Closing, NUMBERS),
}
PARSERS: list[tuple[Callable[[bytes], Any], dict[type, st.SearchStrategy[Any]]]] = [
    (wire.parse_from_reader, FROM_READER),
    (wire.parse_from_writer, FROM_WRITER),
]


def head(
    kind: int = INLINE, apart: int = 0, n_buffers: int = 0, main_bytes: int = 0, body: bytes = b"", seq: int = 7
) -> memoryview:
    header = HEADER.pack(kind, 2, apart, n_buffers, seq, 0, main_bytes)
    return memoryview(wire.address(SECRET) + header + body)


def check_data(frame: memoryview, body: memoryview | None) -> None:
    """Check that a frame is refused, or that what is read keeps to all bounds."""
    try:
        data = wire.parse_data(frame, body)
    except WireError:
        return
    assert data.kind in (INLINE, RAW, wire.MARK)
    assert 0 <= data.n_buffers <= MAX_BUFFERS
    assert 0 <= data.main_bytes <= data.total
    assert 0 <= data.offset <= data.offset + len(data.body) <= data.total
    assert data.n_buffers or data.main_bytes == data.total
    assert data.body == (frame[HEAD_BYTES:] if body is None else body)


def check_control(parse: Callable[[bytes], Any], kinds: dict[type, Any], data: bytes) -> None:
    """Check that a message is refused, or that what is read keeps to all bounds."""
    try:
        message = parse(data)
    except WireError:
        return
    assert type(message) in kinds
    assert len(data) <= MAX_CONTROL_BYTES
    if isinstance(message, wire.Hello):
        assert ANY_RANK <= message.rank <= wire.MAX_RANK
        assert message.history >= 0
    if isinstance(message, wire.Welcome):
        assert 0 <= message.rank <= wire.MAX_RANK
        assert 0 <= message.first <= wire.MAX_SEQ


# Control messages


@pytest.mark.parametrize("kind", [*FROM_READER, *FROM_WRITER], ids=lambda kind: kind.__name__)
def test_every_control_message_arrives_as_it_was_sent_and_only_where_it_belongs(kind: type) -> None:
    (parse, kinds), (other, _) = PARSERS if kind in FROM_READER else reversed(PARSERS)

    @settings(deadline=None, max_examples=25)
    @given(kinds[kind], st.integers(0, MAX_CONTROL_BYTES))
    def check(message: wire.Control, length: int) -> None:
        packed = message.pack()
        assert parse(packed) == message
        with pytest.raises(WireError):
            other(packed)
        for cut_or_longer in (packed[: length % len(packed)], packed[:-1], packed + b"\0"):
            with pytest.raises(WireError):
                parse(cut_or_longer)

    check()


@pytest.mark.parametrize(("parse", "kinds"), PARSERS, ids=["from reader", "from writer"])
def test_garbage_is_no_control_message(parse: Callable[[bytes], Any], kinds: dict[type, Any]) -> None:
    @settings(deadline=None)
    @given(st.binary(max_size=300))
    def arbitrary(data: bytes) -> None:
        check_control(parse, kinds, data)

    @settings(deadline=None)
    @given(st.one_of(*kinds.values()), st.data())
    def mutated(message: wire.Control, draw: st.DataObject) -> None:
        packed = bytearray(message.pack())
        for _ in range(draw.draw(st.integers(1, 3))):
            packed[draw.draw(st.integers(0, len(packed) - 1))] = draw.draw(st.integers(0, 255))
        check_control(parse, kinds, bytes(packed))

    for check in (arbitrary, mutated):
        check()


@pytest.mark.parametrize(
    "fields",
    [
        ["Acknowledge", -1],
        ["Acknowledge", True],
        ["Acknowledge", 1.0],
        ["Acknowledge", 1, 2],
        ["Resend", -1],
        ["Resend", [[0, 1]]],
        ["Hello", 1, b"", b"", ANY_RANK - 1, 1, "", False],
        ["Hello", 1, b"", b"", 0, 1, "", False, "block", b"", -1],
        ["Hello", 1, b"", b"", wire.EVERYONE, 1, "", False],
        ["Hello", 1, b"", b"", 0, 1, "x" * 5000, False],
        ["Control"],
        ["Closing", -1],
        ["Welcome", 1],
        "Proven",
        None,
    ],
    ids=repr,
)
def test_what_neither_end_says(fields: Any) -> None:
    for parse, _ in PARSERS:
        with pytest.raises(WireError):
            parse(msgspec.msgpack.encode(fields))


def test_bounds_of_control_messages() -> None:
    room = MAX_CONTROL_BYTES - len(wire.Wait("").pack()) - 2  # a long text's length takes more
    assert wire.parse_from_writer(wire.Wait("x" * room).pack()) == wire.Wait("x" * room)
    with pytest.raises(WireError, match=f"a control message of {MAX_CONTROL_BYTES + 1} bytes"):
        wire.parse_from_writer(wire.Wait("x" * (room + 1)).pack())
    for parse, _ in PARSERS:
        with pytest.raises(WireError, match="no control message"):
            parse(b"\x91" * 60_000)  # lists in lists in lists
        with pytest.raises(WireError, match="bytes"):
            parse(b"\xdc" + bytes(MAX_CONTROL_BYTES))


# Data messages


@settings(deadline=None)
@given(st.sampled_from([INLINE, RAW, wire.MARK]), st.integers(0, 2**64 - 1), st.binary(max_size=200), st.booleans())
def test_data_messages_arrive_as_they_were_sent(kind: int, seq: int, body: bytes, apart: bool) -> None:
    frame = head(kind, int(apart), 0, len(body), b"" if apart else body, seq)
    data = wire.parse_data(frame, memoryview(body) if apart else None)
    assert (data.kind, data.codec, data.n_buffers, data.seq, data.main_bytes) == (kind, 2, 0, seq, len(body))
    assert data.body == body
    with pytest.raises(WireError):  # the other number of frames
        wire.parse_data(frame, None if apart else memoryview(body))
    with pytest.raises(WireError):
        wire.parse_data(frame[: HEAD_BYTES - 1], memoryview(body) if apart else None)


@settings(deadline=None)
@given(st.binary(max_size=50), st.booleans(), st.data())
def test_damaged_data_messages(content: bytes, apart: bool, draw: st.DataObject) -> None:
    damaged = bytearray(head(INLINE, int(apart), 0, len(content), b"" if apart else content))
    for _ in range(draw.draw(st.integers(1, 3))):
        damaged[draw.draw(st.integers(wire.ADDRESS_BYTES, len(damaged) - 1))] = draw.draw(st.integers(0, 255))
    check_data(memoryview(damaged), memoryview(content) if apart else None)


@pytest.mark.parametrize(
    ("frame", "body"),
    [
        (head(OVERFLOW), None),
        (head(n_buffers=MAX_BUFFERS + 1, main_bytes=0, body=bytes(64)), None),
        (head(main_bytes=2**64 - 1, body=b"12"), None),
        (head(main_bytes=3, body=b"12"), None),
        (head(main_bytes=1, body=b"12"), None),
        (head(n_buffers=1, main_bytes=3, body=b"12"), None),
        (head(apart=1), None),
        (head(apart=2), b""),
        (head(apart=0), b""),
        (head(apart=1, main_bytes=2, body=b"12"), b"12"),
        (head(apart=1, main_bytes=3), b"12"),
    ],
)
def test_what_no_writer_sends(frame: memoryview, body: bytes | None) -> None:
    with pytest.raises(WireError):
        wire.parse_data(frame, None if body is None else memoryview(body))


@pytest.mark.parametrize("size", [PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES - 1])
def test_long_body_goes_in_parts_that_say_where_they_belong(size: int) -> None:
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    messages = list(wire.parts(bytes(head(apart=1, main_bytes=size)), memoryview(body)))
    assert len(messages) == -(-size // PART_BYTES)
    read = [wire.parse_data(memoryview(first), memoryview(second or b"")) for first, second in messages]
    assert [part.offset for part in read] == list(range(0, size, PART_BYTES))
    assert {(part.seq, part.total, part.main_bytes) for part in read} == {(7, size, size)}
    assert b"".join(part.body for part in read) == body


@pytest.mark.parametrize(("offset", "total", "body"), [(0, 1, b"12"), (2, 3, b"12"), (5, 3, b""), (0, 2**63, b"1")])
def test_part_beyond_its_message_is_refused(offset: int, total: int, body: bytes) -> None:
    frame = bytes(head(apart=1, main_bytes=total)) + struct.pack("<QQ", offset, total)
    with pytest.raises(WireError, match="a part of"):
        wire.parse_data(memoryview(frame), memoryview(body))


# Subscriptions


@settings(deadline=None)
@given(st.binary(max_size=60), RANKS)
def test_only_subscriptions_of_a_reader_that_knows_the_secret_count(garbage: bytes, rank: int) -> None:
    subscription = b"\x01" + wire.address(SECRET, rank)
    assert wire.subscriber(subscription, SECRET) == rank
    for other in (
        garbage,
        b"\x00" + subscription[1:],
        subscription[:-1],
        subscription + b"\0",
        b"\x01" + wire.address(SECRET[::-1], rank),
        b"\x01" + wire.address(SECRET),
    ):
        assert wire.subscriber(other, SECRET) is None


# Other versions


def test_greeting_and_refusal_of_a_later_version_are_understood() -> None:
    hello = wire.Hello(VERSION + 1, b"q", b"t", 0, 1, "host", False)
    fields = msgspec.msgpack.decode(hello.pack())
    assert wire.parse_from_reader(msgspec.msgpack.encode([*fields, "more"])) == hello
    assert wire.parse_from_reader(msgspec.msgpack.encode(fields[:8])) == hello
    later = ["Refused", "why", False, False, False, "more"]
    assert wire.parse_from_writer(msgspec.msgpack.encode(later)) == wire.Refused("why")
    assert wire.parse_from_writer(msgspec.msgpack.encode(later[:2])) == wire.Refused("why")
