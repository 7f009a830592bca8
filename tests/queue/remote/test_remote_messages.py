"""Messages for remote readers are copied before the caller goes on."""

from __future__ import annotations

from typing import Any

import pytest

from aioshm.codec.frames import HEADER, INLINE, RAW, body_bytes, split_body
from aioshm.queue.remote import wire
from aioshm.queue.remote.messages import Outgoing, pack
from aioshm.queue.remote.wire import ONE_FRAME_BYTES

SECRET = bytes(wire.SECRET_BYTES)


def packed(*parts: Any, buffers: Any = (), kind: int = INLINE, seq: int = 5) -> Outgoing:
    views = [memoryview(buffer) for buffer in buffers]
    pieces = [part if isinstance(part, bytes) else memoryview(part) for part in parts]
    size = body_bytes(sum(map(len, parts)), [len(view) for view in views])
    return pack(kind, 2, seq, pieces, views, size)


def received(message: Outgoing) -> wire.Data:
    """Return what a reader makes of it."""
    body = None if message.body is None else memoryview(bytes(message.body))
    return wire.parse_data(memoryview(wire.address(SECRET) + message.head), body)


@pytest.mark.parametrize("size", [0, ONE_FRAME_BYTES, ONE_FRAME_BYTES + 1, 10**6])
def test_what_is_packed_is_a_copy(size: int) -> None:
    content = bytearray(bytes(range(256)) * (size // 256 + 1))[:size]
    expected = bytes(content)
    small = bytearray(b"piece")
    messages = [
        packed(content, kind=RAW),
        packed(bytes(content)),
        packed(small, content),
        packed(small, buffers=[content, small]),
    ]
    content[:] = bytes(size)
    small[:] = b"-----"
    assert [received(message).body for message in messages[:3]] == [expected, expected, b"piece" + expected]
    data = received(messages[3])
    main, buffers = split_body(data.body, data.n_buffers, data.main_bytes)
    assert [main, *buffers] == [b"piece", expected, b"piece"]


def test_heads_and_sizes() -> None:
    before = packed(b"x" * 100, kind=RAW, seq=2**40)
    data = received(before)
    assert (data.kind, data.codec, data.seq, data.main_bytes, data.n_buffers) == (RAW, 2, 2**40, 100, 0)
    assert before.nbytes == wire.HEAD_BYTES + 100
    apart = packed(b"x" * 100, buffers=[bytes(ONE_FRAME_BYTES)] * 3)
    data = received(apart)
    assert (data.kind, data.n_buffers, data.main_bytes) == (INLINE, 3, 100)
    assert len(apart.head) == HEADER.size
    assert apart.nbytes == wire.HEAD_BYTES + len(data.body)
    content = bytes(10**6)
    assert packed(content).body is content, "bytes cannot change, and are not copied"
