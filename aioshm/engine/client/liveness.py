"""Detects deaths of engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioshm.engine.protocol.addresses import engine_index
from aioshm.errors import EngineDead
from aioshm.process.watch import ProcessExit, ProcessWatch, WatchedManager, WatchedProcess

if TYPE_CHECKING:
    from aioshm.engine.client.link import EngineLink

LAST_WORDS_S = 0.1
"""How long outputs of an engine may arrive after the end of its connection."""

NAME_WITHIN_S = 1.0
"""How long to wait for a report that says more: the engine's rank, the exit code of its process."""


@dataclass(slots=True)
class _Engine:
    """The latest process of an engine."""

    sender: str = ""  # describes its connection
    connection: int | None = None
    timer: asyncio.TimerHandle | None = None  # runs from the first report of a death until the death is settled
    said_dead: bool = False
    told: bool = False  # the death was reported
    exit_is_due: bool = False  # the death was reported before the exit of the process
    dismissed: bool = False

    @property
    def pid(self) -> int | None:
        """The process id of an engine on this host."""
        return int(self.sender.removeprefix("pid ")) if self.sender.startswith("pid ") else None


class Liveness:
    """Combines the reports of connections, engines and process managers.

    An engine is dead when its connection has ended, when it reports its end, or when its process has exited. The first
    report is seldom the best: ``ENGINE_CORE_DEAD`` does not name the engine, and a connection does not know the cause.
    """

    def __init__(self, link: EngineLink) -> None:
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._watch: ProcessWatch | None = None
        self._engines: dict[int | None, _Engine] = {}  # by rank; None: an engine whose rank is unknown
        self._told_until = 0.0  # until then a nameless report belongs to the last reported death
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
        for engine in self._engines.values():
            if engine.timer is not None:
                engine.timer.cancel()
        if self._watch is not None:
            self._watch.close()

    # Reports

    def connected(self, rank: int, connection: int, sender: str) -> None:
        """Note the connection of an engine, and a description of its sender."""
        former = self._of(rank)
        if former.connection not in (None, connection):
            self._lose(rank)  # another process, with newer keys, whose predecessor's connection has not ended yet
        if former.timer is not None:  # it is back before the death was reported
            self._settle(rank)
        self._engines[rank] = _Engine(sender, connection)

    def disconnected(self, connection: int) -> None:
        """Note the end of a connection, which may be no engine's."""
        for rank, engine in self._engines.items():
            if engine.connection == connection:
                engine.connection = None
                self._lose(rank)
                return

    def engine_at(self, connection: int) -> tuple[int, str] | None:
        """Return the rank of the engine at a connection, and its process, such as ``pid 12``; None: no engine."""
        for rank, engine in self._engines.items():
            if engine.connection == connection and rank is not None:
                return rank, engine.sender
        return None

    def lost(self, rank: int) -> None:
        """Note that an engine is unreachable."""
        if self._of(rank).connection is not None:
            self._lose(rank)

    def said_dead(self, rank: int | None = None) -> None:
        """Note an engine's report of its end; ``rank``: the engine, if known."""
        if rank is not None:
            if not self._of(rank).told:
                self._lose(rank, said_dead=True)
            return
        lost = [engine for engine in self._engines.values() if engine.timer is not None]
        for engine in lost:
            engine.said_dead = True
        dismissed = any(engine.dismissed for engine in self._engines.values())
        if not lost and not dismissed and self._loop.time() >= self._told_until:
            self._lose(None, said_dead=True)

    def explain(self, error: EngineDead, *, is_this: bool | None = None) -> None:
        """Report a death with a cause from elsewhere, unless it was reported or the replacement is here."""
        engine = self._of(error.engine)
        if is_this is None:
            is_this = engine.timer is not None if engine.pid is None else engine.pid == error.pid
        if is_this and (engine.timer is not None or engine.connection is not None):
            self._report(error)

    def dismiss(self, rank: int) -> None:
        """Ignore the end of an engine, until an engine of its rank connects again."""
        self._of(rank).dismissed = True
        self._forget(rank)

    def _process_exited(self) -> None:
        if self._stopped:
            return
        assert self._watch is not None
        # The first lost engine may be the cause of other exits.
        for each in sorted(self._watch.take(), key=lambda each: self._of(engine_of(each)).timer is None):
            rank = engine_of(each)
            engine = self._of(rank)
            if engine.exit_is_due:
                engine.exit_is_due = False
            elif not engine.dismissed:
                self._report(EngineDead(describe_exit(each), engine=rank, pid=each.pid))

    # Deaths

    def _of(self, rank: int | None) -> _Engine:
        return self._engines.setdefault(rank, _Engine())

    def _lose(self, rank: int | None, *, said_dead: bool = False) -> None:
        engine = self._of(rank)
        if self._stopped or engine.dismissed:
            return
        if rank is not None:
            self._link.lose(rank)
            said_dead = said_dead or self._of(None).timer is not None  # the nameless report was about this engine
            self._forget(None)
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
        engine.timer = self._loop.call_at(when, self._settle, rank)

    def _settle(self, rank: int | None) -> None:
        if rank is None:
            self._report(EngineDead("an engine has said that it ends, and not which one it is"))
            return
        engine = self._of(rank)
        engine.exit_is_due = self._watch is not None
        name = f"engine {rank} ({engine.sender})" if engine.sender else f"engine {rank}"
        cause = "has said that it ends" if engine.said_dead else "is gone: its connection has ended"
        self._report(EngineDead(f"{name} {cause}", engine=rank, pid=engine.pid))

    def _report(self, error: EngineDead) -> None:
        if not self._stopped:
            self._forget(error.engine)
            self._of(error.engine).told = error.engine is not None
            self._told_until = self._loop.time() + NAME_WITHIN_S
            self._link.die(error)

    def _forget(self, rank: int | None) -> None:
        engine = self._of(rank)
        engine.connection = None
        engine.said_dead = False
        if engine.timer is not None:
            engine.timer.cancel()
            engine.timer = None


def engine_of(found: ProcessExit) -> int | None:
    """Return the rank of an exited engine process; None for any other process."""
    return engine_index(found.name) if found.managed else None


def describe_exit(found: ProcessExit, phase: str = "") -> str:
    """Describe the exit of a process, and name its engine if there is one."""
    rank = engine_of(found)
    return found.describe(phase, who="" if rank is None else f"engine {rank}")
