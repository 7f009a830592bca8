"""Messages about engines instead of requests: of the coordinator, of the membership, and orders to pause. No I/O.

The messages of the coordinator are vLLM's, all others aioshm's own; all are MessagePack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import time_ns
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from aioshm.engine.protocol.addresses import MAX_INDEX, EngineHandshakeMetadata
from aioshm.engine.protocol.messages import (
    Count,
    EngineCoreRequestType,
    Rank,
    SchedulerStats,
    StartWave,
    decode_single,
)

UNSUBSCRIBED = b"\x00"
"""An XPUB socket receives this at the end of a subscription to everything."""
SCALE = "SCALE_ELASTIC_EP"
"""Precedes the new number of engines in a front end's message."""
NOTICE_BYTES = 64
"""Above any `Notice`."""
MAX_REPORT_BYTES = 1 << 16
"""Above any report: the coordinator gets counts, never outputs."""
MAX_MEMBERSHIP_BYTES = 16 << 20
"""Above any membership, with the largest number of engines."""

_NO_OUTPUTS = b"\x90"
_NIL = b"\xc0"

encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode

# Orders to pause or to resume
#
# A client sends an order to each engine as a call of `PAUSE`, with the fields of a `PauseOrder` as arguments; the
# engine answers with the order in force when it takes no step any more. Engines, front ends and the launcher keep the
# newest order that they know, and pass it on: engines in a notice to aioshm's clients, and in their registration; front
# ends and the launching process with the membership; the launching process to a starting engine in INIT. Engines of
# vLLM get the calls that vLLM has for this, from one client.

PauseMode: TypeAlias = Literal["finish", "abort", "keep"]

PAUSE = "_aioshm_pause"
"""The name of the call, and of the field of registrations and of INIT; no method that a client may call has it."""
NOTICE_ID = 0
"""The call id of a notice: an answer without a call."""

_VLLM_MODES = {"finish": "wait", "abort": "abort", "keep": "keep"}


class PauseOrder(NamedTuple):
    """An order; of two orders the larger one holds."""

    version: Count = 0  # when it was given, in microseconds, and above the order before; 0: no order yet
    client: Count = 0  # the index of the client; 0 for the launching process, too
    mode: Literal["", "finish", "abort", "keep"] = ""  # "": resume

    def next(self, client: int, mode: Literal["", "finish", "abort", "keep"]) -> PauseOrder:
        """Return an order that replaces this one."""
        # A client that does not know the newest order gives a larger version nonetheless, by the clock.
        return PauseOrder(max(self.version + 1, time_ns() // 1000), client, mode)

    def call(self, *, of_vllm: bool) -> tuple[str, tuple[Any, ...]]:
        """Return the method and the arguments of the call that gives an engine this order."""
        if not of_vllm:
            return PAUSE, self
        if self.mode:
            return "pause_scheduler", (_VLLM_MODES[self.mode],)
        return "resume_scheduler", ()


NO_ORDER = PauseOrder()


@dataclass(slots=True)
class PausedMetadata(EngineHandshakeMetadata):
    """The front end's answer to HELLO while engines are paused."""

    pause: PauseOrder


def order_or_none(fields: Any) -> PauseOrder:
    """Return the decoded order of an engine, or `NO_ORDER` if it is invalid."""
    try:
        return msgspec.convert(fields, PauseOrder)
    except ValueError:
        return NO_ORDER


def check_mode(mode: object) -> None:
    """Raise `ValueError` unless the mode is valid."""
    if mode not in get_args(PauseMode):
        raise ValueError(f"mode must be 'finish', 'abort' or 'keep', not {mode!r}")


def describe_unpaused(ranks: list[int], timeout: float | None) -> str:
    """Return the text of the error of a pause that took too long."""
    return (
        f"engines {', '.join(map(str, ranks))} have not paused after {timeout} s: they have requests in flight, or are"
        " in a step; they pause later, unless resume() is called"
    )


# To and from the coordinator


class Report(msgspec.Struct, array_like=True, frozen=True):
    """An engine's message: the envelope `EngineCoreOutputs`, as far as the coordinator reads it."""

    engine_index: Rank = 0
    outputs: msgspec.Raw = msgspec.Raw(_NO_OUTPUTS)
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: msgspec.Raw = msgspec.Raw(_NIL)
    finished_requests: msgspec.Raw = msgspec.Raw(_NIL)
    wave_complete: Count | None = None
    start_wave: Count | None = None


class Notice(msgspec.Struct, array_like=True, frozen=True):
    """A message of the launching process to the coordinator, its child."""

    engines: int | None = None  # the new number of engines; None: unchanged
    dead: int | None = None  # the rank of an engine that has died
    incarnation: int = 0  # its first incarnation with valid keys


_report = msgspec.msgpack.Decoder(Report)
_front_end = msgspec.msgpack.Decoder(tuple[Any, Count])
decode_notice: Callable[[bytes], Notice] = msgspec.msgpack.Decoder(Notice).decode


def decode_report(frames: list[bytes]) -> Report:
    """Decode an engine's message."""
    report = decode_single(_report, frames, MAX_REPORT_BYTES)
    if bytes(report.outputs) != _NO_OUTPUTS or bytes(report.utility_output) != _NIL:
        raise ValueError(f"engine {report.engine_index} has sent outputs, which are for front ends")
    stats = report.scheduler_stats
    if stats is not None and not stats.kv_cache_usage >= 0:  # negative, or not a number
        raise ValueError(f"engine {report.engine_index} uses {stats.kv_cache_usage} of its KV cache")
    return report


def decode_from_front_end(frames: list[bytes]) -> StartWave | int:
    """Decode a front end's message: a new number of engines, or (older releases) a request to wake paused engines."""
    first, number = decode_single(_front_end, frames, MAX_REPORT_BYTES)
    if first != SCALE:
        try:
            return msgspec.convert((number, first), StartWave)
        except msgspec.MsgspecError as error:
            raise ValueError(f"neither a new number of engines nor a request's wave: {error}") from None
    if not 1 <= number <= MAX_INDEX + 1:
        raise ValueError(f"there cannot be {number} engines")
    return int(number)


def encode_scale(n_engines: int) -> bytes:
    """Encode a front end's message about a new number of engines."""
    return encode((SCALE, n_engines))


def encode_start(start: StartWave) -> list[bytes]:
    """Encode the coordinator's order to engines."""
    return [EngineCoreRequestType.START_DP_WAVE.value, encode(start)]


# Between the launching process and front ends in other processes


class Death(msgspec.Struct, array_like=True, frozen=True):
    """The death of an engine that is not back."""

    text: str
    engine: int | None  # the rank; None: of no single engine
    pid: int | None
    incarnation: int = 0  # the number of the rank's process, from 0 on


class Membership(msgspec.Struct, array_like=True, frozen=True):
    """The present engines; each message is complete, and independent of earlier ones."""

    version: int  # grows with each change
    engines: dict[Rank, int]  # the first incarnations with valid keys, by rank
    leaving: list[Rank] = []
    deaths: dict[Rank, Death] = {}  # by rank
    failure: Death | None = None  # why no engine will come back
    order: PauseOrder = NO_ORDER  # the newest order to pause or to resume
    # Older front ends ignore the items below.
    health: dict[Rank, tuple[Literal["stalled", "stopped"], str]] = {}  # engines without progress, and where they are


class Progress(msgspec.Struct, array_like=True, frozen=True):
    """The progress of a front end: its first message, sent again after every change."""

    version: int = 0  # the version of its membership; 0: none yet
    missing: list[Rank] = []  # the ranks of engines that have not registered with it
    busy: list[Rank] = []  # the ranks of leaving engines with unfinished requests of this front end
    order: PauseOrder = NO_ORDER  # the newest order that it knows
    unpaused: list[Rank] = []  # the ranks of engines that have not answered this order


_membership = msgspec.msgpack.Decoder(Membership)
_progress = msgspec.msgpack.Decoder(Progress)


def decode_membership(frames: list[bytes]) -> Membership:
    """Decode what the launching process publishes to front ends."""
    return decode_single(_membership, frames, MAX_MEMBERSHIP_BYTES)


def decode_progress(frames: list[bytes]) -> Progress:
    """Decode what a front end reports to the launching process."""
    return decode_single(_progress, frames, MAX_MEMBERSHIP_BYTES)
