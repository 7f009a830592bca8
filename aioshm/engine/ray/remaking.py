"""Recreates the actors of dead engines, where there is room, and removes actors."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from aioshm.engine.ray.actor import EngineActor, actor_in
from aioshm.engine.ray.cluster import group_where_there_is_room, nodes_of, remove_groups, trouble_of
from aioshm.engine.ray.placement import EngineNeeds
from aioshm.errors import EngineStartupError, RoleError

KILLED_S = 10.0
"""How long it may take until Ray says that actors that were killed are gone."""

PROGRESS_S = 10.0
"""Seconds between log lines about an engine that waits for room."""

_LOOK_S = 0.1
_LOOK_AT_NODE_S = 0.5  # while an actor does not run yet

_log = logging.getLogger("aioshm.engine")


class Remaking:
    """Starts and stops single actors; blocks, and is safe for several threads."""

    def __init__(
        self,
        actors: list[EngineActor],
        groups: dict[int, Any],
        needs: EngineNeeds | None,
        runtime_env: Mapping[str, Any] | None,
        timeout: float,
    ) -> None:
        self._actors = actors
        self._groups = groups  # a lost group is replaced
        self._needs = needs  # None: the groups were given, and Ray finds room for them again
        self._runtime_env = runtime_env
        self._timeout = timeout  # seconds until an actor must run
        self._placing = threading.Lock()  # two engines must not count on the same room
        self._changed = threading.Condition()
        self._starting: set[int] = set()
        self._stopping: set[int] = set()
        self._closed = False

    def start(self, rank: int, local: bool, run: Callable[[EngineActor], object]) -> EngineActor:
        """Create the actor of an engine, or recreate a dead one, and return it."""
        with self._changed:
            self._check_wanted(rank)
            former = self._find(rank)
            if rank in self._starting or (former is not None and not former.ended):
                raise RoleError(f"engine {rank} still runs, and can be started again when it has exited")
            self._starting.add(rank)
        try:
            actor = self._make(rank, local)
            with self._changed:
                try:
                    self._check_wanted(rank)
                    others = [each for each in self._actors if each is not former]
                    actor.local_rank = _local_rank(actor.node_id, former, others)
                    run(actor)
                except BaseException:
                    actor.discard()
                    raise
                self._actors[:] = sorted([*others, actor], key=lambda each: each.rank)
            if former is not None:
                former.release()
            return actor
        finally:
            with self._changed:
                self._starting.discard(rank)
                self._changed.notify_all()

    def stop(self, rank: int) -> None:
        """Kill the actor of an engine, or stop creating it; free its room, and remove it."""
        with self._changed:
            if self._find(rank) is None and rank not in self._starting:
                raise ValueError(f"rank must be that of one of the engines, not {rank}")
            self._stopping.add(rank)
            self._changed.wait_for(lambda: rank not in self._starting, KILLED_S)
        try:
            actor = self._find(rank)
            if actor is not None and not actor.ended:
                actor.kill()
                actor.wait(time.monotonic() + KILLED_S)
            if self._needs is not None and rank in self._groups:  # give the room back, unless it was given
                remove_groups([self._groups.pop(rank)])
            with self._changed:
                if actor is not None and not self._closed:
                    self._actors.remove(actor)
                    actor.release()
        finally:
            with self._changed:
                self._stopping.discard(rank)
                self._changed.notify_all()

    def close(self, wait: bool) -> None:
        """Start no more actors, and wait for running starts and stops: they must not use Ray any more."""
        with self._changed:
            self._closed = True
            if wait:
                self._changed.wait_for(lambda: not self._starting and not self._stopping, KILLED_S)

    def _find(self, rank: int) -> EngineActor | None:
        return next((actor for actor in self._actors if actor.rank == rank), None)

    def _check_wanted(self, rank: int) -> None:
        if self._closed:
            raise RoleError("this manager of actors is closed, and starts none any more")
        if rank in self._stopping:
            raise RoleError(f"engine {rank} is stopped, and is not started again")

    # Room

    def _make(self, rank: int, local: bool) -> EngineActor:
        """Create an actor where there is room, and wait until its process runs."""
        deadline = time.monotonic() + self._timeout
        while True:
            group = self._room(rank, local, deadline)
            actor = EngineActor(rank, local, actor_in(group, self._runtime_env))
            try:
                while self._needs is None or not self._is_lost(group):
                    self._check_wanted(rank)
                    if actor.await_process(min(_LOOK_AT_NODE_S, deadline - time.monotonic())):
                        actor.node_id = nodes_of([group])[0]
                        return actor
                    if time.monotonic() > deadline:
                        raise EngineStartupError(f"the actor of {actor.name} was not started in time")
            except BaseException:
                actor.discard()
                raise
            actor.discard()
            _log.warning("engine %d: its node has left before it was there; it looks for room again", rank)

    def _room(self, rank: int, local: bool, deadline: float) -> Any:
        """Wait until the group of an engine is reserved, and return it."""
        logged = 0.0
        while True:
            self._check_wanted(rank)
            with self._placing:
                missing = self._look_for_room(rank, local)
            if not missing:
                return self._groups[rank]
            now = time.monotonic()
            if now > deadline:
                raise EngineStartupError(f"there was no room for engine {rank} within {self._timeout:g} s: {missing}")
            if now - logged >= PROGRESS_S:
                logged = now
                _log.warning("engine %d waits for room, for %.0f s at most: %s", rank, deadline - now, missing)
            time.sleep(_LOOK_S)

    def _look_for_room(self, rank: int, local: bool) -> str:
        """Reserve the group of an engine; return the reason if that failed, else ""."""
        group = self._groups.get(rank)
        if self._needs is None:
            if group is None:
                raise EngineStartupError(f"engine {rank} has no placement group: they were given, for others")
            return trouble_of(group)
        if group is not None:
            if not self._is_lost(group):
                return ""
            remove_groups([self._groups.pop(rank)], wait=False)  # bound to a node that is gone
        try:
            self._groups[rank] = group_where_there_is_room(rank, local, self._needs)
        except EngineStartupError as error:
            return str(error)
        return ""

    @staticmethod
    def _is_lost(group: Any) -> bool:
        try:
            return bool(trouble_of(group))
        except EngineStartupError:  # it was removed
            return True


def _local_rank(node_id: str, former: EngineActor | None, others: Sequence[EngineActor]) -> int:
    """Return the rank of a recreated engine on its node."""
    if former is not None and former.node_id == node_id:
        return former.local_rank
    used = {actor.local_rank for actor in others if actor.node_id == node_id}
    return next(number for number in count() if number not in used)
