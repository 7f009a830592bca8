"""Engines as Ray actors, on the nodes of a cluster."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Final, NamedTuple, Self

from aioshm.arguments import check_int, check_plain, check_seconds
from aioshm.closing import AsyncClosing, Closing, warn_not_closed
from aioshm.engine.ray import cluster
from aioshm.engine.ray.actor import EngineActor
from aioshm.engine.ray.cluster import EngineNeeds
from aioshm.engine.security.keys import EngineKeys, keys_to_hand_over
from aioshm.errors import EngineDead, EngineStartupError, RoleError
from aioshm.process.background import completed, give_back, in_thread
from aioshm.process.placement import Placement, check_placement
from aioshm.process.watch import ProcessWatch

START_TIMEOUT_S = 300.0
"""How long actors may take to start: a node may first have to fetch packages for their runtime environment."""

KILLED_S = 10.0
"""How long Ray may take to report that killed actors are gone."""

PROGRESS_S = 10.0
"""Seconds between log lines about an engine that waits for room."""

_POLL_S = 0.1
_POLL_NODE_S = 0.5  # while an actor does not run yet

logger: logging.Logger = logging.getLogger("aioshm.engine")


class _Plan(NamedTuple):
    """The arguments that all actors of a manager share."""

    target: Callable[..., object]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    keys: EngineKeys | None
    runtime_env: Mapping[str, Any] | None
    timeout: float
    needs: EngineNeeds | None  # None: the placement groups were given
    local_engine_count: int | None  # None: all engines are local


class _Engine:
    """One rank: its room, and its actor."""

    def __init__(self) -> None:
        self.group: Any = None  # the placement group
        self.actor: EngineActor | None = None
        self.starts: int = 0  # so far
        self.stopping: bool = False
        self.busy = threading.Lock()  # held by a thread that starts or stops the actor


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
    moves given placement groups when it has room for them.

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
        placement: The environment variables of each engine, by its rank; see `Placement`. They are added to the
            ``env_vars`` of ``runtime_env``. ``needs`` reserves CPUs.
        kwargs: Every other keyword argument of the target.

    Attributes:
        max_engines: The number of given placement groups; None: `start_engine` creates as many as there is room for.
        placement: As given.

    Raises:
        EngineStartupError: The cluster is too small, or an actor could not be started in time; all actors are killed.
        ImportError: Ray is not installed.
        TypeError, ValueError: An argument is invalid.
    """

    create_dp_placement_groups: Final = staticmethod(cluster.create_dp_placement_groups)

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
        placement: Placement | None = None,
        **kwargs: Any,
    ) -> None:
        self.max_engines: int | None = None
        self._engines: dict[int, _Engine] = {}  # by rank
        self._lock = threading.Lock()  # held to register an actor: `start_engine` runs in threads
        self._closed = True
        self._closing: asyncio.Task[None] | None = None
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
            raise ValueError("local_dp_ranks need placement_groups=, and needs exclude placement_groups=")
        if placement_groups is None:
            needs = needs or EngineNeeds()
        else:
            self.max_engines = engine_count
        self.placement: Placement | None = check_placement(placement)
        some = None if local_engine_count == engine_count else local_engine_count
        self._plan = _Plan(target_fn, args, kwargs, keys, runtime_env, timeout, needs, some)
        for rank in range(engine_count):
            self._runtime_env(rank)
        cluster.connect(ray_options or {})
        self._closed = False
        try:
            if placement_groups is None:
                groups, _ = cluster.create_dp_placement_groups(engine_count, local_engine_count, needs, timeout=timeout)
            else:
                groups = list(placement_groups)
                cluster.await_groups(groups, deadline)
            for rank, group in enumerate(groups):  # all, before any actor: `close` removes the groups that it knows
                self._engines[rank] = _Engine()
                self._engines[rank].group = group
            for rank, engine in self._engines.items():
                engine.actor = self._create(rank, engine)
                if local_dp_ranks is not None:
                    engine.actor.local_rank = local_dp_ranks[rank]
            for actor in self.actors:
                self._run(self._engines[actor.rank], actor, deadline)
        except BaseException:
            self.close()
            raise
        logger.debug("started %s", ", ".join(map(str, self.actors)))

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
            options: Further arguments of the class.
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
        engine = self._engines.setdefault(rank, _Engine())
        in_turn = engine.busy.acquire(blocking=False)
        try:
            self._check_wanted(rank, engine)
            former = engine.actor
            if not in_turn or (former is not None and not former.ended):
                raise RoleError(f"engine {rank} still runs, and can be started again when it has exited")
            deadline = time.monotonic() + self._plan.timeout
            if self._plan.needs is not None:
                self._await_room(rank, engine, self._plan.needs, deadline)
            elif engine.group is None:
                raise EngineStartupError(f"engine {rank} has no placement group: {self.max_engines} were given")
            actor = self._create(rank, engine)
            try:
                self._run(engine, actor, deadline)
            except BaseException:
                actor.kill()
                actor.release()
                raise
            if former is not None:
                former.release()
            return actor
        finally:
            if in_turn:
                engine.busy.release()

    async def stop_engine(self, rank: int) -> None:
        """Kill the actor of an engine, remove it, and free the room that the manager reserved.

        Cancelling this ends the wait only.

        Raises:
            ValueError: There is no such engine.
        """
        await in_thread(lambda: self._stop(rank))

    def next_incarnation(self, rank: int) -> int:
        """Return the incarnation of the next actor of this rank."""
        return self._engines[rank].starts if rank in self._engines else 0

    def is_local(self, rank: int) -> bool:
        """Return whether an engine runs on the node of this process."""
        some = self._plan.local_engine_count
        return some is None or rank < some

    def _await_room(self, rank: int, engine: _Engine, needs: EngineNeeds, deadline: float) -> None:
        """Wait until the group of an engine is reserved, on a node that has not left the cluster."""
        logged = 0.0
        while True:
            self._check_wanted(rank, engine)
            if engine.group is not None:
                if not cluster.trouble_of(engine.group):
                    return
                self._remove_group(engine, wait=False)  # bound to a node that is gone
            try:
                engine.group = cluster.reserve_room(rank, self.is_local(rank), needs)
                return
            except EngineStartupError as error:
                missing = str(error)
            now = time.monotonic()
            if now > deadline:
                waited = self._plan.timeout
                raise EngineStartupError(f"there was no room for engine {rank} within {waited:g} s: {missing}")
            if now - logged >= PROGRESS_S:
                logged = now
                logger.warning("engine %d waits for room, for %.0f s at most: %s", rank, deadline - now, missing)
            time.sleep(_POLL_S)

    def _remove_group(self, engine: _Engine, *, wait: bool = True) -> None:
        group = engine.group
        engine.group = None
        cluster.remove_groups([group], wait)

    def _create(self, rank: int, engine: _Engine) -> EngineActor:
        return EngineActor(rank, self.is_local(rank), engine.group, self._runtime_env(rank))

    def _runtime_env(self, rank: int) -> Mapping[str, Any] | None:
        given = self._plan.runtime_env
        placement = self.placement
        if placement is None:
            return given
        if placement.cpus is not None or placement.numa_node is not None:
            raise ValueError(
                "placement must have env only with Ray, which chooses node and CPUs: reserve CPUs by "
                "needs=EngineNeeds(cpus=...)"
            )
        env = placement.of(rank).env
        unset = [name for name, value in env.items() if value is None]
        if unset:
            raise ValueError(f"placement.env of rank {rank} must not unset {', '.join(unset)}: Ray only sets variables")
        env_vars = (given or {}).get("env_vars", {})
        return {**(given or {}), "env_vars": {**env_vars, **env}}

    def _run(self, engine: _Engine, actor: EngineActor, deadline: float) -> None:
        """Wait until the process of an actor runs, start the engine there, and register the actor."""
        plan = self._plan
        while not actor.await_process(min(_POLL_NODE_S, deadline - time.monotonic())):
            self._check_wanted(actor.rank, engine)
            trouble = cluster.trouble_of(actor.group)
            if time.monotonic() > deadline or (trouble and plan.needs is not None):
                raise EngineStartupError(f"the actor of {actor.name} was not started in time: {trouble or 'pending'}")
        here = cluster.require_ray().util.get_node_ip_address()
        if actor.local and actor.host != here:
            raise EngineStartupError(f"{actor} is to be local, but its placement group is not on {here}")
        actor.node_id = cluster.node_of(actor.group)
        with self._lock:
            self._check_wanted(actor.rank, engine)
            if engine.actor is not None and engine.actor.node_id == actor.node_id:
                actor.local_rank = engine.actor.local_rank  # the caller may have given it
            if actor.local_rank < 0:
                others = [each for each in self.actors if each.rank != actor.rank]
                used = {each.local_rank for each in others if each.node_id == actor.node_id}
                actor.local_rank = next(number for number in count() if number not in used)
            ranks = {"dp_rank": actor.rank, "local_dp_rank": actor.local_rank, "local_client": actor.local}
            keys = keys_to_hand_over(plan.keys, actor.rank, engine.starts)
            actor.run(plan.target, plan.args, {**plan.kwargs, **ranks}, keys)
            engine.starts += 1
            engine.actor = actor

    def _stop(self, rank: int) -> None:
        engine = self._engines.get(rank)
        if engine is None or (engine.actor is None and not engine.busy.locked()):
            raise ValueError(f"rank must be that of one of the engines, not {rank}")
        engine.stopping = True
        in_turn = engine.busy.acquire(timeout=KILLED_S)
        try:
            actor = engine.actor
            if actor is not None and not actor.ended:
                actor.kill()
                actor.wait(time.monotonic() + KILLED_S)
            if self._plan.needs is not None and engine.group is not None:
                self._remove_group(engine)
            with self._lock:
                if actor is not None and not self._closed:
                    engine.actor = None
                    actor.release()
        finally:
            engine.stopping = False
            if in_turn:
                engine.busy.release()

    def _check_wanted(self, rank: int, engine: _Engine) -> None:
        if self._closed:
            raise RoleError("this manager of actors is closed, and starts none any more")
        if engine.stopping:
            raise RoleError(f"engine {rank} is stopped, and is not started again")

    # State

    @property
    def actors(self) -> list[EngineActor]:
        """The actors, by rank; their exit codes stay known after closing."""
        return [engine.actor for engine in self._by_rank() if engine.actor is not None]

    @property
    def processes(self) -> list[EngineActor]:
        """The actors, under the name that managers of processes have for them."""
        return self.actors

    @property
    def created_placement_groups(self) -> list[Any]:
        """The placement groups that were created here, by rank."""
        if self._plan.needs is None:
            return []
        return [engine.group for engine in self._by_rank() if engine.group is not None]

    def _by_rank(self) -> list[_Engine]:
        return [self._engines[rank] for rank in sorted(self._engines)]

    def sentinels(self) -> list[int]:
        """Return a descriptor for each actor, readable when the run is over; none after closing."""
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
            while not self._closed:
                over = all(actor.ended for actor in self.actors)  # first: an actor may fail meanwhile
                for actor in self.actors:
                    if actor.ended and actor.exitcode != 0 and not self._closed:
                        ended = "died" if actor.exitcode is None else f"exited with code {actor.exitcode}"
                        lines = [f"{actor} {ended}", *actor.last_words]
                        raise EngineDead("\n".join(lines), engine=actor.rank, pid=actor.pid)
                if over:
                    break
                await watch.next()
        return self.finished_procs()

    # Closing

    def close(self) -> None:
        """Kill the actors, and free the created placement groups. Idempotent; blocks."""
        self._close(wait=True)

    def shutdown(self, timeout: float | None = None) -> None:
        """Close, under vLLM's name. Actors are killed, without a ``timeout``."""
        self.close()

    async def aclose(self) -> None:
        """Close, without blocking the loop. Idempotent; finishes also when cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(give_back(self.close), name="aioshm-engine-actors-close")
        await completed(self._closing)
        self._closing.result()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warn_not_closed(self)
            self._close(wait=False)  # in a thread of Ray, waiting would be a deadlock

    def _close(self, wait: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + KILLED_S
        for engine in self._by_rank():
            # Threads that start or stop an actor must not use Ray afterwards.
            if wait and engine.busy.acquire(timeout=max(0.0, deadline - time.monotonic())):
                engine.busy.release()
        try:
            if cluster.require_ray().is_initialized():
                for actor in self.actors:
                    actor.kill()
                deadline = time.monotonic() + KILLED_S
                late = [str(actor) for actor in self.actors if wait and not actor.wait(deadline)]
                if late:
                    logger.error("killed, but not gone after %s s: %s", KILLED_S, ", ".join(late))
                cluster.remove_groups(self.created_placement_groups, wait)
        finally:
            for actor in self.actors:
                actor.release()
            cluster.disconnect()
