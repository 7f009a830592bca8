"""Restarts the processes of engines, and of their coordinator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aioshm.engine.client.client import EngineClient
from aioshm.engine.client.liveness import describe_exit, engine_of
from aioshm.engine.dp import NAME as COORDINATOR
from aioshm.engine.dp import DPCoordinator
from aioshm.engine.protocol.addresses import CoreEngine, engine_index
from aioshm.engine.ray.actor import EngineActor
from aioshm.engine.startup.front_ends import FrontEnds
from aioshm.engine.startup.launch import CoreEngineLaunch
from aioshm.errors import EndClosed, EngineDead, copy_error
from aioshm.process.background import completed, give_back, in_thread
from aioshm.process.child import Child
from aioshm.process.proc import STOPPED_STATES, process_state
from aioshm.process.restart import Health, Life, RankInfo, Restart, RestartHistory
from aioshm.process.stalls import Watched
from aioshm.process.stopping import SHUTDOWN_TIMEOUT_S, ashutdown
from aioshm.process.watch import ProcessExit, ProcessWatch

logger: logging.Logger = logging.getLogger("aioshm.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRules:
    """How an `EngineSupervisor` restarts engines; see its arguments."""

    restart: Restart
    lockstep: bool = False
    start_timeout: float
    shutdown_timeout: float = SHUTDOWN_TIMEOUT_S
    on_change: Callable[[RankInfo], object] | None = None


class EngineLife(Life):
    """The successive processes of one engine."""

    def __init__(self, rank: int, rules: RestartRules, unit: Unit, pid: int | None = None) -> None:
        super().__init__(rank, rules.restart, rules.on_change, pid)
        self.unit = unit
        self.history = unit.history
        self.starting: asyncio.Task[Child | EngineActor] | None = None  # the latest start, perhaps done
        unit.lives.append(self)
        self.begin()

    def begin(self) -> None:
        """Expect the READY and the exit of a new process."""
        self.health: tuple[Health, str] = ("running", "")  # the present one, and where it is
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.exited: asyncio.Future[ProcessExit] = loop.create_future()

    def note_health(self, health: Health, where: str) -> None:
        self.health = (health, where)
        super().note_health(health, where)


class Unit:
    """Engines that are restarted together: one engine, or in lockstep all."""

    def __init__(self, restart: Restart) -> None:
        self.history: RestartHistory = RestartHistory(restart)
        self.lives: list[EngineLife] = []
        self.fallen: EngineLife | None = None  # the first to die since the engines were started
        self.ends_by_hand: bool = False  # `restart` has ended one of them; in lockstep a peer may fall first
        self.task: asyncio.Task[None] | None = None  # starts the engines

    @property
    def is_starting(self) -> bool:
        return self.task is not None and not self.task.done()


class EngineRestarts:
    """Watches the processes of a launch, and restarts dead ones; on the running loop."""

    def __init__(self, launch: CoreEngineLaunch, rules: RestartRules) -> None:
        self._launch = launch
        self._manager = launch.engine_manager
        self._members: EngineClient | FrontEnds | None = launch.members
        self._rules = rules
        self.lives: dict[int, EngineLife] = {}  # the engines of this host, by rank
        self.failure: EngineDead | None = None  # why nothing is restarted any more
        self.failed: asyncio.Event = asyncio.Event()  # set on failure, and on close
        self._tasks: set[asyncio.Task[None]] = set()
        self._all = Unit(rules.restart)  # in lockstep
        self._coordinator_life = Life(0, rules.restart)
        self._restarting_coordinator = asyncio.Lock()
        for process in self._manager.processes:
            rank = engine_index(process.name)
            assert rank is not None
            self.lives[rank] = EngineLife(rank, rules, self._unit(), process.pid)
            self.ready(rank)
        launch.watch_progress(rules.restart, lockstep=rules.lockstep, on_change=self._health_changed)
        if isinstance(self._members, EngineClient):
            self._members.supervise_heartbeats(rules.restart.hang_s, self._late)
        self._startup = launch.startup
        self._startup.stay_open(self.ready)
        if isinstance(self._members, FrontEnds):
            self._members.on_loss = self._startup.retry
        self._watch = ProcessWatch(manager=self._manager, on_exit=self._process_exited)
        if launch.coordinator is not None:
            self._watch.add([launch.coordinator.proc])

    async def aclose(self) -> None:
        """Stop restarting. Idempotent."""
        self.failed.set()
        self._watch.close()
        for task in self._tasks:
            task.cancel()
        for life in self.lives.values():
            life.exited.cancel()  # nobody will see the exit: `restart` waits no longer
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raise the failure, or that this was closed."""
        if self.failure is not None:
            raise copy_error(self.failure)
        if self.failed.is_set():
            raise EndClosed("the supervisor of engines was closed")

    def add(self, rank: int) -> asyncio.Task[None]:
        """Add an engine, and return the task of its start."""
        unit = self._unit()
        self.lives[rank] = EngineLife(rank, self._rules, unit)
        self._startup.handshake.add(CoreEngine(rank, self._manager.is_local(rank)))
        unit.task = self._spawn(self._bring_up(unit), f"engine-{rank}")
        return unit.task

    def _unit(self) -> Unit:
        return self._all if self._rules.lockstep else Unit(self._rules.restart)

    async def remove(self, rank: int) -> None:
        """Stop an engine that is no member any more, and void the keys; also if this is cancelled."""
        life = self.lives.pop(rank)
        if life.unit.task is not None:
            life.unit.task.cancel()
        life.exited.cancel()
        self._startup.handshake.remove(rank)
        try:
            if isinstance(self._members, FrontEnds):
                await self._members.acknowledged()
        finally:  # also if this is cancelled: the engine is no member any more
            try:
                if life.starting is not None:
                    await completed(life.starting)
            finally:
                try:
                    with suppress(ValueError):  # the first start has not begun
                        await self._manager.stop_engine(rank)
                finally:
                    self._void_keys(rank)

    def ready(self, rank: int) -> None:
        """Note that an engine has said READY."""
        life = self.lives.get(rank)
        if life is None:  # an engine of another host
            return
        if not life.ready.done():
            life.ready.set_result(None)
        if isinstance(self._members, FrontEnds):
            self._members.returned(rank)

    async def restart(self, life: EngineLife) -> None:
        """Replace the process of an engine, or wait for the replacement that is under way."""
        if life.is_alive and not life.unit.ends_by_hand:
            life.unit.ends_by_hand = True
            process = next(each for each in self._manager.processes if engine_index(each.name) == life.rank)
            process.reason = "was ended, to be restarted"
            # SIGTERM is useless to a process that hangs.
            timeout = self._rules.shutdown_timeout if life.state == "running" else 0
            life.enter("stopping")
            # A task of its own: a cancelled `ashutdown` kills.
            self._spawn(_end(process, timeout), f"end-of-engine-{life.rank}")
        if life.unit.ends_by_hand:
            await asyncio.wait([life.exited])
        if life.unit.task is not None:
            await asyncio.wait([life.unit.task])

    def _health_changed(self, watched: Watched) -> None:
        rank = engine_index(watched.process.name)
        if rank in self.lives and self.lives[rank].pid == watched.process.pid:
            self.lives[rank].note_health(watched.health, watched.where)

    def _late(self, rank: int, seconds: float, where: str) -> bool:
        """Note that the heartbeats of an actor show no progress, and kill the actor if the policy says so.

        Return whether the actor was stopped, and runs again.
        """
        actor = next((each for each in self._manager.processes if engine_index(each.name) == rank), None)
        life = self.lives.get(rank)
        if life is None or not isinstance(actor, EngineActor):
            return False
        restart = self._rules.restart
        stopped = actor.local and process_state(actor.pid) in STOPPED_STATES
        continued = seconds > 0 and life.health[0] == "stopped" and not stopped
        health: Health = "running"
        if seconds:
            health = "stopped" if stopped else "stalled"
        life.note_health(health, where)
        is_hung = restart.hang_s is not None and seconds >= restart.hang_s and not continued
        if is_hung and not actor.reason and (restart.kill_stopped or not stopped):
            actor.reason = f"hung for {seconds:.0f} s, and was killed"
            self._spawn(_end(actor, 0), f"hung-engine-{rank}")
        return continued

    # Exits

    def _process_exited(self) -> None:
        for found in self._watch.take():
            rank = engine_of(found)
            if found.name == COORDINATOR:
                self._spawn(self._bring_back_coordinator(found), "coordinator")
            elif rank in self.lives and self.lives[rank].pid == found.pid:  # else it was removed, and added again
                self._engine_exited(self.lives[rank], found)

    def _engine_exited(self, life: EngineLife, found: ProcessExit) -> None:
        if isinstance(self._members, FrontEnds):
            error = EngineDead(describe_exit(found), engine=life.rank, pid=found.pid)
            self._members.died(error, self._manager.next_incarnation(life.rank) - 1)
        self._void_keys(life.rank)
        if not life.exited.done():
            life.exited.set_result(found)
        phase = ""
        if life.state == "starting":
            phase = "starting"
        life.cause = describe_exit(found, phase)
        self._fall(life)

    def _void_keys(self, rank: int) -> None:
        """Refuse the keys of an exited engine process at every socket."""
        incarnation = self._manager.next_incarnation(rank)
        self._startup.void_keys(rank, incarnation)
        if self._members is not None:
            with suppress(EngineDead, EndClosed):  # all keys are useless then
                self._members.void_keys(rank, incarnation)
        if self._launch.coordinator is not None:
            self._launch.coordinator.void_keys(rank, incarnation)

    # Starts

    def _fall(self, life: EngineLife) -> None:
        """Note a death: the first one since the start restarts all engines of the unit."""
        unit = life.unit
        if unit.fallen is not None or self.failure is not None:
            return
        unit.fallen = life
        if self._rules.lockstep:  # the other engines may wait for the dead one
            for process in self._manager.processes:
                process.kill()
        if not unit.is_starting:
            unit.task = self._spawn(self._bring_up(unit), f"engine-{life.rank}")

    async def _bring_up(self, unit: Unit) -> None:
        """Start the engines of a unit until all are ready, or give up."""
        loop = asyncio.get_running_loop()
        while unit.fallen is None or await self._may_start_again(unit, unit.fallen):
            unit.fallen = None
            unit.ends_by_hand = False
            began = loop.time()
            await asyncio.gather(*map(self._start, unit.lives))
            unit.history.started(loop.time() - began)
            if unit.fallen is None:
                return

    async def _may_start_again(self, unit: Unit, fallen: EngineLife) -> bool:
        """Wait until all engines of the unit have exited, and the delay has passed; return False for a crash loop."""
        text = f"{fallen.cause}; restarting it"
        if self._rules.lockstep:
            text = f"{fallen.cause}; restarting all engines"
        delay: float | None = 0.0
        if unit.ends_by_hand:
            unit.history.restarts += 1
        else:
            delay = unit.history.died(asyncio.get_running_loop().time(), fallen.cause)
            text += f" ({unit.history.number})"
        alive = [each.exited for each in unit.lives if not each.exited.done()]
        if alive:
            await asyncio.wait(alive)
        if delay is None:
            self._give_up(f"engine {fallen.rank} is in a crash loop: {unit.history.story}", fallen)
            return False
        logger.warning("%s", text)
        for each in unit.lives:
            each.enter("waiting")
        await asyncio.sleep(delay)
        coordinator = self._launch.coordinator
        if coordinator is not None and self._rules.lockstep:  # its count of waves is void
            return await self._restart_coordinator(coordinator, "")
        return True

    async def _start(self, life: EngineLife) -> None:
        """Start an engine, and wait until it is ready, or has exited."""
        rank = life.rank
        self._startup.handshake.forget(rank)
        life.begin()
        try:
            life.starting = asyncio.create_task(in_thread(lambda: self._manager.start_engine(rank)))
            process = await asyncio.shield(life.starting)  # goes on when cancelled: `remove` waits for the process
        except Exception as error:
            life.exited.cancel()
            life.cause = f"engine {rank} could not be started: {error}"
            self._fall(life)
            return
        life.pid = process.pid
        life.enter("starting")
        self._watch.add([process], self._manager)
        self._launch.watch(process)
        if isinstance(self._members, EngineClient):
            self._members.watch(self._manager)
        if life.unit.fallen is not None:
            process.kill()
        within_s = self._rules.start_timeout
        first: list[asyncio.Future[Any]] = [life.ready, life.exited]
        await asyncio.wait(first, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if not life.ready.done() and not life.exited.done():
            process.reason = f"was killed: not ready after {within_s:g} s"
            process.kill()
            await asyncio.wait([life.exited])
        if not life.exited.done():
            life.enter("running")
            logger.info("engine %d (pid %d) is ready, after %d restarts", rank, life.pid, life.history.restarts)

    async def _bring_back_coordinator(self, found: ProcessExit) -> None:
        coordinator = self._launch.coordinator
        assert coordinator is not None
        if self._all.fallen is None and coordinator.proc.pid == found.pid:
            await self._restart_coordinator(coordinator, found.describe())
        # Else the coordinator is restarted with all engines, or was.

    async def _restart_coordinator(self, coordinator: DPCoordinator, cause: str) -> bool:
        """Restart the coordinator after its death, or with an empty cause a living one; False: a crash loop."""

        async def start() -> str:
            try:
                await in_thread(coordinator.run_again)
            except Exception as error:
                return str(error)
            self._watch.add([coordinator.proc])
            self._launch.watch(coordinator.proc)
            return ""

        async with self._restarting_coordinator:
            if not cause:
                await ashutdown([coordinator.proc], 0)
            elif coordinator.proc.exitcode is None:
                return True  # restarted with all engines meanwhile
            life = self._coordinator_life
            if await life.bring_back(cause, start):
                return True
            self._give_up(f"the coordinator is in a crash loop: {life.history.story}", None)
            return False

    # Failure

    def _give_up(self, text: str, life: EngineLife | None) -> None:
        if self.failure is not None:  # the first one counts
            return
        logger.error("%s", text)
        self.failure = EngineDead(text)
        if life is not None:
            self.failure = EngineDead(text, engine=life.rank, pid=life.pid)
        self.failed.set()
        if self._members is not None:
            self._members.give_up(self.failure)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=f"aioshm-supervises-{name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._give_up(f"the supervisor has failed: {type(error).__name__}: {error}", None)


async def _end(process: Child | EngineActor, timeout: float) -> None:
    if isinstance(process, Child):
        await ashutdown([process], timeout)
    else:
        await give_back(process.kill)
