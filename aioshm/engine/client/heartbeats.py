"""Judges the engines that send heartbeats: those that no process of their host reports as stalled to this client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from aioshm.engine.protocol.messages import HEARTBEAT_S, decode_heartbeat
from aioshm.process.progress import BUSY, IDLE, STARTING, WAITING, Sample
from aioshm.process.stalls import LOOK_S, Judge

if TYPE_CHECKING:
    from aioshm.engine.client.engines import Engine
    from aioshm.engine.client.link import EngineLink

OnLate: TypeAlias = Callable[[int, float, str], object]
"""Gets the rank of an engine, its seconds without progress (0: it moves again), and what it does, for people."""

logger: logging.Logger = logging.getLogger("aioshm.engine")

GRACE_S = 2 * HEARTBEAT_S
"""Added to every limit: a step may begin up to a second after the last heartbeat, and the next one may be late."""


@dataclass(slots=True)
class Pulse:
    """The heartbeats of an engine over its present connection."""

    judge: Judge
    sample: Sample  # the last heartbeat
    is_late: bool = False

    def where(self) -> str:
        seconds = self.judge.without_progress_s
        if self.sample.phase in (BUSY, WAITING):
            return f"no progress for {seconds:.0f} s in a step"
        return f"no sign of life of its event loop for {seconds:.0f} s"


class Heartbeats:
    """Judges engines by their heartbeats; on the running loop. Engines without heartbeats are not judged."""

    def __init__(self, link: EngineLink) -> None:
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._warning_s = link.options.stall_warning_s
        self._interval_s = min(LOOK_S, self._warning_s / 4)
        self._on_late: OnLate | None = None
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def supervise(self, hang_s: float | None, on_late: OnLate) -> None:
        """Report late engines, again and again, and not later than after ``hang_s``."""
        self._on_late = on_late
        if hang_s is not None:
            self._warning_s = min(self._warning_s, hang_s)
            self._interval_s = min(LOOK_S, self._warning_s / 4)
            for engine in self._link.engines:  # their first heartbeats came before READY
                if engine.pulse is not None:
                    engine.pulse.judge = Judge(self._warning_s + GRACE_S)

    def receive(self, engine: Engine, frames: Sequence[bytes]) -> None:
        """Take a heartbeat of an engine; raises `ValueError` if it is invalid."""
        heartbeat = decode_heartbeat(frames)
        phase = heartbeat.phase
        if phase == STARTING:  # it has registered, so its loop must run
            phase = IDLE
        expected_s = heartbeat.expected_s + GRACE_S * (heartbeat.expected_s > 0)
        sample = Sample(phase, heartbeat.steps, 1 + heartbeat.turns, expected_s, 0, heartbeat.requests, False)
        if engine.pulse is None:
            engine.pulse = Pulse(Judge(self._warning_s + GRACE_S), sample)
        engine.pulse.sample = sample
        if self._timer is None:
            self._last = self._loop.time()
            self._timer = self._loop.call_later(self._interval_s, self._look)

    def forget(self, engine: Engine) -> None:
        """Judge an engine no more whose connection has ended: another process may come."""
        pulse = engine.pulse
        engine.pulse = None
        if pulse is not None and pulse.is_late:
            self._link.engines.note_health(engine.rank, "running", "")

    def stop(self) -> None:
        """Stop. Idempotent; safe on a closed loop."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._look)
        self._link.sockets.registrations.run()  # sends may have cleared the event of a waiting heartbeat
        now = self._loop.time()
        # As in `ProgressWatch`: time counts only while this loop runs.
        elapsed_s = min(now - self._last, 2 * self._interval_s)
        self._last = now
        beating = [(engine, engine.pulse) for engine in self._link.engines if engine.pulse is not None]
        # Engines that wait for their peers come last: they are not the cause.
        for engine, pulse in sorted(beating, key=lambda each: each[1].sample.phase == WAITING):
            late = pulse.judge.look(elapsed_s, pulse.sample)
            where = pulse.where() if late else ""
            name = f"engine {engine.rank} ({engine.sender})"
            if late and (pulse.judge.report_is_due() or not pulse.is_late):
                self._link.engines.note_health(engine.rank, "stalled", where)
                logger.warning("%s is stalled: %s; its own log has the line", name, where)
            elif pulse.is_late and not late:
                self._link.engines.note_health(engine.rank, "running", "")
                logger.info("%s makes progress again", name)
            if self._on_late is not None and (late or pulse.is_late):
                self._on_late(engine.rank, pulse.judge.without_progress_s, where)
            pulse.is_late = late
