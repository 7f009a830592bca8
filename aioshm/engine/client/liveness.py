"""Deaths and stalls of a client's engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from aioshm.engine.client.engines import Engine
from aioshm.engine.protocol.addresses import engine_index
from aioshm.engine.protocol.messages import HEARTBEAT_S, decode_heartbeat
from aioshm.errors import EngineDead
from aioshm.process.progress import BUSY, IDLE, STARTING, WAITING, Sample
from aioshm.process.stalls import LOOK_S, Judge
from aioshm.process.watch import ProcessExit, ProcessWatch, WatchedManager, WatchedProcess

if TYPE_CHECKING:
    from aioshm.engine.client.link import EngineLink

OnLate: TypeAlias = Callable[[int, float, str], object]
"""Gets the rank of an engine, its seconds without progress (0: it moves again), and what it does, for people."""

LAST_WORDS_S = 0.1
"""How long outputs of an engine may arrive after the end of its connection."""

NAME_WITHIN_S = 1.0
"""How long to wait for a report that says more: the engine's rank, the exit code of its process."""

GRACE_S = 2 * HEARTBEAT_S
"""Added to every limit: a step may begin up to a second after the last heartbeat, and the next one may be late."""

logger: logging.Logger = logging.getLogger("aioshm.engine")


class Liveness:
    """Combines the reports of connections, engines and process managers; judges engines by their heartbeats.

    An engine is dead when its connection has ended, when it reports its end, or when its process has exited. A
    connection does not know the cause, so its end is reported a moment later, unless a better report comes.
    """

    def __init__(self, link: EngineLink) -> None:
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._engines = link.engines
        self._watch: ProcessWatch | None = None
        self._nameless: asyncio.TimerHandle | None = None  # runs while an engine has said that it ends, and not which
        self._stopped = False
        self._warning_s = link.options.stall_warning_s
        self._on_late: OnLate | None = None
        self._looked_at = 0.0
        self._looking: asyncio.TimerHandle | None = None  # runs from the first heartbeat on

    def watch(self, manager: WatchedManager | None, processes: Iterable[WatchedProcess]) -> None:
        """Watch processes, too. Idempotent for watched ones."""
        if self._watch is None:
            self._watch = ProcessWatch(on_exit=self._process_exited)
        if manager is not None:
            self._watch.add(manager.processes, manager)
        self._watch.add(processes)

    def stop(self) -> None:
        """Stop. Idempotent; safe on a closed loop."""
        self._stopped = True
        for timer in (self._nameless, self._looking, *(engine.timer for engine in self._engines)):
            if timer is not None:
                timer.cancel()
        if self._watch is not None:
            self._watch.close()

    # Reports of deaths

    def replaced(self, engine: Engine, connection: int) -> None:
        """Settle the death of the process whose successor registers over this connection, if it is not reported yet."""
        self._engines.removed.discard(engine.rank)
        if engine.connection not in (None, connection):
            self.lose(engine)  # the successor has newer keys, and the connection has not ended yet
        if engine.timer is not None:
            self._settle(engine)

    def disconnected(self, connection: int) -> None:
        """Note the end of a connection, which may be no engine's."""
        engine = self._engines.at(connection)
        if engine is not None:
            engine.connection = None
            self.lose(engine)

    def said_dead(self, rank: int | None = None) -> None:
        """Note an engine's report of its end; ``rank``: the engine, if known."""
        goes_on = self._link.goes_on
        if rank is None and len(self._engines) == 1 and not (self._engines.removed or goes_on):
            rank = self._engines.ranks[0]
        if rank is not None:
            engine = self._engines.get(rank)
            if engine is not None and engine.death is None:
                engine.said_dead = True
                self.lose(engine)
            return
        for each in self._engines:
            each.said_dead |= each.timer is not None
        # Else it is the engine that is lost, dead, or removed.
        all_are_here = all(each.timer is None and each.connection is not None for each in self._engines)
        if all_are_here and self._nameless is None and not (self._engines.removed or self._stopped):
            error = EngineDead("an engine has said that it ends, and not which one it is")
            # If others continue, only the end of a connection counts: a late report may be about a replaced process.
            settle = self._forget_nameless if goes_on else partial(self.report, error)
            self._nameless = self._loop.call_later(NAME_WITHIN_S, settle)

    def explain(self, rank: int, incarnation: int, error: EngineDead) -> None:
        """Report a death with a cause from elsewhere, unless it was reported or the replacement is here."""
        engine = self._engines.get(rank)
        if engine is None or (engine.timer is None and engine.connection is None):
            return
        if engine.incarnation is not None:
            is_this = engine.incarnation == incarnation
        elif engine.pid is not None:
            is_this = engine.pid == error.pid
        else:
            is_this = engine.timer is not None
        if is_this:
            self.report(error)

    def _process_exited(self) -> None:
        if self._stopped:
            return
        assert self._watch is not None
        # The first lost engine may be the cause of other exits.
        for each in sorted(self._watch.take(), key=self._is_not_lost):
            rank = engine_of(each)
            engine = self._engines.get(rank)
            if engine is not None and engine.exit_is_due:
                engine.exit_is_due = False
            elif rank not in self._engines.removed:
                self.report(EngineDead(describe_exit(each), engine=rank, pid=each.pid))

    def _is_not_lost(self, found: ProcessExit) -> bool:
        engine = self._engines.get(engine_of(found))
        return engine is None or engine.timer is None

    def lose(self, engine: Engine) -> None:
        """Send no more requests to an engine, and report its death soon."""
        if self._stopped or engine.rank in self._engines.removed:
            return
        self.forget_heartbeats(engine)
        engine.said_dead |= self._nameless is not None
        self._forget_nameless()
        if engine.timer is None:
            within_s = LAST_WORDS_S
            if self._watch is not None or self._link.chosen.membership_address is not None:
                within_s = NAME_WITHIN_S  # an exit code or an explanation may follow
            engine.timer = self._loop.call_later(within_s, self._settle, engine)

    def _settle(self, engine: Engine) -> None:
        engine.exit_is_due = self._watch is not None
        name = f"engine {engine.rank} ({engine.sender})" if engine.sender else f"engine {engine.rank}"
        cause = "has said that it ends" if engine.said_dead else "is gone: its connection has ended"
        self.report(EngineDead(f"{name} {cause}", engine=engine.rank, pid=engine.pid))

    def report(self, error: EngineDead) -> None:
        """Report the death of an engine to the client, without waiting for its exit or connection to end."""
        if self._stopped:
            return
        self._forget_nameless()
        engine = self._engines.get(error.engine)
        if engine is not None:
            self.forget(engine)
        self._link.die(error)

    def forget(self, engine: Engine) -> None:
        """Ignore the end of the present process of an engine."""
        engine.connection = None
        engine.said_dead = False
        if engine.timer is not None:
            engine.timer.cancel()
            engine.timer = None

    def _forget_nameless(self) -> None:
        if self._nameless is not None:
            self._nameless.cancel()
            self._nameless = None

    # Heartbeats

    def supervise(self, hang_s: float | None, on_late: OnLate) -> None:
        """Report late engines, again and again, and not later than after ``hang_s``.

        Where ``on_late`` returns True, the process was stopped, and runs again: time counts from then on.
        """
        self._on_late = on_late
        if hang_s is not None:
            self._warning_s = min(self._warning_s, hang_s)
            for engine in self._engines:  # their first heartbeats came before READY
                engine.judge = Judge(self._warning_s + GRACE_S)

    def beat(self, engine: Engine, frames: Sequence[bytes]) -> None:
        """Take a heartbeat of an engine; raises `ValueError` if it is invalid."""
        heartbeat = decode_heartbeat(frames)
        phase = heartbeat.phase
        if phase == STARTING:  # it has registered, so its loop must run
            phase = IDLE
        expected_s = heartbeat.expected_s + GRACE_S * (heartbeat.expected_s > 0)
        if engine.heartbeat is None:
            engine.judge = Judge(self._warning_s + GRACE_S)
        engine.heartbeat = Sample(phase, heartbeat.steps, 1 + heartbeat.turns, expected_s, 0, heartbeat.requests, False)
        if self._looking is None:
            self._looked_at = self._loop.time()
            self._look_later()

    def forget_heartbeats(self, engine: Engine) -> None:
        """Judge an engine no more whose connection has ended: another process may come."""
        engine.heartbeat = None
        if engine.is_late:
            engine.is_late = False
            self._engines.note_health(engine.rank, "running", "")

    def _look_later(self) -> float:
        interval_s = min(LOOK_S, self._warning_s / 4)
        self._looking = self._loop.call_later(interval_s, self._look)
        return interval_s

    def _look(self) -> None:
        interval_s = self._look_later()
        self._link.sockets.registrations.run()  # sends may have cleared the event of a waiting heartbeat
        now = self._loop.time()
        elapsed_s = min(now - self._looked_at, 2 * interval_s)  # time counts only while this loop runs
        self._looked_at = now
        beating = [(engine, engine.heartbeat) for engine in self._engines if engine.heartbeat is not None]
        # Engines that wait for their peers come last: they are not the cause.
        for engine, heartbeat in sorted(beating, key=lambda each: each[1].phase == WAITING):
            self._judge(engine, heartbeat, elapsed_s)

    def _judge(self, engine: Engine, heartbeat: Sample, elapsed_s: float) -> None:
        judge = engine.judge
        assert judge is not None
        late = judge.look(elapsed_s, heartbeat)
        seconds = judge.without_progress_s
        where = ""
        if late and heartbeat.phase in (BUSY, WAITING):
            where = f"no progress for {seconds:.0f} s in a step"
        elif late:
            where = f"no sign of life of its event loop for {seconds:.0f} s"
        name = f"engine {engine.rank} ({engine.sender})"
        if late and (judge.report_is_due() or not engine.is_late):
            self._engines.note_health(engine.rank, "stalled", where)
            logger.warning("%s is stalled: %s; its own log has the line", name, where)
        elif engine.is_late and not late:
            self._engines.note_health(engine.rank, "running", "")
            logger.info("%s makes progress again", name)
        if self._on_late is not None and (late or engine.is_late) and self._on_late(engine.rank, seconds, where):
            judge.forgive()
        engine.is_late = late


def engine_of(found: ProcessExit) -> int | None:
    """Return the rank of an exited engine process; None for any other process."""
    return engine_index(found.name) if found.managed else None


def describe_exit(found: ProcessExit, phase: str = "") -> str:
    """Describe the exit of a process, and name its engine if there is one."""
    rank = engine_of(found)
    return found.describe(phase, who="" if rank is None else f"engine {rank}")
