"""Room in the cluster for engines whose actors are made again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from aioshm.engine.ray.actor import EngineActor, actor_in
from aioshm.engine.ray.cluster import group_where_there_is_room, nodes_of, remove_groups, trouble_of
from aioshm.engine.ray.placement import EngineNeeds
from aioshm.errors import EngineStartupError, RoleError

PROGRESS_S = 10.0
"""How often it is logged that an engine waits for room."""

_LOOK_S = 0.1
_LOOK_AT_NODE_S = 1.0  # while an actor does not run yet

_log = logging.getLogger("aioshm.engine")


class Room:
    """Finds room for engines, and has actors there; blocks, and may be called in several threads."""

    def __init__(
        self, groups: dict[int, Any], needs: EngineNeeds | None, runtime_env: Mapping[str, Any] | None, timeout: float
    ) -> None:
        self.groups: dict[int, Any] = groups
        self.timeout: float = timeout
        self._needs, self._runtime_env = needs, runtime_env
        self._placing = threading.Lock()  # two engines must not count on the same room

    def make(self, rank: int, local: bool, check_wanted: Callable[[], object]) -> EngineActor:
        """Make an actor whose process runs, and return it."""
        deadline = time.monotonic() + self.timeout
        while True:
            group = self._room(rank, local, deadline, check_wanted)
            actor = EngineActor(rank, local, actor_in(group, self._runtime_env))
            try:
                if self._runs(actor, group, deadline, check_wanted):
                    actor.node_id = nodes_of([group])[0]
                    return actor
            except BaseException:
                actor.discard()
                raise
            actor.discard()
            _log.warning("engine %d: its node has left before it was there; it looks for room again", rank)

    def _runs(self, actor: EngineActor, group: Any, deadline: float, check_wanted: Callable[[], object]) -> bool:
        """Wait until the process of an actor runs; return whether it does, or the room for it is lost."""
        looked = time.monotonic()
        while True:
            check_wanted()
            try:
                actor.await_process(min(_LOOK_S, deadline - time.monotonic()))
            except TimeoutError as error:
                now = time.monotonic()
                if now > deadline:
                    raise EngineStartupError(str(error)) from None
                if self._needs is not None and now - looked > _LOOK_AT_NODE_S:
                    looked = now
                    if self._is_lost(group):
                        return False
            else:
                return True

    def _room(self, rank: int, local: bool, deadline: float, check_wanted: Callable[[], object]) -> Any:
        logged = 0.0
        while True:
            check_wanted()
            with self._placing:
                missing = self._look_for_room(rank, local)
            if not missing:
                return self.groups[rank]
            now = time.monotonic()
            if now > deadline:
                raise EngineStartupError(f"there was no room for engine {rank} within {self.timeout:g} s: {missing}")
            if now - logged >= PROGRESS_S:
                logged = now
                _log.warning("engine %d waits for room, for %.0f s at most: %s", rank, deadline - now, missing)
            time.sleep(_LOOK_S)

    def _look_for_room(self, rank: int, local: bool) -> str:
        """See to it that the group of an engine is reserved; return why it is not, or an empty string."""
        group = self.groups.get(rank)
        if self._needs is None:
            if group is None:
                raise EngineStartupError(f"engine {rank} has no placement group: they were given, for others")
            return trouble_of(group)
        if group is not None:
            if not self._is_lost(group):
                return ""
            remove_groups([self.groups.pop(rank)], wait=False)  # it is bound to a node that is gone
        try:
            self.groups[rank] = group_where_there_is_room(rank, local, self._needs)
        except EngineStartupError as error:
            return str(error)
        return ""

    def give_back(self, rank: int) -> None:
        """Give back what was reserved for an engine, unless the groups were given; blocks until it is free."""
        if self._needs is not None and rank in self.groups:
            remove_groups([self.groups.pop(rank)])

    def check_engine_count(self, engine_count: int) -> None:
        """See to it that there may be so many engines."""
        if self._needs is None and engine_count > len(self.groups):
            raise RoleError(
                f"{len(self.groups)} placement groups were given, so there can be no {engine_count} engines: let this"
                " manager make them (needs=), or give more of them"
            )

    @staticmethod
    def _is_lost(group: Any) -> bool:
        try:
            return bool(trouble_of(group))
        except EngineStartupError:  # it was removed
            return True
