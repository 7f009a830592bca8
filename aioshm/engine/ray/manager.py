"""Engines as Ray actors, on the nodes of a cluster."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

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
from aioshm.errors import EngineDead, EngineStartupError, RoleError
from aioshm.process.background import completed, in_thread
from aioshm.process.watch import ProcessWatch

START_TIMEOUT_S = 300.0
"""How long actors may take to start: a node may first have to fetch packages for their runtime environment."""

_log = logging.getLogger("aioshm.engine")


class _Target(NamedTuple):
    """The function that each actor runs, with its arguments, and the keys of the deployment."""

    function: Callable[..., object]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    keys: EngineKeys | None


class CoreEngineActorManager(Closing, AsyncClosing):
    """Engines as Ray actors, on this host and on others; a context manager of either kind.

        async with await CoreEngineActorManager.start(run, 4, 2, args=(handshake_address,)) as manager:
            report = await wait_for_engine_startup(handshake_address, addresses, engines, None, proc_manager=manager)

    Each runs ``target_fn(*args, **kwargs, dp_rank=rank, local_dp_rank=rank on its node, local_client=whether local)``,
    in the main thread of its process. Every node needs the package. Processes that an engine starts by means of Ray are
    in its placement group; other child processes have to call `die_with_parent`.

    The constructor blocks until every actor's process runs; `start` does not. Without a connection to Ray the manager
    creates one, and closes it at the end. The actors exit with this process, in whatever way it ends.

    `start_engine` recreates a dead actor, as an `EngineSupervisor` with Ray's backend does: in its placement group, or
    if the node has left the cluster, in a new one on another node with room, else on the node of the caller. Ray itself
    moves given placement groups, as soon as it has room for them.

    Args:
        target_fn: The target of each actor; importable on its node, or sent there.
        engine_count: The number of engines.
        local_engine_count: How many of them, the first ones, run on this process's node.
        args: Positional arguments of the target.
        needs: The resources of each engine, in placement groups that the manager creates.
        placement_groups: The room of each engine: all of the last bundle. The caller removes them. None:
            `create_dp_placement_groups` creates them.
        local_dp_ranks: With placement groups, the rank of each engine on its node; None: counted.
        runtime_env: Of the actors; see Ray's documentation.
        ray_options: For ``ray.init``, unless there is a connection.
        timeout: Seconds until all actors must run, and for each recreated one, until there is room and it runs.
        keys: Each actor gets the keys of its engine, for `run_engine_core`; None: from the keys of this process. They
            travel as Ray's arguments: encrypted if Ray's own connections are.
        kwargs: Every other keyword argument of the target.

    Attributes:
        actors: The actors, by rank; their exit codes stay known after closing.

    Raises:
        EngineStartupError: The cluster is too small, or an actor could not be started in time; the others are killed.
        ImportError: Ray is not installed.
        TypeError, ValueError: An argument is invalid.
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
        self._started: dict[int, int] = {}  # starts so far, by rank
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
        self._all_local = local_engine_count == engine_count
        self._local_count = local_engine_count
        self._target = _Target(target_fn, args, kwargs, keys)
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
                actor.local_rank = local_rank
                actor.node_id = node_id
                self._run(actor)
        except BaseException:
            self.close()
            raise
        _log.debug("started %s", ", ".join(map(str, self.actors)))

    @classmethod
    async def start(
        cls, target_fn: Callable[..., object], engine_count: int, local_engine_count: int, **options: Any
    ) -> Self:
        """Create a manager, without blocking the loop.

        Cancelling this ends the wait immediately, and the actors as soon as possible.

        Args:
            target_fn: The target of each actor.
            engine_count: The number of engines.
            local_engine_count: How many of them are local.
            options: The other arguments of the class.
        """
        return await in_thread(
            lambda: cls(target_fn, engine_count, local_engine_count, **options), discard=lambda made: made.close()
        )

    # Single actors

    def start_engine(self, rank: int) -> EngineActor:
        """Create the actor of one more engine, or recreate a dead one, and return it; blocks.

        Each gets keys of its own, see `EngineKeys`. Waits for room, and logs the missing resources.

        Raises:
            EngineStartupError: There is no room in time, or the actor could not be started.
            RoleError: The manager is closed, or that engine still runs.
        """
        return self._remaking.start(rank, self.is_local(rank), self._run)

    async def stop_engine(self, rank: int) -> None:
        """Kill the actor of an engine, free the room that was reserved for it here, and remove it.

        Cancelling this ends the wait only.

        Raises:
            ValueError: There is no such engine.
        """
        await in_thread(lambda: self._remaking.stop(rank))

    def check_engine_count(self, engine_count: int) -> None:
        """Raise if there cannot be so many engines.

        Raises:
            RoleError: Placement groups were given, and they are fewer.
        """
        if self._given and engine_count > len(self._groups):
            raise RoleError(
                f"{len(self._groups)} placement groups were given, so there can be no {engine_count} engines: let this"
                " manager make them (needs=), or give more of them"
            )

    def next_incarnation(self, rank: int) -> int:
        """Return the incarnation of the next actor of this rank."""
        return self._started.get(rank, 0)

    def is_local(self, rank: int) -> bool:
        """Return whether an engine runs on the node of this process."""
        return self._all_local or rank < self._local_count

    def _run(self, actor: EngineActor) -> None:
        rank = actor.rank
        ranks = {"dp_rank": rank, "local_dp_rank": actor.local_rank, "local_client": actor.local}
        target = self._target
        keys = keys_to_hand_over(target.keys, rank, self.next_incarnation(rank))
        actor.run(target.function, target.args, dict(target.kwargs) | ranks, keys)
        self._started[rank] = self.next_incarnation(rank) + 1

    # State

    @property
    def created_placement_groups(self) -> list[Any]:
        """The placement groups that were created here, by rank."""
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
        """Return a descriptor for each actor, readable when its run is over; none after closing."""
        return [] if self._closed else [actor.sentinel for actor in self.actors]

    def finished_procs(self) -> dict[str, int | None]:
        """Return the exit codes of ended actors, by name.

        The code is 1 if the engine raised, and None after a kill or a crash: Ray does not report the code.
        """
        return {actor.name: actor.exitcode for actor in self.actors if actor.ended}

    def last_lines(self, name: str, count: int | None = None) -> list[str]:
        """Return Ray's report about an actor's failure: the traceback of the engine, or how its process died.

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
        """Wait until all engines have ended, or one has failed; then return `finished_procs`.

        Cancelling this changes nothing. Closing the manager ends the wait, too.

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
        """Kill the actors, and free the created placement groups. Idempotent; blocks."""
        self._close(wait=True)

    def shutdown(self, timeout: float | None = None) -> None:
        """Close, under vLLM's name. Actors are killed, without a ``timeout``."""
        self.close()

    async def aclose(self) -> None:
        """Close, without blocking the loop. Idempotent; finishes also when cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(in_thread(self.close), name="aioshm-engine-actors-close")
        await completed(self._closing)
        self._closing.result()

    def __del__(self) -> None:
        if not self._closed:
            warn_not_closed(self)
            self._close(wait=False)  # a thread of Ray may run this, and would wait for itself

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(actor.name for actor in self.actors)}>"

    def _await_actors(self, deadline: float) -> None:
        ray = require_ray()
        here = ray.util.get_node_ip_address()
        for actor in self.actors:
            if not actor.await_process(deadline - time.monotonic()):
                raise EngineStartupError(f"the actor of {actor.name} was not started in time")
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
