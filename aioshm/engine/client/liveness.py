"""Notices the death of an engine, and which one it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from aioshm.engine.protocol.progress import engine_of
from aioshm.errors import EngineDead
from aioshm.process.watch import ProcessWatch, WatchedManager, WatchedProcess

LAST_WORDS_S = 0.1
"""How long what an engine has sent may arrive after the end of its connection."""

NAME_WITHIN_S = 1.0
"""How long to wait for a sign that says more: which engine it was, how its process has exited."""


class Liveness:
    """Puts together what connections, engines and process managers say.

    An engine is gone when its connection has ended, when it says so, or when its process has exited. What says so first
    is seldom what says most: ``ENGINE_CORE_DEAD`` does not say which engine, a connection not why.

    Args:
        on_death: Called once, on the loop.

    Attributes:
        hosts: Where engines have connected from, by their IP addresses, if over TCP.
    """

    def __init__(self, on_death: Callable[[EngineDead], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_death = on_death
        self._watch: ProcessWatch | None = None
        self._connections: dict[int, int] = {}  # engines' ranks
        self._senders: dict[int, str] = {}
        self.hosts: set[str] = set()
        self._lost: int | None = None
        self._said_dead = False
        self._timer: asyncio.TimerHandle | None = None
        self._settled = False

    def watch(self, manager: WatchedManager | None, processes: Iterable[WatchedProcess]) -> None:
        """Watch processes, too.

        Raises:
            ValueError: A process was not started.
        """
        if self._watch is None:
            self._watch = ProcessWatch(on_exit=self._process_exited)
        if manager is not None:
            self._watch.add_manager(manager)
        self._watch.add(processes)

    def connected(self, engine: int, connection: int, sender: str) -> None:
        """Note which connection is an engine's, and who that is, for people."""
        self._connections[connection] = engine
        self._senders[engine] = sender
        self.hosts.add(sender)

    def disconnected(self, connection: int) -> None:
        """Note that a connection has ended; nothing happens if it is no engine's."""
        engine = self._connections.pop(connection, None)
        if engine is not None:
            self.lost(engine)

    def lost(self, engine: int) -> None:
        """Note that an engine cannot be reached any more."""
        if self._lost is None:
            self._lost = engine
            self._settle_within(NAME_WITHIN_S if self._watch is not None else LAST_WORDS_S)

    def said_dead(self, engine: int | None = None) -> None:
        """Note that an engine says that it ends, and which one, if that is known."""
        self._said_dead = True
        if self._lost is None:
            self._lost = engine
        self._settle_within(NAME_WITHIN_S)

    def stop(self) -> None:
        """Notice nothing any more. Idempotent; safe on a closed loop."""
        self._settled = True
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.close()

    def _settle_within(self, seconds: float) -> None:
        when = self._loop.time() + seconds
        if self._settled or (self._timer is not None and self._timer.when() <= when):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._settle)

    def _process_exited(self) -> None:
        if self._settled:
            return
        assert self._watch is not None
        exits = self._watch.exited()
        # Others may exit because of the one that was lost first.
        first = next((each for each in exits if self._lost is not None and engine_of(each) == self._lost), exits[0])
        self._tell(EngineDead(first.describe(), engine=engine_of(first), pid=first.pid))

    def _settle(self) -> None:
        engine = self._lost
        if engine is None:
            self._tell(EngineDead("an engine has said that it ends, and not which one it is"))
            return
        how = "has said that it ends" if self._said_dead else "is gone: its connection has ended"
        sender = self._senders.get(engine, "")
        pid = int(sender.removeprefix("pid ")) if sender.startswith("pid ") else None
        self._tell(EngineDead(f"engine {engine}{f' ({sender})' if sender else ''} {how}", engine=engine, pid=pid))

    def _tell(self, error: EngineDead) -> None:
        self.stop()
        self._on_death(error)
