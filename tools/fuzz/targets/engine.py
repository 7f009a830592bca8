"""What front ends, engines and the coordinator send each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from aioshm.engine.client.engines import Engines
from aioshm.engine.core.calls import Call
from aioshm.engine.protocol.addresses import CoreEngine, EngineZmqAddresses, identity
from aioshm.engine.protocol.control import (
    Notice,
    Report,
    decode_from_front_end,
    decode_notice,
    decode_report,
    encode,
    encode_scale,
)
from aioshm.engine.protocol.handshake import EngineHandshake, FrontEndHandshake
from aioshm.engine.protocol.messages import (
    EngineCoreOutputs,
    EnvelopeDecoder,
    UtilityOutput,
    is_finished,
    request_id_of,
)
from aioshm.engine.protocol.payloads import PayloadDecoder, PayloadEncoder, check_stranger
from aioshm.engine.protocol.waves import Published, Waves
from aioshm.errors import CodecError, HandshakeError
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
    encode(waves.publish(2.0))
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
    yield framed(_pack(EngineCoreOutputs(0, timestamp=1.0, utility_output=UtilityOutput(1, None, (None, 3)))))
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
    yield framed(encode(Notice(3, 1, 2)))
    yield framed(encode(Published([[1, 2]], 1, running=True)))


TARGETS = (
    Target("handshake", handshake, _handshake_seeds),
    Target("envelopes", envelopes, _envelope_seeds),
    Target("reports", reports, _report_seeds),
)
