"""Engines that are started again when they die, while the others serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

from aioshm.arguments import check_int, check_seconds
from aioshm.closing import AsyncClosing, warn_not_closed
from aioshm.config import engine_ready_timeout
from aioshm.engine.client.client import EngineClient
from aioshm.engine.client.link import Resubmit
from aioshm.engine.dp.coordinator import NAME as COORDINATOR
from aioshm.engine.dp.coordinator import DPCoordinator
from aioshm.engine.protocol.addresses import CoreEngine
from aioshm.engine.protocol.progress import engine_of
from aioshm.engine.startup.launch import CoreEngineLaunch, launch_core_engines
from aioshm.engine.startup.processes import CoreEngineProcManager
from aioshm.engine.startup.rejoining import Rejoining
from aioshm.errors import EndClosed, EngineDead, RoleError
from aioshm.process.background import in_thread
from aioshm.process.child import Child
from aioshm.process.restart import Restart, RestartHistory
from aioshm.process.stopping import ashutdown
from aioshm.process.watch import ProcessExit, ProcessWatch

logger: logging.Logger = logging.getLogger("aioshm.engine")

EngineState: TypeAlias = Literal["running", "waiting", "starting", "stopping"]

_SHOWN_LINES = 5  # of a dead engine's stderr, in what is logged and in the error of a crash loop


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine of a supervisor.

    Attributes:
        rank: Its rank.
        pid: The process id of its process, or of its last one.
        state: ``"running"``; ``"waiting"`` for its restart, see `Restart`; ``"starting"`` until it is ready; or
            ``"stopping"``, since there are to be fewer.
        restarts: How often it was started again.
        cause: How it has died the last time; empty if it never has.
    """

    rank: int
    pid: int | None
    state: EngineState
    restarts: int
    cause: str


class _Life:
    """The processes of one engine, one after the other."""

    def __init__(self, rank: int, restart: Restart) -> None:
        self.rank = rank
        self.history = RestartHistory(restart)
        self.state: EngineState = "starting"
        self.pid: int | None = None
        self.cause = ""
        self.turn: asyncio.Future[ProcessExit | None] | None = None  # while it starts: None when it is ready
        self.task: asyncio.Task[None] | None = None

    def settle(self, found: ProcessExit | None) -> bool:
        """Tell who waits that it is ready, or has exited; return whether anybody does."""
        if self.turn is None or self.turn.done():
            return False
        self.turn.set_result(found)
        return True


class EngineSupervisor(AsyncClosing):
    """Engines, coordinator and client, as `launch_core_engines` starts them, and starts again what dies.

        async with EngineSupervisor(serve, 4, resubmit="unstarted") as supervisor:
            async for output in supervisor.client.submit(request):
                ...
            await supervisor.scale(6)

    An engine that dies is started again and shakes hands while the others serve; its requests fail with `EngineDead`,
    see ``on_engine_death="continue"`` of `EngineClient`. So is the coordinator. Engines of other hosts are started
    again there, by others, and are taken back when they say HELLO. A crash loop, see `Restart`, ends everything: the
    client raises `EngineDead` with the cause of every death, and so does `wait`.

    Args:
        target_fn: What each engine's process runs.
        engine_count: How many engines there are at first.
        restart: When processes are started again, for each one by itself.
        resubmit: See `EngineClient`.
        lockstep: Whether no engine can go on without the others, as those of mixtures of experts: then all of them are
            started again when one dies.
        start_timeout: Seconds that an engine may take until it is ready, when it is started again; then it is killed,
            which counts as a death. None: ``AIOSHM_ENGINE_READY_TIMEOUT_S``, or 600.
        on_change: Called on the loop when an engine's state has changed.
        options: Every other argument of `launch_core_engines`; ``backend`` is ``"mp"``.

    Raises:
        EngineStartupError: As from `launch_core_engines`, when this is entered: the first start is tried once.
        TypeError, ValueError: An argument makes no sense; the text names it.
    """

    def __init__(
        self,
        target_fn: Callable[..., object],
        engine_count: int = 1,
        *,
        restart: Restart | None = None,
        resubmit: Resubmit | None = None,
        lockstep: bool = False,
        start_timeout: float | None = None,
        on_change: Callable[[EngineInfo], object] | None = None,
        **options: Any,
    ) -> None:
        self._stack: AsyncExitStack | None = None
        self._closed = False
        if options.get("backend", "mp") != "mp":
            raise ValueError(f"backend must be 'mp': Ray's actors are not supervised, not {options['backend']!r}")
        for name in ("on_engine_death", "on_engine_change", "wait"):
            if name in options:
                raise TypeError(f"{name} is the supervisor's own, and cannot be given")
        self._restart = restart or Restart()
        self._lockstep = lockstep
        self._start_timeout = (
            engine_ready_timeout() if start_timeout is None else check_seconds("start_timeout", start_timeout)
        )
        self._on_change = on_change
        self._options = {
            **options,
            "on_engine_death": "continue",
            "resubmit": resubmit,
            "on_engine_change": self._engine_changed,
            "wait": False,
        }
        self._target, self._count = target_fn, check_int("engine_count", engine_count, minimum=1)
        self._lives: dict[int, _Life] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._of_all = RestartHistory(self._restart)
        self._of_coordinator = RestartHistory(self._restart)
        self._group: asyncio.Task[None] | None = None
        self._seen = 0
        self._failure: EngineDead | None = None

    def __repr__(self) -> str:
        states = ", ".join(f"{life.rank} {life.state}" for life in self._lives.values())
        return f"<EngineSupervisor of engines {states or 'not started'}>"

    @property
    def client(self) -> EngineClient:
        """The client of the engines.

        Raises:
            RoleError: The supervisor is not open, or API servers have the clients.
        """
        return self._open().client

    @property
    def launch(self) -> CoreEngineLaunch:
        """What was started: addresses, and the managers of processes.

        Raises:
            RoleError: The supervisor is not open.
        """
        return self._open()

    @property
    def engines(self) -> tuple[EngineInfo, ...]:
        """The engines of this host, by rank."""
        return tuple(self._info(life) for _, life in sorted(self._lives.items()))

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def open(self) -> None:
        """Start everything, and wait until it is ready; ``async with`` does it.

        Raises:
            EngineStartupError: As from `launch_core_engines`.
            RoleError: It was open before.
        """
        if self._stack is not None or self._closed:
            raise RoleError("a supervisor of engines can be entered once")
        self._loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            self._launch = await stack.enter_async_context(
                launch_core_engines(self._target, self._count, **self._options)
            )
            self._launch.watch_coordinator = False
            await self._launch.wait_until_ready()
            manager = self._launch.engine_manager
            assert isinstance(manager, CoreEngineProcManager)
            self._manager = manager
            self._lives = {life.rank: life for life in map(self._first_life, manager.processes)}
            self._rejoining: Rejoining = self._launch.stay_open(self._ready)
            self._failed: asyncio.Event = asyncio.Event()
            self._scaling = asyncio.Lock()
            self._watch = stack.enter_context(ProcessWatch(manager=manager, on_exit=self._process_exited))
            if self._launch.coordinator is not None:
                self._watch.add([self._launch.coordinator.proc])
            self._stack = stack.pop_all()

    async def wait(self) -> None:
        """Wait until the engines are in a crash loop. Cancelling this changes nothing.

        Raises:
            EngineDead: They are; the text has the cause of every death that counts.
            QueueClosed, RoleError: The supervisor was closed, or is not open.
        """
        self._open()
        await self._failed.wait()
        if self._failure is not None:
            raise EngineDead(*self._failure.args, engine=self._failure.engine, pid=self._failure.pid)
        raise EndClosed("the supervisor of engines was closed")

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every engine serves, also after deaths; see `EngineClient.wait_until_ready`."""
        await self.client.wait_until_ready(timeout)

    async def aclose(self) -> None:
        """Stop everything, the client first. Idempotent; finishes also when it is cancelled."""
        self._closed = True
        stack, self._stack = self._stack, None
        if stack is None:
            return
        self._failed.set()
        self._watch.close()
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            await stack.aclose()

    def __del__(self) -> None:
        if self._stack is not None:
            warn_not_closed(self)

    # More engines, or fewer

    async def scale(self, engine_count: int, *, timeout: float | None = None) -> None:
        """Have more engines at once, or fewer after they have finished what they have; return when it is so.

        Cancelling this leaves engines that were started, and those that have not finished yet, as they are.

        Args:
            engine_count: How many engines there are to be; the last ones go.
            timeout: Seconds that each engine that goes may take to finish; what is unfinished then fails with
                `EngineDead`. None: as long as it takes.

        Raises:
            EngineDead: A crash loop.
            RoleError: The engines are in lockstep, or this process does not have all engines and their only client.
            TypeError, ValueError: An argument makes no sense.
        """
        check_int("engine_count", engine_count, minimum=1)
        launch = self._open()
        if self._lockstep:
            raise RoleError("engines in lockstep cannot be scaled: they need each other")
        if not launch.has_client or len(self.client.ranks) != len(self._lives):
            raise RoleError("engines are scaled where all of them, and their only client, are this process'")
        async with self._scaling:
            while len(self._lives) > engine_count:
                await self._take_out(self._lives[max(self._lives)], timeout)
            newcomers = [self._add(rank) for rank in range(len(self._lives), engine_count)]
            await asyncio.gather(*(asyncio.shield(task) for task in newcomers))
            if newcomers and self._failure is None:
                await self.client.wait_until_ready(self._start_timeout)

    def _add(self, rank: int) -> asyncio.Task[None]:
        life = self._lives[rank] = _Life(rank, self._restart)
        self._rejoining.handshake.add(CoreEngine(rank))
        self.client.add_engine(rank)
        life.task = self._spawn(self._bring_up(life, None), f"engine-{rank}")
        return life.task

    async def _take_out(self, life: _Life, timeout: float | None) -> None:
        before = life.state
        self._set(life, "stopping")
        try:
            await self.client.remove_engine(life.rank, timeout=timeout)
        except BaseException:
            self._set(life, before)
            raise
        del self._lives[life.rank]
        if life.task is not None:
            life.task.cancel()
        self._rejoining.handshake.remove(life.rank)
        with suppress(ValueError):  # it was about to be started for the first time
            await self._manager.stop_engine(life.rank)

    # What happens to processes

    def _process_exited(self) -> None:
        exits = self._watch.exited()[self._seen :]
        self._seen += len(exits)
        for each in exits:
            rank = engine_of(each)
            if each.name == COORDINATOR:
                self._spawn(self._bring_back_coordinator(each.describe()), "coordinator")
            elif rank in self._lives:
                self._engine_exited(self._lives[rank], each)

    def _engine_exited(self, life: _Life, found: ProcessExit) -> None:
        if self._failure is not None or life.settle(found):
            return
        if self._lockstep:
            if self._group is None or self._group.done():
                self._group = self._spawn(self._bring_back_all(life, found), "all-engines")
        elif life.state != "stopping" or life.rank in self.client.ranks:
            life.task = self._spawn(self._bring_up(life, found), f"engine-{life.rank}")

    def _ready(self, rank: int) -> None:
        life = self._lives.get(rank)
        if life is not None:
            life.settle(None)

    def _engine_changed(self, rank: int, error: EngineDead | None) -> None:
        if error is not None and self._stack is not None and rank not in self._lives:
            self._rejoining.expect(rank)  # an engine of another host, which is started again there

    # Started, and started again

    async def _bring_up(self, life: _Life, found: ProcessExit | None) -> None:
        """Start an engine until it is ready, or a crash loop is found; ``found`` is how it has died, if it has."""
        cause = "" if found is None else self._died(life, found)
        while True:
            if cause:
                delay = life.history.died(self._loop.time(), cause)
                if delay is None:
                    self._give_up(f"engine {life.rank} is in a crash loop: {life.history.story}", life)
                    return
                self._set(life, "waiting")
                await asyncio.sleep(delay)
            cause = await self._start(life)
            if not cause:
                return

    async def _bring_back_all(self, life: _Life, found: ProcessExit) -> None:
        """Stop the engines that are left, and start all of them."""
        cause = self._died(life, found)
        while True:
            delay = self._of_all.died(self._loop.time(), cause)
            await self._kill_all()
            if delay is None:
                self._give_up(f"the engines are in a crash loop: {self._of_all.story}", life)
                return
            for each in self._lives.values():
                self._set(each, "waiting")
            await asyncio.sleep(delay)
            coordinator = self._launch.coordinator
            if coordinator is not None:  # what it knows of waves is void
                await ashutdown([coordinator.proc], 0)
                await self._coordinator_back(coordinator)
            causes = await asyncio.gather(*(self._start_in_group(each) for each in self._lives.values()))
            cause = "; ".join(filter(None, causes))
            if not cause:
                return
            life = next(each for each, said in zip(self._lives.values(), causes, strict=True) if said)

    async def _start_in_group(self, life: _Life) -> str:
        cause = await self._start(life)
        if cause:  # the others may wait for it
            for process in self._manager.processes:
                process.kill()
        return cause

    async def _kill_all(self) -> None:
        turns = []
        for life, process in zip(self._lives.values(), self._manager.processes, strict=True):
            if process.exitcode is None:
                life.turn = self._loop.create_future()
                turns.append(life.turn)
                process.kill()
        if turns:
            await asyncio.wait(turns)

    async def _start(self, life: _Life) -> str:
        """Start an engine, and wait until it is ready; return why it is not, or an empty string."""
        rank = life.rank
        self._rejoining.expect(rank)
        life.turn = self._loop.create_future()
        try:
            process = await in_thread(lambda: self._manager.start_engine(rank))
        except Exception as error:
            life.cause = f"engine {rank} could not be started: {error}"
            return life.cause
        life.pid = process.pid
        self._set(life, "starting")
        self._watch.add([process], managed=True)
        if self._launch.has_client:
            self.client.watch(self._manager)
        try:
            async with asyncio.timeout(self._start_timeout):
                found = await asyncio.shield(life.turn)
        except TimeoutError:
            process.kill()
            await life.turn
            life.cause = (
                f"{process.name} (pid {process.pid}) was not ready after {self._start_timeout:g} s, and was killed"
            )
            return life.cause
        if found is None:
            self._set(life, "running")
            logger.info("%s is ready: pid %d, restart %d", process.name, life.pid, life.history.restarts)
            return ""
        return self._died(life, found)

    async def _bring_back_coordinator(self, cause: str) -> None:
        if self._group is not None and not self._group.done():
            return  # it starts it again
        coordinator = self._launch.coordinator
        assert coordinator is not None
        while True:
            delay = self._of_coordinator.died(self._loop.time(), cause)
            if delay is None:
                self._give_up(f"the coordinator is in a crash loop: {self._of_coordinator.story}", None)
                return
            logger.warning("%s; it is started again", cause)
            await asyncio.sleep(delay)
            try:
                await self._coordinator_back(coordinator)
                return
            except Exception as error:
                cause = str(error)

    async def _coordinator_back(self, coordinator: DPCoordinator) -> None:
        count = len(self.client.ranks) if self._launch.has_client else None
        await in_thread(lambda: coordinator.run_again(count))
        self._watch.add([coordinator.proc])

    def _give_up(self, text: str, life: _Life | None) -> None:
        logger.error("%s", text)
        rank, pid = (None, None) if life is None else (life.rank, life.pid)
        self._failure = EngineDead(text, engine=rank, pid=pid)
        if self._launch.has_client:
            self.client.give_up(self._failure)
        self._failed.set()

    # What is said

    def _died(self, life: _Life, found: ProcessExit) -> str:
        """Note how an engine has died, and return it."""
        lines = self._manager.last_lines(found.name, _SHOWN_LINES) if found.exitcode else []
        last = f"; last of its stderr: {lines[-1]}" if lines else ""
        life.cause = f"{found.describe(life.state)}{last}"
        logger.warning("%s; its restart is number %d", life.cause, life.history.restarts + 1)
        return life.cause

    def _set(self, life: _Life, state: EngineState) -> None:
        if state != life.state:
            life.state = state
            if self._on_change is not None:
                self._loop.call_soon(self._on_change, self._info(life))

    def _info(self, life: _Life) -> EngineInfo:
        return EngineInfo(life.rank, life.pid, life.state, life.history.restarts, life.cause)

    def _first_life(self, process: Child) -> _Life:
        rank = engine_of(ProcessExit(process.name, process.pid, None, managed=True))
        assert rank is not None
        life = _Life(rank, self._restart)
        life.pid, life.state = process.pid, "running"
        return life

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name=f"aioshm-supervises-{what}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._give_up(f"the supervisor has failed: {type(error).__name__}: {error}", None)

    def _open(self) -> CoreEngineLaunch:
        if self._stack is None:
            raise RoleError("a supervisor of engines is used inside `async with`")
        return self._launch
