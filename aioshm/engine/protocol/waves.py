"""The coordinator's messages and state: the load of data-parallel engines, their waves, the next publication. No I/O.

Engines in lockstep are running together or paused together. A wave lies between two pauses; waves are numbered from 0
on. The engine of rank 0 reports the end of a wave. An engine that gets a request while all are paused reports that it
starts a wave, and the coordinator wakes all others.

Messages of several engines change their order. A message about a wave before the current wave is stale, and changes
nothing.

The messages are vLLM's, except for the `Notice` of the launching process; all are MessagePack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import msgspec

from aioshm.engine.protocol.addresses import MAX_INDEX
from aioshm.engine.protocol.messages import (
    Count,
    EngineCoreRequestType,
    Rank,
    SchedulerStats,
    StartWave,
    decode_single,
    encode,
)

UNSUBSCRIBED = b"\x00"
"""An XPUB socket receives this at the end of a subscription to everything."""
SCALE = "SCALE_ELASTIC_EP"
"""Precedes the new number of engines in a front end's message."""
NOTICE_BYTES = 64
"""Above any `Notice`."""
MAX_REPORT_BYTES = 1 << 16
"""Above any report: the coordinator gets counts, never outputs."""

_NO_OUTPUTS = b"\x90"
_NIL = b"\xc0"

INTERVAL_S = 0.1
"""The shortest time between two publications of counts."""
QUIET_INTERVAL_S = 5.0
"""The time between two publications of unchanged counts."""
STEP_S = 0.05
"""How long to wait for all other engines' counts of the same step."""
MAX_WAVES_AHEAD = 1 << 10
"""The limit of waves ahead of the coordinator's: a report with a huge wave would make all later waves stale."""

Counts: TypeAlias = "list[int | float]"


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


class Published(NamedTuple):
    """A publication to front ends."""

    counts: list[Counts] | None
    wave: int  # the current wave, or the next one while engines are paused
    running: bool


class Waves:
    """Counts and waves."""

    def __init__(self, n_engines: int, *, lockstep: bool = True, kv_cache_usage: bool = True) -> None:
        self.wave: int = 0  # the current wave, or the next one while engines are paused
        self.running: bool = False
        self.restarted: bool = False  # with the coordinator: begins at wave 0, and learns the engines' wave from them
        self._lockstep = lockstep
        self._kv_cache_usage = kv_cache_usage
        self._loads = [SchedulerStats()] * n_engines
        self._most = n_engines  # the largest number of engines so far
        self.subscribed: int = 0  # the number of engines with a subscription
        self._known: set[int] = set()  # the ranks of engines that have subscribed at some time
        self.ready: bool = False  # all engines have subscribed at some time: before, a message would not reach them
        self._step = (-1, -1)  # the newest step with counts: wave, number
        # The loads when the newest step began, unless they were published.
        self._of_last_step: list[SchedulerStats] | None = None
        self._published_at: float | None = None
        self._changed_at: float | None = None  # of the first unpublished change
        self._heard_at = 0.0

    @property
    def n_engines(self) -> int:
        return len(self._loads)

    # Engines come and go

    def subscribe(self, engine: int | None = None) -> bool:
        """Note one more subscription of an engine; return whether to send READY to engines."""
        self.subscribed += 1
        if engine is not None:
            self._known.add(engine)
        all_are_there = self.subscribed >= len(self._loads)
        self.ready = self.ready or (all_are_there and (engine is None or len(self._known) >= len(self._loads)))
        return self.ready

    def unsubscribe(self) -> None:
        """Note that an engine has left, or lost its connection."""
        self.subscribed = max(0, self.subscribed - 1)

    def scale(self, n_engines: int, now: float) -> None:
        """Change the number of engines: the lowest ranks stay."""
        self._most = max(self._most, n_engines)
        self._loads = self._loads[:n_engines] + [SchedulerStats()] * (n_engines - len(self._loads))
        self._of_last_step = None
        self._change(now)

    def forget(self, index: int, now: float) -> None:
        """Note the death of an engine: its load is void."""
        if index < len(self._loads):
            self._loads[index] = SchedulerStats()
            if self._of_last_step is not None:
                self._of_last_step[index] = self._loads[index]
            self._change(now)

    # Reports of engines

    def load(self, index: int, load: SchedulerStats, now: float) -> None:
        """Note the load of an engine.

        Engines in lockstep report at nearly the same time. Front ends must not compare an engine's step with the next
        step of another engine: a publication has the loads from before the newest step.
        """
        self._check(index)
        self._check_wave(index, load.current_wave)
        if index >= len(self._loads):
            return
        step = load.current_wave, load.step_counter
        if self._lockstep and step > self._step:
            self._step = step
            if self._changed_at is not None:
                self._of_last_step = self._loads.copy()
        self._loads[index] = load
        self._heard_at = now
        self._change(now)

    def complete(self, index: int, wave: int) -> bool:
        """Note an engine's report that a wave is complete."""
        self._check(index)
        self._check_wave(index, wave)
        if not self._lockstep or wave < self.wave:
            return False
        self.wave = wave + 1
        self.running = False
        return True

    def start(self, index: int, wave: int) -> StartWave | None:
        """Note an engine's report that it starts a wave."""
        self._check(index)
        self._check_wave(index, wave)
        if not self._lockstep or wave < self.wave or (wave == self.wave and self.running):
            return None
        self.wave = wave
        self.running = True
        return StartWave(wave, index)

    def wake(self, exclude: int | None, wave: int) -> StartWave | None:
        """Note that an older front end has sent a request to paused engines."""
        if not self._lockstep or self.running:
            return None
        self.running = True
        if wave < self.wave:
            exclude = None
        return StartWave(self.wave, exclude)

    def _check(self, index: int) -> None:
        # A new engine may report before the larger number of engines is known, and a removed engine after the smaller
        # number is known.
        if index >= max(self._most, self.subscribed):
            raise ValueError(f"there is no engine {index}: there are {len(self._loads)}")

    def _check_wave(self, index: int, wave: int) -> None:
        knows_wave = self.wave > 0 or not self.restarted
        if knows_wave and wave > self.wave + MAX_WAVES_AHEAD:
            raise ValueError(f"engine {index} speaks of wave {wave}, and the current wave is {self.wave}")

    # Publications

    def greet(self, now: float) -> None:
        """Note a new front end, which knows nothing yet."""
        self._change(now)

    def due(self) -> float:
        """Return the time of the next `publish`; may be past."""
        if self._published_at is None:
            return 0.0
        if self._changed_at is None:
            return self._published_at + QUIET_INTERVAL_S
        due = self._published_at + INTERVAL_S
        if self._lockstep and self._of_last_step is None:
            # A quiet moment, but not for ever.
            due = max(due, min(self._heard_at + STEP_S, self._changed_at + INTERVAL_S))
        return due

    def publish(self, now: float) -> Published:
        """Return the publication that is due now."""
        self._published_at = now
        if self._of_last_step is not None:
            loads = self._of_last_step
            self._of_last_step = None
            self._changed_at = now  # the loads of the newest step are not published yet
        else:
            loads = self._loads
            self._changed_at = None
        return self.state()._replace(counts=[self._counts(load) for load in loads])

    def state(self) -> Published:
        """Return the publication for the start or the end of a wave."""
        return Published(None, self.wave, self.running)

    def _counts(self, load: SchedulerStats) -> Counts:
        counts: Counts = [load.num_waiting_reqs, load.num_running_reqs]
        if self._kv_cache_usage:
            counts.append(load.kv_cache_usage)
        return counts

    def _change(self, now: float) -> None:
        if self._changed_at is None:
            self._changed_at = now


class Lockstep:
    """The waves as seen by an engine in lockstep."""

    def __init__(self, index: int) -> None:
        self.wave: int = 0  # the current wave, or the next one while engines are paused
        self.running: bool = False
        self.step: int = 0  # the number of steps in this wave
        self._index = index

    def add(self, request_wave: int) -> int | None:
        """Note a request, and its front end's idea of the wave; return the wave to start."""
        self.wave = max(self.wave, request_wave)
        if self.running:
            return None
        self.running = True
        return self.wave

    def start(self, start: StartWave) -> None:
        """Handle the coordinator's order: another engine has started a wave. A finished wave is not started."""
        if start.exclude != self._index and start.wave >= self.wave:
            self.wave = start.wave
            self.running = True

    def stepped(self, unfinished: bool) -> int | None:
        """Note a step, and whether any engine has work left; return the finished wave at rank 0."""
        self.step += 1
        if unfinished:
            return None
        self.running = False
        self.step = 0
        self.wave += 1
        if self._index == 0:
            return self.wave - 1
        return None
