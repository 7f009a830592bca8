"""The messages of engines and front ends to the coordinator, and back, in vLLM's MessagePack. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from aioshm.engine.protocol.addresses import MAX_INDEX
from aioshm.engine.protocol.messages import EngineCoreRequestType, SchedulerStats, StartWave, decode_single

UNSUBSCRIBED = b"\x00"
"""What the end of a subscription to everything looks like to an XPUB socket."""
SCALE = "SCALE_ELASTIC_EP"
"""What a front end says before the new number of engines."""
NOTICE_BYTES = 64
"""Above any `Notice`."""
MAX_REPORT_BYTES = 1 << 16
"""Above any report: the coordinator gets counts, never outputs."""

_NO_OUTPUTS, _NIL = b"\x90", b"\xc0"

_Index = Annotated[int, msgspec.Meta(ge=0, le=MAX_INDEX)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Report(msgspec.Struct, array_like=True, frozen=True):
    """An engine's message: the envelope `EngineCoreOutputs`, as far as the coordinator reads it."""

    engine_index: _Index = 0
    outputs: msgspec.Raw = msgspec.Raw(_NO_OUTPUTS)
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: msgspec.Raw = msgspec.Raw(_NIL)
    finished_requests: msgspec.Raw = msgspec.Raw(_NIL)
    wave_complete: _Number | None = None
    start_wave: _Number | None = None


class Wake(msgspec.Struct, array_like=True, frozen=True):
    """The message of older front ends while engines are paused: the receiver of the request, and its wave."""

    exclude: _Index | None
    wave: _Number


class Notice(msgspec.Struct, array_like=True, frozen=True):
    """A message of the launching process to the coordinator, its child."""

    engines: int | None = None  # how many engines there are now; None: as many as before
    dead: int | None = None  # the rank of an engine that has died
    incarnation: int = 0  # the first of its incarnations whose keys are not void


_report = msgspec.msgpack.Decoder(Report)
_front_end = msgspec.msgpack.Decoder(tuple[Any, _Number])
decode_notice: Callable[[bytes], Notice] = msgspec.msgpack.Decoder(Notice).decode
encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode  # a `Notice`, a `Published`


def decode_report(frames: list[bytes]) -> Report:
    """Decode an engine's message."""
    report = decode_single(_report, frames, MAX_REPORT_BYTES)
    if bytes(report.outputs) != _NO_OUTPUTS or bytes(report.utility_output) != _NIL:
        raise ValueError(f"engine {report.engine_index} has sent outputs, which are for front ends")
    if report.scheduler_stats is not None and not report.scheduler_stats.kv_cache_usage >= 0:  # or no number at all
        raise ValueError(f"engine {report.engine_index} uses {report.scheduler_stats.kv_cache_usage} of its KV cache")
    return report


def decode_from_front_end(frames: list[bytes]) -> Wake | int:
    """Decode a front end's message: a new number of engines, or an order to wake engines."""
    what, number = decode_single(_front_end, frames, MAX_REPORT_BYTES)
    if what != SCALE:
        try:
            return msgspec.convert((what, number), Wake)
        except msgspec.MsgspecError as error:
            raise ValueError(f"neither a new number of engines nor a request's wave: {error}") from None
    if not 1 <= number <= MAX_INDEX + 1:
        raise ValueError(f"there cannot be {number} engines")
    return int(number)


def encode_scale(n_engines: int) -> bytes:
    """Encode a front end's message about a new number of engines."""
    return encode((SCALE, n_engines))


def encode_start(start: StartWave) -> list[bytes]:
    """Encode the order to engines."""
    return [EngineCoreRequestType.START_DP_WAVE.value, encode(start)]
