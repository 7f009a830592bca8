"""What passes between a writer and its remote readers."""

from __future__ import annotations

from collections.abc import Iterator

from aioshm.codec.frames import HEADER, INLINE
from aioshm.queue.remote import wire
from aioshm.ring.layout import TRACE_BYTES, VERSION
from tools.fuzz.target import Pieces, Target, attempt

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
    wire.Welcome(1, "host", 0, 5, _SECRET),
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


TARGETS = (
    Target("control", control, lambda: (message.pack() for message in (*_FROM_READER, *_FROM_WRITER))),
    Target("data", data_messages, _data_seeds),
)
