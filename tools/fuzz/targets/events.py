"""Event batches in both encodings, the frames around them, and replay requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from aioshm.errors import CodecError
from aioshm.events.protocol import wire
from aioshm.events.protocol.encoding import BatchDecoder, BatchEncoder
from aioshm.events.protocol.index import BlockIndex
from aioshm.events.protocol.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, UnknownEvent
from tools.fuzz.target import Pieces, Target, attempt, framed

_ENCODERS = [
    (BatchEncoder(encoding, native=native), encoding) for encoding in ("array", "map") for native in (False, True)
]


def batches(data: bytes) -> None:
    """Decode a payload, apply it to an index, and encode what was understood again: both ways, by both encoders."""
    decoder = BatchDecoder(max_bytes=1 << 20)
    batch = attempt(CodecError, decoder.decode, data)
    if batch is None:
        return
    index: BlockIndex[str] = BlockIndex()
    index.apply("publisher", batch)
    assert len(index) >= 0
    _encode_and_back(batch.ts, batch.events, batch.data_parallel_rank)


def encoder(data: bytes) -> None:
    """Encode events whose fields are anything that MessagePack knows, of any type: both encoders agree."""
    pieces = Pieces(data)
    kind, count = pieces.number(4), pieces.number(16)
    value = attempt((msgspec.DecodeError, ValueError, RecursionError, TypeError), msgspec.msgpack.decode, pieces.rest())
    fields: list[Any] = value if isinstance(value, list) else [value]
    fields = (fields + [None] * 15)[: max(count, (6, 2, 0, 3)[kind])]
    made: Any
    if kind == 0:
        made = BlockStored(*fields[:15])
    elif kind == 1:
        made = BlockRemoved(*fields[:5])
    elif kind == 2:
        made = AllBlocksCleared()
    else:
        made = UnknownEvent("New", fields)
    _encode_and_back(1.5, [made, AllBlocksCleared()], None, typed=False)


def _encode_and_back(ts: float, events: list[Any], rank: int | None, *, typed: bool = True) -> None:
    payloads: dict[str, list[bytes | None]] = {}
    for each, encoding in _ENCODERS:
        payloads.setdefault(encoding, []).append(attempt(CodecError, each.encode, EventBatch(ts, events, rank), 3))
    for encoding, (portable, native) in payloads.items():
        assert portable == native, f"{encoding}: the encoders differ: {portable!r}, {native!r}"
        if portable is None:
            continue
        again = attempt(CodecError, BatchDecoder().decode, portable)
        if again is None:
            assert not typed or len(portable) > 1 << 16, "what was encoded cannot be decoded"
            continue
        assert len(again.events) == len(events)
        if encoding == "array" and any(newer_fields(event) for event in events):
            continue
        if typed and ts == ts and not any(isinstance(event, UnknownEvent) for event in events):
            assert repr(again.events) == repr(events), encoding


def newer_fields(event: Any) -> bool:
    """Whether an event has fields that arrays do not carry."""
    return any(getattr(event, name, None) is not None for name in ("mm_keys", "remaining_copy_counts"))


def frames(data: bytes) -> None:
    """Take apart live messages, replay requests and replies."""
    parts = Pieces(data).frames()
    live = attempt(CodecError, wire.parse_live, parts)
    assert live is None or [live.topic, wire.pack_seq(live.seq), live.payload] == parts
    start = attempt(CodecError, wire.parse_request, parts)
    assert start is None or wire.request(start) == parts
    reply = attempt(CodecError, wire.parse_reply, parts)
    if reply is not None:
        again = wire.reply(reply.topic or b"", reply.seq, reply.payload, "legacy" if reply.topic is None else "topic")
        assert again == parts


_STORED = BlockStored([1, b"2" * 32], None, [1, 2, 3, 4], 2, None, "GPU", extra_keys=[("a",), None], group_idx=0)
_EVENTS = [_STORED, BlockRemoved([2**64 - 1], "CPU"), AllBlocksCleared(), UnknownEvent("New", ["New", 1])]


def _batch_seeds() -> Iterator[bytes]:
    for made, _ in _ENCODERS[::2]:
        yield made.encode(EventBatch(1.5, _EVENTS), 0)
        yield made.encode(EventBatch(1.5, []), None)
        yield made.encode(EventBatch(2.5, [BlockStored([1], 0, [1], 1, 3, None)]), 1)
    yield msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1], 1, None], ["BlockRemoved", [1]], 7, {}]])
    stored = {"type": "BlockStored", "block_hashes": [-1], "parent_block_hash": None, "token_ids": ["a", [1, 2]]}
    more = {"block_size": 1, "mm_keys": [[{"hash": "x"}]]}
    removed = {"type": "BlockRemoved", "block_hashes": [1], "remaining_copy_counts": [1]}
    yield msgspec.msgpack.encode({"ts": 1.0, "events": [stored | more, removed]})


def _encoder_seeds() -> Iterator[bytes]:
    for kind in range(4):
        for fields in ([[1, 2], None, [1, 2], 2, None, "GPU"], [[-1, 2**63], b"x", [2**64 - 1], 1.5, {}, []]):
            yield bytes([kind, 15]) + msgspec.msgpack.encode(fields)


def _frame_seeds() -> Iterator[bytes]:
    seq = wire.pack_seq(7)
    yield framed(b"topic", seq, b"payload")
    yield framed(*wire.request(7))
    yield framed(*wire.reply(b"topic", 7, b"payload", "topic"))
    yield framed(*wire.reply(b"topic", 7, b"payload", "legacy"))
    yield framed(*wire.end_reply("topic"))
    yield framed(*wire.end_reply("legacy"))


TARGETS = (
    Target("batches", batches, _batch_seeds),
    Target("encoder", encoder, _encoder_seeds, native=True),
    Target("frames", frames, _frame_seeds),
)
