"""The messages between front ends and engines after the handshake. No I/O.

To an engine, ROUTER to DEALER: the engine's identity, a type byte, the payload's frames (see payloads.py)

    ADD            00  the request
    ABORT          01  the ids of requests
    START_DP_WAVE  02  [wave, exclude_engine_index], only from the coordinator
    UTILITY        03  [client_index, call_id, method, args]

and back, PUSH to PULL, an envelope, or a single frame `ENGINE_CORE_DEAD`. The names and the forms are vLLM's.

aioshm's clients and engines add a number: the generation of each submission, so that outputs of an aborted request are
never taken for outputs of a later request with the same id. It is the last frame of an ADD (`mark`), which
vLLM's engines ignore, and comes back in the ninth field of the envelope, which vLLM's front ends never get: an engine
sends it only to clients that have keys, or have sent it.

An engine of aioshm that no process of its own host watches sends its progress to front ends, DEALER to ROUTER: every
second, and when `progress.expect` begins or ends. Such a `Heartbeat` is one frame, an array with the marker
``aioshm heartbeat`` first; registrations, which go the same way, are maps. Only aioshm's front ends get heartbeats:
with keys from the registration on, without keys from the first request with a generation on.

The launching process publishes the `Membership` to front ends in other processes, and each reports its `Progress`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from time import monotonic, time_ns
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import msgspec

from aioshm.arguments import shown
from aioshm.engine.protocol.addresses import MAX_INDEX
from aioshm.engine.protocol.payloads import Frame, PayloadDecoder, readable
from aioshm.errors import CodecError

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
COORDINATOR_READY = b"READY"
SUBSCRIBE_TO_ALL = b"\x01"
"""An XSUB socket sends this to subscribe to everything."""

FINISH_REASON = 5
"""The index of the finish reason in vLLM's outputs, which are arrays; index 0 has the request id."""

NO_GENERATION = 0
"""The generation of requests that were submitted without one."""

HEARTBEAT_S = 1.0
"""Seconds between two heartbeats."""

MAX_MEMBERSHIP_BYTES = 16 << 20
"""Above any membership, with the largest number of engines."""

_HEARTBEAT = "aioshm heartbeat"
_HEARTBEAT_BYTES = 256
_HEARTBEAT_MARKER = slice(2, 2 + len(_HEARTBEAT))  # behind the heads of the array and of the marker

_MARK = b"aioshm generation "
_MARK_BYTES = len(_MARK) + 8

Output = TypeVar("Output")
T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=MAX_INDEX)]

encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode


class EngineCoreRequestType(Enum):
    """The type byte of a message to an engine."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """The answer to a call.

    Attributes:
        call_id: The id of the call.
        failure_message: Why the call failed; None after a success.
        result: vLLM's type information, unused here, and the result of the method, decoded apart from the envelope.
    """

    call_id: int
    failure_message: str | None = None
    result: tuple[Any, msgspec.Raw] | None = None


class SchedulerStats(msgspec.Struct):
    """The load of an engine: the fields of vLLM's statistics that load balancing needs."""

    num_running_reqs: Count = 0
    num_waiting_reqs: Count = 0
    step_counter: Count = 0
    current_wave: Count = 0
    kv_cache_usage: float = 0.0


class EngineCoreOutputs(msgspec.Struct, Generic[Output], array_like=True, omit_defaults=True, gc=False):
    """The envelope of an engine's messages.

    Attributes:
        engine_index: The engine's rank.
        outputs: The outputs of requests.
        scheduler_stats: Decoded by the reader.
        timestamp: When it was sent, by the engine's monotonic clock.
        utility_output: The answer to a call.
        finished_requests: The ids of finished requests.
        wave_complete: The finished wave, for the coordinator.
        start_wave: The wave that the engine starts, for the coordinator.
    """

    engine_index: int = 0
    outputs: list[Output] = []
    scheduler_stats: Any = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: set[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None

    def __post_init__(self) -> None:
        if not self.timestamp:
            self.timestamp = monotonic()


class MarkedOutputs(EngineCoreOutputs[Output], Generic[Output], array_like=True, gc=False):
    """The envelope for a client of aioshm's."""

    generations: list[int] | None = None


class Heartbeat(msgspec.Struct, array_like=True, frozen=True, tag=_HEARTBEAT, gc=False):
    """The progress of an engine; see `Sample` in ``aioshm.process.progress``.

    Attributes:
        phase: What the engine does.
        steps: The number of steps and calls that have begun or ended.
        turns: The number of signs of life of the event loop.
        expected_s: How long the present step may take, in seconds; 0: not known.
        requests: The number of requests that the engine has.
    """

    phase: Annotated[int, msgspec.Meta(ge=0, le=255)]
    steps: Count
    turns: Count
    expected_s: float
    requests: Count


class StartWave(NamedTuple):
    """The coordinator's order to engines to run, except for the engine that runs already."""

    wave: Count
    exclude: Rank | None


def decode_single(decoder: msgspec.msgpack.Decoder[T], frames: Sequence[bytes], max_bytes: int) -> T:
    """Decode a message of one frame; a `ValueError` describes an invalid one."""
    if len(frames) != 1:
        raise ValueError(f"a message of {len(frames)} payload frames")
    if len(frames[0]) > max_bytes:
        raise ValueError(f"a payload of {len(frames[0])} bytes, more than {max_bytes}")
    try:
        return decoder.decode(frames[0])
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"undecodable payload: {error}") from None


def request_id_of(payload: Any, what: str = "output") -> str:
    """Return the request id of a request or an output: an attribute, a key, or the first item of an array."""
    kind = type(payload)
    if kind is dict:
        found = payload.get("request_id")
    elif kind is list or kind is tuple:
        found = payload[0] if payload else None
    else:
        found = getattr(payload, "request_id", None)
    if type(found) is not str:
        raise CodecError(f'{what} needs "request_id", a string; got {shown(found)}')
    return found


def mark(frames: list[Frame], generation: int) -> list[Frame]:
    """Return the frames of a request with its generation appended."""
    return [*frames, _MARK + generation.to_bytes(8, "little")]


def pop_mark(frames: list[Frame]) -> int:
    """Remove the generation from the frames of a request, and return it; `NO_GENERATION` if there is none."""
    last = frames[-1]
    if len(frames) == 1 or len(last) != _MARK_BYTES or bytes(last[: len(_MARK)]) != _MARK:
        return NO_GENERATION
    return int.from_bytes(frames.pop()[len(_MARK) :], "little")


def is_heartbeat(frames: Sequence[Frame]) -> bool:
    """Return whether an engine's message to a ROUTER is a heartbeat, not a registration."""
    return len(frames) == 1 and frames[0][_HEARTBEAT_MARKER] == _HEARTBEAT.encode()


decode_heartbeat: Callable[[Sequence[bytes]], Heartbeat] = partial(
    decode_single, msgspec.msgpack.Decoder(Heartbeat), max_bytes=_HEARTBEAT_BYTES
)


def is_finished(output: Any) -> bool:
    """Return whether an output is its request's last: it has a ``finish_reason``, or is ``finished``."""
    kind = type(output)
    if kind is dict:
        return output.get("finish_reason") is not None or bool(output.get("finished"))
    if kind is list or kind is tuple:
        return len(output) > FINISH_REASON and output[FINISH_REASON] is not None
    return getattr(output, "finish_reason", None) is not None or bool(getattr(output, "finished", False))


def error_output(request_id: str, message: str) -> dict[str, str]:
    """Return the last output of a refused request, for engines without a form of their own."""
    return {"request_id": request_id, "finish_reason": "error", "error": message}


def refusal_of(last: Any) -> str | None:
    """Return the text of a last output in the form of `error_output`, as a map or an object; None for others."""
    if type(last) is dict:
        reason = last.get("finish_reason")
        text = last.get("error")
    else:
        reason = getattr(last, "finish_reason", None)
        text = getattr(last, "error", None)
    if reason == "error" and isinstance(text, str):
        return text
    return None


class Unreadable(NamedTuple):
    """Stands for an output that cannot be decoded as its type."""

    request_id: str
    error: str  # the engine's text if the engine has refused the request
    finished: bool


class EnvelopeDecoder:
    """Decodes envelopes; an output that is not of ``output_type`` is an `Unreadable` in its place."""

    def __init__(self, output_type: Any = None) -> None:
        self._wanted = "plain data" if output_type is None else output_type
        generic: Any = MarkedOutputs  # the type checker would take the brackets' content for a type
        self._decode_typed = PayloadDecoder(generic[Any if output_type is None else output_type]).decode
        self._decode_raw = PayloadDecoder(MarkedOutputs[msgspec.Raw]).decode
        self._decode_output = PayloadDecoder(output_type).decode
        self._decode_result = PayloadDecoder().decode

    def decode(self, frames: Sequence[Frame]) -> MarkedOutputs[Any]:
        envelope: MarkedOutputs[Any]
        try:
            envelope = self._decode_typed(frames)
        except CodecError:
            envelope = self._decode_raw(frames)
            parts = [*frames]
            for number, output in enumerate(envelope.outputs):
                parts[0] = output
                try:
                    envelope.outputs[number] = self._decode_output(parts, more=number > 0)
                except CodecError as error:
                    envelope.outputs[number] = self._unreadable(output, error)
        answer = envelope.utility_output
        if answer is not None and answer.result is not None:
            try:
                answer.result = None, self._decode_result([answer.result[1], *frames[1:]])
            except CodecError as error:
                answer.failure_message = f"the result of the call is not readable: {error}"
        return envelope

    def _unreadable(self, output: Frame, error: CodecError) -> Unreadable | None:
        found = readable(output)
        try:
            request_id = request_id_of(found)
        except CodecError:
            return None  # without an id it is rejected later
        text = refusal_of(found) or f"its output is no {self._wanted}: {error}"
        return Unreadable(request_id, text, is_finished(found))


def generations_of(envelope: MarkedOutputs[Any]) -> Sequence[int | None]:
    """Return the generation of each output of an envelope; None for each where the engine sends none."""
    if envelope.generations is None:
        return [None] * len(envelope.outputs)
    if len(envelope.generations) != len(envelope.outputs):
        raise CodecError(f"{len(envelope.generations)} generations for {len(envelope.outputs)} outputs")
    return envelope.generations


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


# The present engines


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


decode_membership: Callable[[Sequence[bytes]], Membership] = partial(
    decode_single, msgspec.msgpack.Decoder(Membership), max_bytes=MAX_MEMBERSHIP_BYTES
)
decode_progress: Callable[[Sequence[bytes]], Progress] = partial(
    decode_single, msgspec.msgpack.Decoder(Progress), max_bytes=MAX_MEMBERSHIP_BYTES
)
