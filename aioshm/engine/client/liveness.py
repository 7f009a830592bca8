"""Detects deaths of engines, and which engines they were."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from aioshm.engine.protocol.progress import engine_index
from aioshm.errors import EngineDead
from aioshm.process.watch import ProcessExit, ProcessWatch, WatchedManager, WatchedProcess

if TYPE_CHECKING:
    from aioshm.engine.client.link import EngineLink

LAST_WORDS_S = 0.1
"""How long what an engine has sent may arrive after the end of its connection."""

NAME_WITHIN_S = 1.0
"""How long to wait for a sign that says more: which engine it was, how its process has exited."""


class _Loss(NamedTuple):
    """A lost engine; more may become known until the timer fires."""

    said_dead: bool
    timer: asyncio.TimerHandle


class Liveness:
    """Combines the reports of connections, engines and process managers.

    An engine is dead when its connection has ended, when it reports its end, or when its process has exited. The first
    report is seldom the best: ``ENGINE_CORE_DEAD`` does not name the engine, and a connection does not know the cause.
    """

    def __init__(self, link: EngineLink) -> None:
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._watch: ProcessWatch | None = None
        self._dismissed: set[int] = set()
        self._connections: dict[int, int] = {}  # engines' ranks
        self._senders: dict[int, str] = {}
        self._losses: dict[int | None, _Loss] = {}  # by rank; None: an engine whose rank is unknown
        self._told: set[int] = set()  # reported deaths, until the engine is back
        self._told_first: set[int] = set()  # reported before the exit of the process was known
        self._told_until = 0.0  # until then a nameless report belongs to the last reported death
        self._stopped = False

    def watch(self, manager: WatchedManager | None, processes: Iterable[WatchedProcess]) -> None:
        """Watch processes, too. Idempotent for watched ones."""
        if self._watch is None:
            self._watch = ProcessWatch(on_exit=self._process_exited)
        if manager is not None:
            self._watch.add_manager(manager)
        self._watch.add(processes)

    def connected(self, engine: int, connection: int, sender: str) -> None:
        """Note the connection of an engine, and a description of its sender."""
        if any(each != connection and rank == engine for each, rank in self._connections.items()):
            self._lose(engine)  # another process has its place, with newer keys, and its connection has not ended yet
        if engine in self._losses:  # it is back before its death was told
            self._settle(engine)
        self._dismissed.discard(engine)
        self._told.discard(engine)
        self._told_first.discard(engine)
        self._connections[connection] = engine
        self._senders[engine] = sender

    def explain(self, error: EngineDead, *, is_this: bool | None = None) -> None:
        """Report a death with a cause from elsewhere, unless it was reported or the replacement is here."""
        engine = error.engine
        assert engine is not None
        if is_this is None:
            sender = self._senders.get(engine, "")
            is_this = sender == f"pid {error.pid}" if sender.startswith("pid ") else engine in self._losses
        if is_this and (engine in self._losses or engine in self._connections.values()):
            self._tell(error)

    def dismiss(self, engine: int) -> None:
        """Ignore the end of an engine, until an engine of its rank connects again."""
        self._dismissed.add(engine)
        self._forget(engine)

    def disconnected(self, connection: int) -> None:
        """Note the end of a connection; other connections than engines' are ignored."""
        engine = self._connections.pop(connection, None)
        if engine is not None:
            self._lose(engine)

    def lost(self, engine: int) -> None:
        """Note that an engine is unreachable; ignored if its death was reported."""
        if engine in self._connections.values():
            self._lose(engine)

    def said_dead(self, engine: int | None = None) -> None:
        """Note that an engine reports its end, and which engine, if known."""
        if engine is not None:
            if engine not in self._told:
                self._lose(engine, said_dead=True)
        elif self._losses:
            self._losses.update({each: _Loss(True, loss.timer) for each, loss in self._losses.items()})
        elif self._loop.time() >= self._told_until and not self._dismissed:
            self._lose(None, said_dead=True)

    def stop(self) -> None:
        """Stop. Idempotent; safe on a closed loop."""
        self._stopped = True
        for loss in self._losses.values():
            loss.timer.cancel()
        if self._watch is not None:
            self._watch.close()

    def _lose(self, engine: int | None, *, said_dead: bool = False) -> None:
        if self._stopped or engine in self._dismissed:
            return
        if engine is not None:
            self._link.lose(engine)
            nameless = self._losses.pop(None, None)
            if nameless is not None:  # the nameless report was about this engine
                nameless.timer.cancel()
                said_dead = True
        former = self._losses.get(engine)
        # After the engine's own report its connection ends next, or its process exits.
        when = self._loop.time() + (
            NAME_WITHIN_S
            if self._watch is not None or self._link.explained or (said_dead and former is None)
            else LAST_WORDS_S
        )
        if former is not None:
            said_dead = said_dead or former.said_dead
            when = min(when, former.timer.when())
            former.timer.cancel()
        self._losses[engine] = _Loss(said_dead, self._loop.call_at(when, self._settle, engine))

    def _process_exited(self) -> None:
        if self._stopped:
            return
        assert self._watch is not None
        # The first lost engine may be the cause of other exits.
        for each in sorted(self._watch.take(), key=lambda each: engine_of(each) not in self._losses):
            engine = engine_of(each)
            if engine in self._told_first:  # of other hosts it may be known late
                self._told_first.discard(engine)
            elif engine is None or engine not in self._dismissed:
                self._tell(EngineDead(describe_exit(each), engine=engine, pid=each.pid))

    def _settle(self, engine: int | None) -> None:
        if engine is None:
            self._tell(EngineDead("an engine has said that it ends, and not which one it is"))
            return
        how = "has said that it ends" if self._losses[engine].said_dead else "is gone: its connection has ended"
        sender = self._senders.get(engine, "")
        pid = int(sender.removeprefix("pid ")) if sender.startswith("pid ") else None
        if self._watch is not None:
            self._told_first.add(engine)
        self._tell(EngineDead(f"engine {engine}{f' ({sender})' if sender else ''} {how}", engine=engine, pid=pid))

    def _tell(self, error: EngineDead) -> None:
        if not self._stopped:
            self._forget(error.engine)
            if error.engine is not None:
                self._told.add(error.engine)
            self._told_until = self._loop.time() + NAME_WITHIN_S
            self._link.die(error)

    def _forget(self, engine: int | None) -> None:
        loss = self._losses.pop(engine, None)
        if loss is not None:
            loss.timer.cancel()
        if engine is not None:
            for connection in [each for each, rank in self._connections.items() if rank == engine]:
                del self._connections[connection]


def engine_of(found: ProcessExit) -> int | None:
    """Return the rank of an exited engine process; None for any other process."""
    return engine_index(found.name) if found.managed else None


def describe_exit(found: ProcessExit, phase: str = "") -> str:
    """Describe the exit of a process, and name its engine if there is one."""
    rank = engine_of(found)
    return found.describe(phase, who="" if rank is None else f"engine {rank}")
