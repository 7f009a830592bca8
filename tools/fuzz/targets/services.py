"""What front ends, engines and the coordinator send each other, and what publishers of events send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from aioshm.engine.client.engines import Engines
from aioshm.engine.core.core import Call
from aioshm.engine.protocol.addresses import CoreEngine, EngineZmqAddresses, identity
from aioshm.engine.protocol.handshake import EngineHandshake, FrontEndHandshake
from aioshm.engine.protocol.messages import (
    EngineCoreOutputs,
    EnvelopeDecoder,
    UtilityOutput,
    is_finished,
    request_id_of,
)
from aioshm.engine.protocol.payloads import PayloadDecoder, PayloadEncoder, check_stranger
from aioshm.engine.protocol.waves import (
    Notice,
    Published,
    Report,
    Waves,
    decode_from_front_end,
    decode_notice,
    decode_report,
    encode_scale,
)
from aioshm.errors import CodecError, HandshakeError
from aioshm.events.protocol import wire
from aioshm.events.protocol.encoding import BatchDecoder, BatchEncoder
from aioshm.events.protocol.index import BlockIndex
from aioshm.events.protocol.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, UnknownEvent
from tools.fuzz.target import Pieces, Target, attempt, framed

_pack = msgspec.msgpack.encode


def handshake(data: bytes) -> None:
    """Go through a startup of two engines that say anything; what is refused changes nothing."""
    pieces = Pieces(data)
    addresses = EngineZmqAddresses(["tcp://127.0.0.1:1"], ["tcp://127.0.0.1:2"])
    front = FrontEndHandshake([CoreEngine(0), CoreEngine(1, local=False)], addresses)
    engines = Engines([0, 1])
    engine = EngineHandshake(0)
    engine.hello()
    for _ in range(4):
        if not pieces:
            break
        who = pieces.number(4)
        sender = identity(who) if who < 3 else pieces.some(8)
        frames = [pieces.some(255) for _ in range(pieces.number(3))]
        before = [each.state for each in front.engines.values()]
        if attempt(HandshakeError, front.receive, sender, frames) is None:
            after = [each.state for each in front.engines.values()]
            assert sum(one is not other for one, other in zip(before, after, strict=True)) <= 1
        attempt(ValueError, engines.read_registration, sender, frames)
        attempt(HandshakeError, engine.receive, frames)
    assert front.num_gpu_blocks is None or front.num_gpu_blocks >= 0
    assert front.complete == (not [each for each in front.engines.values() if each.index not in front.ready])
    front.parallel_config_hash, front.stats_address, engines.stats_address  # noqa: B018  # they must not raise


_envelopes = EnvelopeDecoder()
_typed = EnvelopeDecoder(dict[str, int])
_payloads = PayloadDecoder()
_encoder = PayloadEncoder(1 << 20)


def envelopes(data: bytes) -> None:
    """Read an engine's outputs, a request and a call, whole and, where that fails, what can be read of them."""
    frames: list[Any] = Pieces(data).frames() or [b""]
    if attempt(CodecError, check_stranger, frames) is None and len(frames) > 1 << 12:
        return
    for decoder in (_envelopes, _typed):
        envelope = attempt(CodecError, decoder.decode, frames)
        if envelope is not None:
            for output in envelope.outputs:
                attempt(CodecError, request_id_of, output)
                is_finished(output)
    value = attempt(CodecError, _payloads.decode, frames)
    if value is not None:
        attempt(CodecError, request_id_of, value)
        attempt(msgspec.ValidationError, msgspec.convert, value, Call)
        attempt(CodecError, _encoder.encode, value)


def reports(data: bytes) -> None:
    """Read what the coordinator gets, and let it decide."""
    frames = Pieces(data).frames() or [b""]
    waves = Waves(2)
    waves.subscribe()
    waves.subscribe()
    report = attempt(ValueError, decode_report, frames)
    if report is not None:
        if report.wave_complete is not None:
            attempt(ValueError, waves.complete, report.engine_index, report.wave_complete)
        if report.start_wave is not None:
            attempt(ValueError, waves.start, report.engine_index, report.start_wave)
        if report.scheduler_stats is not None:
            attempt(ValueError, waves.load, report.engine_index, report.scheduler_stats, 1.0)
    said = attempt(ValueError, decode_from_front_end, frames)
    if isinstance(said, int):
        assert 1 <= said <= 1 << 16
    elif said is not None:
        waves.wake(said.exclude, said.wave)
    _pack(waves.publish(2.0))
    waves.due()
    attempt(msgspec.MsgspecError, decode_notice, frames[-1])


def _handshake_seeds() -> Iterator[bytes]:
    def said(index: int, **fields: Any) -> bytes:
        message = _pack({"local": index == 0, "headless": index == 1, **fields})
        return bytes([index, 1, len(message)]) + message

    hello, ready = said(0, status="HELLO"), said(0, status="READY", num_gpu_blocks=5)
    yield hello
    yield hello + ready + said(1, status="HELLO") + said(1, status="READY", parallel_config_hash="x")
    yield hello + hello
    yield ready
    yield b"\x03\x02\x07\x07\x01\x01\xc0"
    init = _pack({"addresses": {"inputs": ["a"], "outputs": ["b"]}, "parallel_config": {"a": 1}})
    yield bytes([0, 1, len(init)]) + init


def _envelope_seeds() -> Iterator[bytes]:
    outputs: list[Any] = [{"request_id": "r", "finish_reason": "stop"}, ["r", [1, 2], None, None, None, 1]]
    envelope = EngineCoreOutputs(1, outputs, timestamp=1.0)
    yield framed(*map(bytes, _encoder.encode(envelope)))
    yield framed(_pack(EngineCoreOutputs(0, [{"a": 1}], timestamp=1.0)))
    yield framed(_pack(EngineCoreOutputs(0, [], None, 1.0, UtilityOutput(1, None, (None, msgspec.Raw(b"\x03"))))))
    yield framed(_pack([0, 1, "method", [1, "x"]]))
    yield framed(_pack({"request_id": "r", "prompt": ["<f4", [2], msgspec.msgpack.Ext(3, bytes(8))]}))
    yield framed(_pack(["<i8", [1], 1]), bytes(8))
    yield framed(_pack(["float32", [2, 2], 1]), bytes(16))


def _report_seeds() -> Iterator[bytes]:
    yield framed(_pack(Report(0, wave_complete=3)))
    yield framed(_pack(Report(1, start_wave=0)))
    yield framed(_pack([0, [], {"num_running_reqs": 3, "kv_cache_usage": 0.5}]))
    yield framed(encode_scale(3))
    yield framed(_pack([None, 2]))
    yield framed(_pack(Notice(3, 1, 2)))
    yield framed(_pack(Published([[1, 2]], 1, running=True)))


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
    Target("handshake", handshake, _handshake_seeds),
    Target("envelopes", envelopes, _envelope_seeds),
    Target("reports", reports, _report_seeds),
    Target("batches", batches, _batch_seeds),
    Target("encoder", encoder, _encoder_seeds, native=True),
    Target("frames", frames, _frame_seeds),
)
