"""Messages that are kept for remote readers: copied before the caller goes on, and counted while ZeroMQ reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from support import eventually

from aioshm.codec.frames import HEADER, INLINE, RAW, body_bytes, split_body
from aioshm.queue.remote import wire
from aioshm.queue.remote.messages import Outbox, Outgoing
from aioshm.queue.remote.wire import ONE_FRAME_BYTES

SECRET = bytes(wire.SECRET_BYTES)


def pack(outbox: Outbox, *parts: Any, buffers: Any = (), kind: int = INLINE, seq: int = 5) -> Outgoing:
    views = [memoryview(buffer) for buffer in buffers]
    pieces = [part if isinstance(part, bytes) else memoryview(part) for part in parts]
    size = body_bytes(sum(map(len, parts)), [len(view) for view in views])
    return outbox.pack(kind, 2, seq, pieces, views, size)


def received(message: Outgoing) -> wire.Data:
    """Return what a reader makes of it."""
    body = None if message.body is None else memoryview(bytes(message.body))
    return wire.parse_data(memoryview(wire.address(SECRET) + message.head), body)


@pytest.mark.parametrize("size", [0, ONE_FRAME_BYTES, ONE_FRAME_BYTES + 1, 10**6])
def test_what_is_packed_is_a_copy(size: int) -> None:
    outbox = Outbox()
    content = bytearray(bytes(range(256)) * (size // 256 + 1))[:size]
    expected = bytes(content)
    small = bytearray(b"piece")
    messages = [
        pack(outbox, content, kind=RAW),
        pack(outbox, bytes(content)),
        pack(outbox, small, content),
        pack(outbox, small, buffers=[content, small]),
    ]
    content[:] = bytes(size)
    small[:] = b"-----"
    assert [received(message).body for message in messages[:3]] == [expected, expected, b"piece" + expected]
    data = received(messages[3])
    main, buffers = split_body(data.body, data.n_buffers, data.main_bytes)
    assert [main, *buffers] == [b"piece", expected, b"piece"]


def test_heads_and_sizes() -> None:
    outbox = Outbox()
    before = pack(outbox, b"x" * 100, kind=RAW, seq=2**40)
    data = received(before)
    assert (data.kind, data.codec, data.seq, data.main_bytes, data.n_buffers) == (RAW, 2, 2**40, 100, 0)
    assert before.nbytes == wire.HEAD_BYTES + 100
    apart = pack(outbox, b"x" * 100, buffers=[bytes(ONE_FRAME_BYTES)] * 3)
    data = received(apart)
    assert (data.kind, data.n_buffers, data.main_bytes) == (INLINE, 3, 100)
    assert len(apart.head) == HEADER.size
    assert apart.nbytes == wire.HEAD_BYTES + len(data.body)
    content = bytes(10**6)
    assert pack(outbox, content).body is content, "bytes cannot change, and are not copied"


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Give two sockets between which a message lies, uncopied, until it is received."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as receiver:
        sender.bind("inproc://pair")
        receiver.connect("inproc://pair")
        yield sender, receiver


def test_zeromq_itself_says_when_it_has_let_go(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    sender, receiver = pair
    outbox = Outbox()
    expected = b"payload!" * 50_000
    message = pack(outbox, b"", expected)
    for _ in range(2):  # as when it is sent again
        assert message.body is not None
        tracker = sender.send(message.body, copy=False, track=True)
        assert tracker is not None
        message.trackers.append(tracker)
    outbox.let_go([message, pack(outbox, b"small")])
    for _ in range(2):
        assert outbox.nbytes == message.nbytes
        assert receiver.recv() == expected

    def let_go() -> bool:
        outbox.tidy()
        return outbox.nbytes == 0

    eventually(let_go, "the end of ZeroMQ's use")
