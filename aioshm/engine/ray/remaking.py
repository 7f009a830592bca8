"""Makes the actor of an engine again that has died, and has one no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import count

from aioshm.engine.ray.actor import EngineActor
from aioshm.engine.ray.room import Room
from aioshm.errors import RoleError

KILLED_S = 10.0
"""How long it may take until Ray says that actors that were killed are gone."""


class Remaking:
    """Starts and stops single actors; blocks, and may be called in several threads."""

    def __init__(self, actors: list[EngineActor], room: Room) -> None:
        self._actors, self._room = actors, room
        self._changed = threading.Condition()
        self._starting: set[int] = set()
        self._stopping: set[int] = set()
        self._closed = False

    def start(self, rank: int, local: bool, run: Callable[[EngineActor], object]) -> EngineActor:
        """Make the actor of one more engine, or once more that of one that has died, and return it."""
        with self._changed:
            self._check_wanted(rank)
            former = self._find(rank)
            if rank in self._starting or (former is not None and not former.ended):
                raise RoleError(f"engine {rank} still runs, and can be started again when it has exited")
            self._starting.add(rank)
        try:
            actor = self._room.make(rank, local, lambda: self._check_wanted(rank))
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
        """Kill the actor of an engine, or give up to make it; give its room back, and have it no more."""
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
            self._room.give_back(rank)
            with self._changed:
                if actor is not None and not self._closed:
                    self._actors.remove(actor)
                    actor.release()
        finally:
            with self._changed:
                self._stopping.discard(rank)
                self._changed.notify_all()

    def close(self, wait: bool) -> None:
        """Start none any more, and wait until nothing is started or stopped: Ray is not asked for anything then."""
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


def _local_rank(node_id: str, former: EngineActor | None, others: Sequence[EngineActor]) -> int:
    """Return which of its node's engines one is that is made again."""
    if former is not None and former.node_id == node_id:
        return former.local_rank
    used = {actor.local_rank for actor in others if actor.node_id == node_id}
    return next(number for number in count() if number not in used)
