"""Messages that are kept for remote readers: copied before the caller goes on, their memory used again, not early."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from support import eventually

from aioshm.codec.frames import HEADER, INLINE, RAW, body_bytes, split_body
from aioshm.queue.remote import wire
from aioshm.queue.remote.outgoing import IDLE_BYTES, Outbox, Outgoing
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


def idle(outbox: Outbox) -> list[int]:
    return [len(memory) for memory in outbox._idle]


@pytest.mark.parametrize("size", [0, 1, ONE_FRAME_BYTES - 1, ONE_FRAME_BYTES, ONE_FRAME_BYTES + 1, 10**6])
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


def test_bytes_that_nobody_can_change_are_not_copied() -> None:
    content = bytes(10**6)
    assert pack(Outbox(), content).body is content


def test_memory_is_used_again() -> None:
    outbox = Outbox()
    first = pack(outbox, b"1", bytes(100_000))
    memory = first.memory
    assert memory is not None
    assert pack(outbox, b"2", bytes(100_000)).memory is not memory, "the first one is still kept"
    outbox.let_go([first])
    assert first.body is None
    small = pack(outbox, b"3", bytes(20_000))
    assert small.memory is not memory, "it would be wasted on so small a message"
    again = pack(outbox, b"4", bytes(50_000))
    assert again.memory is memory
    assert received(again).body == b"4" + bytes(50_000)
    larger = pack(outbox, b"5", bytes(100_001))
    assert larger.memory is not memory


def test_the_smallest_memory_that_fits_is_taken() -> None:
    outbox = Outbox()
    messages = [pack(outbox, b"x", bytes(size)) for size in (300_000, 100_000, 200_000)]
    memories = [message.memory for message in messages]
    outbox.let_go(messages)
    assert pack(outbox, b"x", bytes(90_000)).memory is memories[1]
    assert pack(outbox, b"x", bytes(90_000)).memory is memories[2]


def test_memory_that_zeromq_reads_is_not_touched() -> None:
    outbox = Outbox()
    message = pack(outbox, b"1", bytes(100_000))
    memory = message.memory
    trackers: list[Any] = [SimpleNamespace(done=False) for _ in range(3)]
    message.trackers.extend(trackers)
    outbox.let_go([message])
    assert outbox.nbytes == message.nbytes
    for tracker in trackers:
        assert outbox.nbytes == message.nbytes, "it is sent three times"
        assert pack(outbox, b"2", bytes(100_000)).memory is not memory
        tracker.done = True
        outbox.tidy()
    assert outbox.nbytes == 0
    assert pack(outbox, b"2", bytes(100_000)).memory is memory


def test_bytes_that_zeromq_reads_count_too() -> None:
    outbox = Outbox()
    message = pack(outbox, bytes(100_000))
    tracker: Any = SimpleNamespace(done=False)
    message.trackers.append(tracker)
    outbox.let_go([message, pack(outbox, b"small")])
    assert outbox.nbytes == message.nbytes
    tracker.done = True
    outbox.tidy()
    assert (outbox.nbytes, idle(outbox)) == (0, [])


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
    memory = message.memory
    for _ in range(2):  # as when it is sent again
        assert message.body is not None
        tracker = sender.send(message.body, copy=False, track=True)
        assert tracker is not None
        message.trackers.append(tracker)
    outbox.let_go([message])
    for _ in range(2):
        assert outbox.nbytes == message.nbytes
        other = pack(outbox, b"", b"garbage!" * 50_000)
        assert other.memory is not memory
        assert receiver.recv() == expected

    def let_go() -> bool:
        outbox.tidy()
        return outbox.nbytes == 0

    eventually(let_go, "the end of ZeroMQ's use")
    assert pack(outbox, b"", b"garbage!" * 50_000).memory is memory


def test_idle_memory_is_bounded() -> None:
    outbox = Outbox()
    size = 1 << 20
    messages = [pack(outbox, b"x", memoryview(mmap.mmap(-1, size))) for _ in range(80)]
    assert idle(outbox) == []
    outbox.let_go(messages)
    assert 0 < sum(idle(outbox)) <= IDLE_BYTES
    assert max(idle(outbox)) == size + 1
    before = idle(outbox)
    outbox.let_go([pack(outbox, b"x", bytes(2 * IDLE_BYTES))])
    assert idle(outbox) == before, "what only one message in a while needs is given back"
    outbox.let_go([pack(outbox, b"x", bytes(size))])
    assert sorted(idle(outbox)) == sorted(before), "what fits is used again"
