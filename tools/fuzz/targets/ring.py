"""Slots: their headers, bodies and flags, as one end finds them that another one has scribbled on.

Both cores go through the same steps over the same garbage. They must give the same answers, and leave the same bytes.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from aioshm.codec.frames import INLINE, MAX_BUFFERS, RAW, split, unpack_header, write_body
from aioshm.codec.msgpack import MsgpackCodec
from aioshm.errors import AioshmError, CodecError
from aioshm.ring import Layout, reference
from aioshm.ring import layout as at
from aioshm.ring.ends import ReaderControl, WriterControl
from aioshm.ring.slot import Slot
from tools.fuzz.target import Pieces, Target, attempt

native: ModuleType | None
try:
    from aioshm.ring import _native as native
except ImportError:  # it was not built
    native = None

_CORES = [module for module in (reference, native) if module is not None]
_LAYOUTS = (
    Layout.of(1, 40, 2, 2, 8),
    Layout.of(2, 300, 3, 4, 64),
    Layout.of(9, 10, 1, 1, 0),
    Layout.of(2, 100, 2, 3, 100, traced=True),
)
_FAR_NS = 1 << 62
_PLAIN = INLINE | 3 << 8
_ERRORS = (AioshmError, ValueError, TypeError, OverflowError, RuntimeError, IndexError)
_MAX_STEPS = 60


class _Side:
    """One kind of core over a segment of its own."""

    def __init__(self, module: Any, layout: Layout) -> None:
        self.module, self.layout = module, layout
        self.memory = bytearray(layout.total_bytes)
        self._wake_ups = 0
        view = memoryview(self.memory)
        self.writer: Any = type("Writer", (WriterControl, module.WriterBase), {})(layout, view)
        self.slots = self.writer.slots
        reader: Any = type("Reader", (ReaderControl, module.ReaderBase), {})
        self.readers: list[Any] = [reader(layout, view, n) for n in range(layout.n_reader)]
        for core in (self.writer, *self.readers):
            core.bind(bytes, _PLAIN, False, self._note_wake_up)
            core.belong(None)
            core.open, core.budget, core.budget_ends_ns = True, 1 << 30, _FAR_NS
        for reader in self.readers:
            reader.bind_out_of_band(functools.partial(self._decode_out_of_band, reader))

    def _decode_out_of_band(self, reader: Any, begin: int) -> object:
        kind, code, how, n_buffers, seq, _, size = unpack_header(self.slots.bodies, begin)
        if kind != INLINE or code != _PLAIN >> 8 or seq != reader.seq or n_buffers != 1:
            return self.module.SLOW_PATH
        main, (buffer,) = split(self.slots.body(begin), how, n_buffers, size)
        return bytes(main), bytes(buffer)

    def _note_wake_up(self) -> None:
        self._wake_ups += 1

    def state(self) -> list[object]:
        """Return what its cores say of themselves."""
        cores = (self.writer, *self.readers)
        return [(each.seq, each.budget, each.open, each.spins, each.hits) for each in cores] + [self._wake_ups]

    def call(self, core: Any, name: str, *arguments: Any) -> object:
        try:
            answer = getattr(core, name)(*arguments)
        except _ERRORS as error:
            return type(error).__name__
        if isinstance(answer, Slot):
            room = attempt(AioshmError, lambda: bytes(answer.body))
            return "slot", answer.index, None if room is None else len(room)
        if answer is self.module.EMPTY or answer is self.module.SLOW_PATH:
            return "EMPTY" if answer is self.module.EMPTY else "SLOW_PATH"
        return answer

    def content(self) -> bytes:
        """Return its bytes but for the times in them."""
        memory, layout = bytearray(self.memory), self.layout
        for index in range(layout.slots):
            memory[layout.slot(index) + 16 : layout.slot(index) + 24] = bytes(8)
        for reader in range(layout.n_reader):
            for begin, size in (
                (layout.reader_line(reader) + at.LATENCY_NS, 8),
                (layout.histogram(reader), 8 * at.LATENCY_BUCKETS),
            ):
                memory[begin : begin + size] = bytes(size)
        return bytes(memory)


_WRITES = ("claim", "commit", "put", "send", "put_many", "evict", "admit", "free", "blocker", "spin_for", "spin")
_READS = ("release", "skip", "take", "receive", "take_many", "start_at", "give_back", "ready", "traces", "spin")


def slots(data: bytes) -> None:
    """Go through steps of both ends, and of who scribbles on what they share."""
    pieces = Pieces(data)
    layout = _LAYOUTS[pieces.number(len(_LAYOUTS))]
    sides = [_Side(module, layout) for module in _CORES]
    for step in range(_MAX_STEPS):
        if not pieces:
            break
        answers = _step(pieces, sides, layout)
        assert all(answer == answers[0] for answer in answers), f"step {step}: {answers}"
        states = [side.state() for side in sides]
        assert all(state == states[0] for state in states), f"step {step}: {states}"
    contents = [side.content() for side in sides]
    assert all(content == contents[0] for content in contents), "the cores leave different bytes"


def _step(pieces: Pieces, sides: list[_Side], layout: Layout) -> list[object]:
    what = pieces.number(8)
    if what < 2:
        name = _WRITES[pieces.number(len(_WRITES))]
        arguments = _arguments(pieces, name, layout)
        return [side.call(side.writer, name, *arguments) for side in sides]
    if what < 4:
        reader, name = pieces.number(layout.n_reader), _READS[pieces.number(len(_READS))]
        arguments = _arguments(pieces, name, layout)
        return [side.call(side.readers[reader], name, *arguments) for side in sides]
    if what == 4:  # a header that almost is one
        index = pieces.number(layout.slots)
        kind, codec, how, buffers = pieces.number(5), pieces.number(4), pieces.number(3), pieces.number(4)
        seq = pieces.number(4) * layout.slots + index
        size, chunk = (pieces.wide() if pieces.number(4) == 3 else pieces.number(400) for _ in range(2))
        scribble = struct.pack("<BBHIQQQQ", kind, codec, how, buffers, seq, 5, size, chunk)
        place = layout.slot(index)
    elif what == 5:  # flags
        index, row = pieces.number(layout.slots), pieces.take(layout.flag_bytes)
        place, scribble = layout.flags(index), bytes(flag if flag > 250 else flag & 1 for flag in row)
    elif what == 6:  # the stamp of a chunk
        pool = layout.pools[pieces.number(len(layout.pools))]
        place, scribble = pool.start + pieces.number(pool.chunks) * pool.stride, struct.pack("<Q", pieces.number(9))
    else:
        place, scribble = pieces.number(min(layout.total_bytes, 1 << 16)), pieces.take(8)
    for side in sides:
        end = min(len(side.memory), place + len(scribble))
        side.memory[place:end] = scribble[: end - place]
    return [None]


def _arguments(pieces: Pieces, name: str, layout: Layout) -> list[Any]:
    if name == "claim":
        return [pieces.number(350)]
    if name in ("put", "send"):
        return [pieces.some()]
    if name == "put_many":
        return [[pieces.some(40) for _ in range(pieces.number(4))], pieces.number(3)]
    if name in ("evict", "give_back", "take_many", "traces"):
        return [pieces.number(layout.n_reader + layout.slots + 1)]
    if name == "admit":
        return [pieces.number(layout.n_reader + 1), pieces.number(6), None]
    if name in ("free", "blocker", "spin_for"):
        return [pieces.number(6), [pieces.number(400) for _ in range(pieces.number(3))]]
    return [pieces.number(8)] if name in ("start_at", "spin") else []


def bodies(data: bytes) -> None:
    """Take a message's body apart, decode it with the one codec of ours that may get a stranger's, and back."""
    pieces = Pieces(data)
    how, buffers, size = pieces.number(2), pieces.number(5), pieces.number(1 << 16)
    if buffers == 4:
        buffers, size = pieces.wide() % (2 * MAX_BUFFERS), pieces.wide()
    body = memoryview(pieces.rest())
    for main_bytes in {size, min(size, len(body))}:
        found = attempt(CodecError, split, body, how, buffers, main_bytes)
        if found is None:
            continue
        main, parts = found
        assert len(main) == main_bytes
        assert len(parts) == buffers
        if not buffers or not how:
            target = bytearray(len(body) + 64 * (buffers + 2) + 8 * buffers)
            assert write_body(memoryview(target), [main], parts) == main_bytes
            again = split(memoryview(target), 0, buffers, main_bytes)
            assert again[0] == main
            assert again[1] == parts
        codec: Any = MsgpackCodec()
        value = attempt(CodecError, codec.decode, main, parts)
        attempt(CodecError, codec.view, main, parts)
        if value is not None:
            attempt(CodecError, codec.encode, value)


def _slot_seeds() -> Iterator[bytes]:
    for kind in range(len(_LAYOUTS)):
        send, receive = b"\x00\x03\x05hello", b"\x02\x00\x04"
        yield bytes([kind]) + send + receive + b"\x00\x03\x28" + b"x" * 40 + receive
        yield bytes([kind]) + (send + b"\x02\x00\x00" + b"\x02\x00\x01") * 4
        for header in ((INLINE, 3, 0, 0), (INLINE, 3, 1, 1), (RAW, 0, 0, 0), (2, 0, 0, 0)):
            yield bytes([kind]) + send + b"\x04\x00" + bytes(header) + b"\x00\x00\x05\x00\x00\x00\x00" + receive
        for how, words in ((0, [8]), (1, [8, 0, 32, 8])):  # an array, and one that was placed
            array, at_body = b"\x04\x00\x01\x03" + bytes([how, 1]) + bytes(7), _LAYOUTS[kind].slot(0) + 64
            writes = [b"\x07" + struct.pack("<HQ", at_body + 8 * n, word) for n, word in enumerate(words)]
            yield bytes([kind]) + send + array + b"".join(writes) + receive
        yield bytes([kind]) + b"\x04\x00\x01\x03\x00\x00\x00\x03" + b"\xff" * 8 + b"\x00\x00\x00" + receive
        yield bytes([kind]) + b"\x05\x00\x01\x00" + receive + b"\x02\x00\x05\x03"
        yield bytes([kind]) + send + b"\x00\x06\x00\x02" + b"\x00\x05\x00" + receive


def _body_seeds() -> Iterator[bytes]:
    codec: Any = MsgpackCodec()
    for value in (None, {"a": [1, 2.5, "x"]}, b"bytes", bytearray(8), "text"):
        encoded = codec.encode(value)
        main, parts = (encoded, ()) if isinstance(encoded, bytes) else (b"".join(encoded[0]), encoded[1])
        target = bytearray(512)
        size = write_body(memoryview(target), [main], parts)
        yield bytes([0, len(parts)]) + size.to_bytes(2, "little") + bytes(target)
    yield b"\x00\x04\x05\x00" + (3).to_bytes(8, "little") + (9).to_bytes(8, "little") + bytes(100)
    yield b"\x01\x01\x02\x00" + struct.pack("<Q", 16) + bytes(8) + struct.pack("<3Q", 40, 8, 8) + b"\x90\xc0"


TARGETS = (
    Target("slots", slots, _slot_seeds, native=True),
    Target("bodies", bodies, _body_seeds),
)
