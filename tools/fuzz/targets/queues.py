"""What queues get of others: over a lifeline, from remote readers and writers, and in a foreign process' ring."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from aioshm.codec.frames import HEADER, INLINE
from aioshm.errors import HandleError, NoPlaceVacant, PeerClosed
from aioshm.lifeline import protocol
from aioshm.lifeline.dialer import Lifeline
from aioshm.lifeline.protocol import Hello, Refusal, Welcome
from aioshm.queue.remote import wire
from aioshm.queue.tracing import TraceContext, is_trace, unpack_trace
from aioshm.ring import Layout
from aioshm.ring import header as headers
from aioshm.ring import layout as at
from aioshm.ring.layout import TRACE_BYTES, VERSION
from tools.fuzz.target import Pieces, Target, attempt

_HELLO = Hello(7, b"q" * 16, b"t" * 32, 0, 4711)


def greetings(data: bytes) -> None:
    """Take greetings off what has come, as both ends do."""
    received = bytearray(data)
    for _ in range(len(data) // 4 + 1):
        body = attempt(HandleError, protocol.take_frame, received)
        if body is None:
            break
        assert len(body) <= protocol.MAX_GREETING_BYTES
        _greeting(body)
    _greeting(data)


def _greeting(body: bytes) -> None:
    hello = attempt(HandleError, protocol.unpack_hello, body)
    if hello is not None:
        attempt(HandleError, protocol.check_hello, hello, _HELLO.version, _HELLO.queue_id, _HELLO.token)
        frame = bytearray(protocol.pack(hello))
        if len(frame) <= protocol.MAX_GREETING_BYTES:
            again = protocol.take_frame(frame)
            assert again is not None
            assert protocol.unpack_hello(again) == hello
            assert not frame
    attempt((HandleError, PeerClosed, NoPlaceVacant), protocol.unpack_answer, body)


_KNOWN = {
    protocol.GO: "on_go",
    protocol.EVICTED: "on_evicted",
    protocol.WAKE: "on_wake",
}


def signals(data: bytes) -> None:
    """Take signals as a reader does; those that are not known do nothing."""
    told: set[str] = set()
    lifeline: Any = object.__new__(Lifeline)  # its sockets have no part in this
    owner = lifeline._owner = SimpleNamespace()
    lifeline._asked, lifeline._asking, lifeline.said_goodbye = 1.0, True, False
    for name in _KNOWN.values():
        setattr(owner, name, lambda name=name: told.add(name))
    for begin in range(0, len(data), 3):
        lifeline._signals(data[begin : begin + 3])
    assert told == {name for signal, name in _KNOWN.items() if signal in data}
    assert lifeline.said_goodbye == (protocol.BYE in data)
    assert lifeline._asking == (protocol.PONG not in data)
    # Not a socket any more that its __del__ could close.
    lifeline._sock = None


def _greeting_seeds() -> Iterator[bytes]:
    for greeting in (
        _HELLO,
        Hello(1, b"", b"", -1, 2**31, "evict", 9),
        Welcome(1, b"s" * 16, segment=True, bells=True, rank=2, first=1 << 40, going=True),
        Refusal("no place", full=True),
        protocol.CLOSED,
    ):
        yield protocol.pack(greeting)
        yield protocol.pack(greeting)[4:]
    yield protocol.pack(_HELLO) * 2
    yield b"\x00\x00\x10\x01"
    yield b"\x82\xa4type\xa5hello\xa4more" + b"\x91" * 900


_SECRET = b"s" * wire.SECRET_BYTES
_FROM_READER = (
    wire.Hello(VERSION, b"q" * 16, b"t" * 32, 0, 7, "host", proven=True),
    wire.Hello(VERSION + 1, b"q" * 16, b"t" * 32, -1, 7, "host", proven=False, slow="skip", topic=_SECRET, history=3),
    wire.Acknowledge(5),
    wire.Resend(3),
    wire.Finished(),
    wire.Leave(),
)
_FROM_WRITER = (
    wire.Welcome(1, "host", 0, 5, _SECRET, 4, 1000),
    wire.Wait("soon"),
    wire.Refused("no", full=True),
    wire.Refused("no"),
    wire.Go(),
    wire.Tick(),
    wire.Left(),
    wire.Closing(9),
)


def control(data: bytes) -> None:
    """Read a control message as either end; what can be read must come back as it was."""
    from_reader = attempt(wire.WireError, wire.parse_from_reader, data)
    if from_reader is not None:
        assert wire.parse_from_reader(from_reader.pack()) == from_reader
    from_writer = attempt(wire.WireError, wire.parse_from_writer, data)
    if from_writer is not None:
        assert wire.parse_from_writer(from_writer.pack()) == from_writer


def data_messages(data: bytes) -> None:
    """Read a data message, of one frame or two, and a subscription."""
    pieces = Pieces(data)
    shape = pieces.number(3)
    head = pieces.take(wire.HEAD_BYTES + pieces.number(64)) if shape == 2 else pieces.rest()
    body = memoryview(pieces.rest()) if shape == 2 else None
    found = attempt(wire.WireError, wire.parse_data, memoryview(head), body)
    if found is not None:
        assert found.main_bytes <= found.total
        assert found.offset + len(found.body) <= found.total
        assert len(found.trace) in (0, TRACE_BYTES)
        assert found.kind in (INLINE, 3, wire.MARK)
    rank = wire.subscriber(data, _SECRET)
    assert rank is None or data == b"\x01" + wire.address(_SECRET, rank)


def _data_seeds() -> Iterator[bytes]:
    for kind, body in ((INLINE, b"\x01"), (3, b"raw"), (wire.MARK, b"")):
        head = wire.address(_SECRET) + HEADER.pack(kind, 3, 0, 0, 7, 1, len(body))
        yield b"\x00" + head + body
        traced = wire.address(_SECRET) + HEADER.pack(kind, 3, wire.TRACED, 0, 7, 1, len(body))
        yield b"\x00" + traced + b"\x01" * TRACE_BYTES + body
        apart = wire.address(_SECRET, 1) + HEADER.pack(kind, 3, wire.BODY_APART, 0, 7, 1, len(body))
        yield b"\x02\x00\x00" + apart + body
    yield b"\x01" + wire.address(_SECRET, 3)


_LAYOUTS = (Layout.of(2, 100, 2, 4), Layout.of(70, 1 << 20, 3))


def snapshots(data: bytes) -> None:
    """Read a ring's header that says anything: as it is, and with sizes that make one."""
    attempt(HandleError, headers.read_layout, data)
    attempt(HandleError, headers.read_header, data, 5)
    pieces = Pieces(data)
    layout = _LAYOUTS[pieces.number(len(_LAYOUTS))]
    memory = bytearray(layout.header_bytes)
    preamble = layout.preamble(b"q" * 16)
    memory[: len(preamble)] = preamble
    while pieces:
        place, scribble = pieces.number(len(memory)), pieces.some(16)
        scribble = scribble[: len(memory) - place]
        memory[place : place + len(scribble)] = scribble
    found = attempt(HandleError, headers.read_header, bytes(memory), 1 << 62)
    if found is None:
        return
    found.label.encode()
    assert found.backlog >= 0
    assert len(found.readers) == found.n_reader
    for row in found.readers:
        for share in (0.0, 0.5, 0.99, 1.0):
            quantile = row.latency.quantile(share)
            assert quantile is None or quantile >= 0
        assert row.latency.since(row.latency).samples == 0


def traces(data: bytes) -> None:
    """Read a trace context as text and as it travels."""
    text = data.decode(errors="surrogateescape")
    for each in {text, data.decode("latin-1")}:
        found = attempt(ValueError, TraceContext.from_traceparent, each)
        if found is not None:
            assert TraceContext.from_traceparent(found.traceparent) == found
    packed = data[:TRACE_BYTES].ljust(TRACE_BYTES, b"\0")
    if is_trace(packed):
        context = unpack_trace(packed)
        assert context is not None
        assert TraceContext.from_traceparent(context.traceparent) == context


def _snapshot_seeds() -> Iterator[bytes]:
    yield b""
    for number, layout in enumerate(_LAYOUTS):
        yield layout.preamble(b"i" * 16) + bytes(300)
        yield bytes([number]) + struct.pack("<HB4s", layout.reader_line(0) + at.STATE, 4, b"\x01\x02\x03\x04")
        yield bytes([number]) + struct.pack("<HB16s", layout.histogram(0), 16, b"\xff" * 16)
        yield bytes([number]) + struct.pack("<HB4s", layout.name_at, 4, b"\xff\xfe\xfd\xfc")
    yield Layout(2**32 - 1, 1, 1, 1, 1).preamble(b"q" * 16)
    yield Layout(1, 2**64 - 1, 2**64 - 1, 2**64 - 1, 1, traced=True).preamble(b"q" * 16)


def _trace_seeds() -> Iterator[bytes]:
    yield b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"
    yield b"cc-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01-more"
    yield b"\x01\x01" + b"t" * 16 + b"s" * 8


TARGETS = (
    Target("greetings", greetings, _greeting_seeds),
    Target("signals", signals, lambda: (b"PGASWBE?!", b"", b"zzzz\xff\x00")),
    Target("control", control, lambda: (message.pack() for message in (*_FROM_READER, *_FROM_WRITER))),
    Target("data", data_messages, _data_seeds),
    Target("snapshots", snapshots, _snapshot_seeds),
    Target("traces", traces, _trace_seeds),
)
