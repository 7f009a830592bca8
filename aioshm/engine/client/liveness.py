"""Detects deaths of engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from aioshm.engine.client.engines import Engine
from aioshm.engine.protocol.addresses import engine_index
from aioshm.errors import EngineDead
from aioshm.process.watch import ProcessExit, ProcessWatch, WatchedManager, WatchedProcess

if TYPE_CHECKING:
    from aioshm.engine.client.link import EngineLink

LAST_WORDS_S = 0.1
"""How long outputs of an engine may arrive after the end of its connection."""

NAME_WITHIN_S = 1.0
"""How long to wait for a report that says more: the engine's rank, the exit code of its process."""


class Liveness:
    """Combines the reports of connections, engines and process managers.

    An engine is dead when its connection has ended, when it reports its end, or when its process has exited. The first
    report is seldom the best: ``ENGINE_CORE_DEAD`` does not name the engine, and a connection does not know the cause.
    """

    def __init__(self, link: EngineLink) -> None:
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._engines = link.engines
        self._watch: ProcessWatch | None = None
        self._nameless: asyncio.TimerHandle | None = None  # runs while an engine has said that it ends, and not which
        self._reported_until = 0.0  # until then a nameless report belongs to the last reported death
        self._stopped = False

    def watch(self, manager: WatchedManager | None, processes: Iterable[WatchedProcess]) -> None:
        """Watch processes, too. Idempotent for watched ones."""
        if self._watch is None:
            self._watch = ProcessWatch(on_exit=self._process_exited)
        if manager is not None:
            self._watch.add_manager(manager)
        self._watch.add(processes)

    def stop(self) -> None:
        """Stop. Idempotent; safe on a closed loop."""
        self._stopped = True
        self._forget_nameless()
        for engine in self._engines:
            if engine.timer is not None:
                engine.timer.cancel()
        if self._watch is not None:
            self._watch.close()

    # Reports

    def replaced(self, engine: Engine, connection: int) -> None:
        """Settle the death of the process whose successor registers over this connection, if it is not reported yet."""
        self._engines.removed.discard(engine.rank)
        if engine.connection not in (None, connection):
            self._lose(engine)  # the successor has newer keys, and the connection has not ended yet
        if engine.timer is not None:
            self._settle(engine)

    def disconnected(self, connection: int) -> None:
        """Note the end of a connection, which may be no engine's."""
        engine = self._engines.at(connection)
        if engine is not None:
            engine.connection = None
            self._lose(engine)

    def lost(self, engine: Engine) -> None:
        """Note that an engine is unreachable."""
        if engine.connection is not None:
            self._lose(engine)

    def said_dead(self, rank: int | None = None) -> None:
        """Note an engine's report of its end; ``rank``: the engine, if known."""
        if rank is not None:
            engine = self._engines.get(rank)
            if engine is not None and engine.death is None:
                self._lose(engine, said_dead=True)
            return
        lost = [engine for engine in self._engines if engine.timer is not None]
        for engine in lost:
            engine.said_dead = True
        if lost or self._engines.removed or self._nameless is not None or self._stopped:
            return
        if self._loop.time() >= self._reported_until:
            error = EngineDead("an engine has said that it ends, and not which one it is")
            self._nameless = self._loop.call_later(NAME_WITHIN_S, self._report, error)

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
            self._report(error)

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
                self._report(EngineDead(describe_exit(each), engine=rank, pid=each.pid))

    def _is_not_lost(self, found: ProcessExit) -> bool:
        engine = self._engines.get(engine_of(found))
        return engine is None or engine.timer is None

    # Deaths

    def _lose(self, engine: Engine, *, said_dead: bool = False) -> None:
        """Send no more requests to an engine, and report its death soon."""
        if self._stopped or engine.rank in self._engines.removed:
            return
        self._link.heartbeats.forget(engine)
        said_dead = said_dead or self._nameless is not None  # the nameless report was about this engine
        self._forget_nameless()
        within_s = LAST_WORDS_S
        # An exit code or an explanation may follow; after the engine's own report its connection ends next.
        explained = self._watch is not None or self._link.chosen.membership_address is not None
        if explained or (said_dead and engine.timer is None):
            within_s = NAME_WITHIN_S
        when = self._loop.time() + within_s
        if engine.timer is not None:
            when = min(when, engine.timer.when())
            engine.timer.cancel()
        engine.said_dead = engine.said_dead or said_dead
        engine.timer = self._loop.call_at(when, self._settle, engine)

    def _settle(self, engine: Engine) -> None:
        engine.exit_is_due = self._watch is not None
        name = f"engine {engine.rank} ({engine.sender})" if engine.sender else f"engine {engine.rank}"
        cause = "has said that it ends" if engine.said_dead else "is gone: its connection has ended"
        self._report(EngineDead(f"{name} {cause}", engine=engine.rank, pid=engine.pid))

    def _report(self, error: EngineDead) -> None:
        if self._stopped:
            return
        self._forget_nameless()
        engine = self._engines.get(error.engine)
        if engine is not None:
            self.forget(engine)
        self._reported_until = self._loop.time() + NAME_WITHIN_S
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


def engine_of(found: ProcessExit) -> int | None:
    """Return the rank of an exited engine process; None for any other process."""
    return engine_index(found.name) if found.managed else None


def describe_exit(found: ProcessExit, phase: str = "") -> str:
    """Describe the exit of a process, and name its engine if there is one."""
    rank = engine_of(found)
    return found.describe(phase, who="" if rank is None else f"engine {rank}")
