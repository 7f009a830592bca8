"""What is found out of a queue from outside: the header of a foreign process' ring, and trace contexts."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from aioshm.errors import HandleError
from aioshm.queue.tracing import TraceContext, is_trace, unpack_trace
from aioshm.ring import Layout
from aioshm.ring import header as headers
from aioshm.ring import layout as at
from aioshm.ring.layout import TRACE_BYTES
from tools.fuzz.target import Pieces, Target, attempt

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
    Target("snapshots", snapshots, _snapshot_seeds),
    Target("traces", traces, _trace_seeds),
)
