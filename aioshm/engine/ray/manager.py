"""Engines as Ray actors, on the nodes of a cluster."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

from aioshm.arguments import check_int, check_plain, check_seconds
from aioshm.closing import AsyncClosing, Closing, warn_not_closed
from aioshm.engine.ray.actor import EngineActor, actor_in
from aioshm.engine.ray.cluster import (
    await_groups,
    connection,
    create_dp_placement_groups,
    nodes_of,
    remove_groups,
    require_ray,
)
from aioshm.engine.ray.placement import EngineNeeds
from aioshm.engine.ray.remaking import KILLED_S, Remaking
from aioshm.engine.security.keys import EngineKeys, keys_to_hand_over
from aioshm.errors import EngineDead, EngineStartupError
from aioshm.process.background import completed, in_thread
from aioshm.process.watch import ProcessWatch

START_TIMEOUT_S = 300.0
"""How long it may take until every actor runs: a node may first have to fetch what its runtime environment needs."""

_log = logging.getLogger("aioshm.engine")


class CoreEngineActorManager(Closing, AsyncClosing):
    """Engines as Ray actors, on this host and on others; a context manager of either kind.

        async with await CoreEngineActorManager.start(run, 4, 2, args=(handshake_address,)) as manager:
            report = await wait_for_engine_startup(handshake_address, addresses, engines, None, proc_manager=manager)

    Each runs ``target_fn(*args, **kwargs, dp_rank=rank, local_dp_rank=rank on its node, local_client=whether local)``,
    in the main thread of its process. The package must be installed on every node. What an engine starts by means of
    Ray is in its placement group; other processes that it starts have to call `die_with_parent`.

    Making one blocks until every actor's process runs; `start` does not. Without a connection to Ray it makes one,
    which ends when it is closed. Its actors exit when this process does, however that happens.

    `start_engine` makes one again that has died, as an `EngineSupervisor` does with ``backend="ray"``: in its placement
    group, or if the node has left the cluster in a new one: on another node that has room, else on that of the caller.
    Placement groups that were given are moved by Ray itself, as soon as it has room for them.

    Args:
        target_fn: What each actor runs; importable on its node, or else sent there.
        engine_count: How many engines there are.
        local_engine_count: How many of these, the first ones, run on this process' node.
        args: For the target.
        needs: What each engine takes of its node, in placement groups that are made here.
        placement_groups: Where each engine runs: in the last bundle, all of which it takes. They stay the caller's to
            remove. Without, `create_dp_placement_groups` makes them.
        local_dp_ranks: With placement groups, which of its node's engines each is; None counts.
        runtime_env: Of the actors; see Ray's documentation.
        ray_options: For ``ray.init``, unless there is a connection.
        timeout: Seconds until all actors must run, and for each that is made again, until there is room and it runs.
        keys: Each actor gets those of its engine, for `run_engine_core`; None: from those of this process. They travel
            as Ray's arguments do: encrypted if Ray's own connections are.
        kwargs: For the target; every other argument by name.

    Attributes:
        actors: The actors, by rank; their exit codes stay known when this is closed.

    Raises:
        EngineStartupError: The cluster is too small, or an actor could not be started in time; the others are killed.
        ImportError: Ray is not installed.
        TypeError, ValueError: An argument makes no sense.
    """

    create_dp_placement_groups: Final = staticmethod(create_dp_placement_groups)

    def __init__(
        self,
        target_fn: Callable[..., object],
        engine_count: int,
        local_engine_count: int,
        *,
        args: Sequence[Any] = (),
        needs: EngineNeeds | None = None,
        placement_groups: Sequence[Any] | None = None,
        local_dp_ranks: Sequence[int] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        ray_options: Mapping[str, Any] | None = None,
        timeout: float = START_TIMEOUT_S,
        keys: EngineKeys | None = None,
        **kwargs: Any,
    ) -> None:
        self.actors: list[EngineActor] = []
        self._groups: dict[int, Any] = {}
        self._given = placement_groups is not None
        self._closed = True
        self._closing: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._started: dict[int, int] = {}  # how often an engine was started
        check_plain("target_fn", target_fn)
        check_int("engine_count", engine_count, minimum=1)
        check_int("local_engine_count", local_engine_count, minimum=0)
        if local_engine_count > engine_count:
            raise ValueError(
                f"local_engine_count must be at most engine_count, {engine_count}, not {local_engine_count}"
            )
        deadline = time.monotonic() + check_seconds("timeout", timeout)
        for name, given in (("placement_groups", placement_groups), ("local_dp_ranks", local_dp_ranks)):
            if given is not None and len(given) != engine_count:
                raise ValueError(f"{name} must be {engine_count}, one for each engine, not {len(given)}")
        if (local_dp_ranks if placement_groups is None else needs) is not None:
            raise ValueError("local_dp_ranks go with given placement_groups, and needs with those that are made here")
        self._all_local, self._local_count = local_engine_count == engine_count, local_engine_count
        self._target, self._args, self._kwargs, self._keys = target_fn, args, kwargs, keys
        wanted = None if self._given else needs or EngineNeeds()
        self._remaking = Remaking(self.actors, self._groups, wanted, runtime_env, timeout)
        connection.open(ray_options or {})
        self._closed = False
        try:
            if placement_groups is None:
                groups, local_ranks = create_dp_placement_groups(
                    engine_count, local_engine_count, needs, timeout=timeout
                )
            else:
                groups = list(placement_groups)
                await_groups(groups, deadline)
                local_ranks = list(local_dp_ranks or _local_ranks(nodes_of(groups)))
            self._groups.update(enumerate(groups))
            for rank, group in enumerate(groups):
                self.actors.append(EngineActor(rank, rank < local_engine_count, actor_in(group, runtime_env)))
            self._await_actors(deadline)
            for actor, local_rank, node_id in zip(self.actors, local_ranks, nodes_of(groups), strict=True):
                actor.local_rank, actor.node_id = local_rank, node_id
                self._run(actor)
        except BaseException:
            self.close()
            raise
        _log.debug("started %s", ", ".join(map(str, self.actors)))

    @classmethod
    async def start(
        cls, target_fn: Callable[..., object], engine_count: int, local_engine_count: int, **options: Any
    ) -> Self:
        """Make one, without blocking the loop.

        Cancelling this ends the wait at once, and the actors as soon as they can be told.

        Args:
            target_fn: What each actor runs.
            engine_count: How many engines there are.
            local_engine_count: How many of these are local.
            options: Every other argument of the class.
        """
        return await in_thread(
            lambda: cls(target_fn, engine_count, local_engine_count, **options), discard=lambda made: made.close()
        )

    # Made again, and no more

    def start_engine(self, rank: int) -> EngineActor:
        """Make the actor of one more engine, or once more that of one that has died, and return it; blocks.

        Each gets keys of its own, see `EngineKeys`. Waits for room, and logs what is missing.

        Raises:
            EngineStartupError: There is no room in time, or the actor could not be started.
            RoleError: The manager is closed, or that engine still runs.
        """
        return self._remaking.start(rank, self.is_local(rank), self._run)

    async def stop_engine(self, rank: int) -> None:
        """Kill the actor of an engine, give back the room that was reserved for it here, and have it no more.

        Cancelling this ends the wait, and it is done all the same.

        Raises:
            ValueError: There is no such engine.
        """
        await in_thread(lambda: self._remaking.stop(rank))

    def check_engine_count(self, engine_count: int) -> None:
        """See to it that there may be so many engines.

        Raises:
            RoleError: Placement groups were given, and they are fewer.
        """
        self._remaking.check_engine_count(engine_count)

    def next_incarnation(self, rank: int) -> int:
        """Return which of the actors of this rank, one after the other, the next one that is made will be."""
        return self._started.get(rank, 0)

    def is_local(self, rank: int) -> bool:
        """Return whether an engine runs on the node of this process."""
        return self._all_local or rank < self._local_count

    def _run(self, actor: EngineActor) -> None:
        rank = actor.rank
        ranks = {"dp_rank": rank, "local_dp_rank": actor.local_rank, "local_client": actor.local}
        keys = keys_to_hand_over(self._keys, rank, self.next_incarnation(rank))
        actor.run(self._target, self._args, dict(self._kwargs) | ranks, keys)
        self._started[rank] = self.next_incarnation(rank) + 1

    # What there is

    @property
    def created_placement_groups(self) -> list[Any]:
        """The placement groups that were made here, by rank."""
        return [] if self._given else [group for _, group in sorted(self._groups.items())]

    def get_run_refs(self) -> list[Any]:
        """Return Ray's references to the results of the engines' runs, by rank."""
        return [actor.run_ref for actor in self.actors if actor.run_ref is not None]

    @property
    def local_engine_actors(self) -> list[Any]:
        """Ray's handles of the local engines."""
        return [actor.handle for actor in self.actors if actor.local]

    @property
    def remote_engine_actors(self) -> list[Any]:
        """Ray's handles of the other engines."""
        return [actor.handle for actor in self.actors if not actor.local]

    def sentinels(self) -> list[int]:
        """Return a descriptor for each actor, readable when its run is over; none when this is closed."""
        return [] if self._closed else [actor.sentinel for actor in self.actors]

    def finished_procs(self) -> dict[str, int | None]:
        """Return the exit codes of the actors whose run is over, by name.

        It is 1 where the engine raised, and None where its process was killed or crashed: Ray does not tell.
        """
        return {actor.name: actor.exitcode for actor in self.actors if actor.ended}

    def last_lines(self, name: str, count: int | None = None) -> list[str]:
        """Return what Ray says about why an actor failed: the traceback of what the engine raised, or how it died.

        Args:
            name: The name of the actor.
            count: How many lines at most, the last ones; None: all.

        Raises:
            ValueError: There is no such actor.
        """
        for actor in self.actors:
            if actor.name == name:
                return actor.last_words[-(count or 0) :]
        raise ValueError(f"name must be that of one of the actors, not {name!r}")

    async def join_first(self) -> dict[str, int | None]:
        """Wait until all engines have ended, or one has failed; return what `finished_procs` does then.

        Cancelling this changes nothing. Closing the manager ends it too.

        Raises:
            EngineDead: An engine has raised, or its process died.
        """
        with ProcessWatch(manager=self) as watch:
            while not self._closed and not all(actor.ended for actor in self.actors):
                self._raise_if_one_failed()
                await watch.next()
        self._raise_if_one_failed()
        return self.finished_procs()

    def close(self) -> None:
        """Kill the actors, and give back what was made here. Idempotent; blocks."""
        self._close(wait=True)

    def shutdown(self, timeout: float | None = None) -> None:
        """Do what `close` does; under vLLM's name. Actors are killed, which takes no ``timeout``."""
        self.close()

    async def aclose(self) -> None:
        """Do what `close` does, without blocking the loop. Idempotent; finishes also when it is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(in_thread(self.close), name="aioshm-engine-actors-close")
        await completed(self._closing)
        self._closing.result()

    def __del__(self) -> None:
        if not self._closed:
            warn_not_closed(self)
            self._close(wait=False)  # this may be a thread of Ray's, which would wait for itself

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(actor.name for actor in self.actors)}>"

    def _await_actors(self, deadline: float) -> None:
        ray = require_ray()
        here = ray.util.get_node_ip_address()
        for actor in self.actors:
            try:
                actor.await_process(deadline - time.monotonic())
            except TimeoutError as error:
                raise EngineStartupError(str(error)) from None
            if actor.local and actor.address != here:
                raise EngineStartupError(f"{actor} is to be local, but its placement group is not on {here}")

    def _raise_if_one_failed(self) -> None:
        for actor in self.actors:
            if actor.ended and actor.exitcode != 0 and not self._closed:
                ended = f"exited with code {actor.exitcode}" if actor.exitcode is not None else "died"
                raise EngineDead("\n".join([f"{actor} {ended}", *actor.last_words]))

    def _close(self, wait: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._remaking.close(wait)
        try:
            if require_ray().is_initialized():
                self._kill(wait)
        finally:
            for actor in self.actors:
                actor.release()
            connection.close()

    def _kill(self, wait: bool) -> None:
        for actor in self.actors:
            actor.kill()
        deadline = time.monotonic() + KILLED_S
        late = [str(actor) for actor in self.actors if wait and not actor.wait(deadline)]
        if late:
            _log.error("killed, but not gone after %s s: %s", KILLED_S, ", ".join(late))
        remove_groups(self.created_placement_groups, wait)


def _local_ranks(node_ids: Sequence[str]) -> list[int]:
    return [node_ids[:rank].count(node_id) for rank, node_id in enumerate(node_ids)]
