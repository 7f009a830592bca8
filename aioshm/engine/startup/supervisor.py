"""Engines that are started again when they die, while the others serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Self

from aioshm.arguments import check_int, check_plain, check_seconds
from aioshm.closing import AsyncClosing, warn_not_closed
from aioshm.config import engine_ready_timeout
from aioshm.engine.client.client import EngineClient
from aioshm.engine.client.options import ClientOptions, Resubmit
from aioshm.engine.ray.manager import CoreEngineActorManager
from aioshm.engine.startup.front_ends import FrontEnds
from aioshm.engine.startup.launch import CoreEngineLaunch, launch_core_engines
from aioshm.engine.startup.restarting import EngineLife, Restarting
from aioshm.engine.stats import EngineSupervisorStats
from aioshm.errors import EndClosed, EngineDead, RoleError
from aioshm.process.restart import RankInfo, Restart


class EngineSupervisor(AsyncClosing):
    """Engines, coordinator and client, as `launch_core_engines` starts them, and starts again what dies.

        async with EngineSupervisor(serve, 4, resubmit="unstarted") as supervisor:
            async for output in supervisor.client.submit(request):
                ...
            await supervisor.scale(6)

    An engine that dies is started again and shakes hands while the others serve; its requests fail with `EngineDead`,
    see ``on_engine_death="continue"`` of `EngineClient`. So is the coordinator. Engines of other hosts are started
    again there, by others, and are taken back when they say HELLO. Ray's actors are made again where there is room. A
    crash loop, see `Restart`, ends everything: the client raises `EngineDead` with the cause of every death, and so
    does `wait`.

    Args:
        target_fn: What each engine's process runs.
        engine_count: How many engines there are at first.
        restart: When processes are started again, for each one by itself.
        resubmit: See `ClientOptions`.
        lockstep: Whether no engine can go on without the others, as those of mixtures of experts: then all of them are
            started again when one dies.
        start_timeout: Seconds that an engine may take until it is ready, when it is started again; then it is killed,
            which counts as a death. None: ``AIOSHM_ENGINE_READY_TIMEOUT_S``, or 600.
        on_change: Called on the loop when an engine's state has changed.
        options: The other arguments of `launch_core_engines`, such as ``layout`` and ``client``.

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
        on_change: Callable[[RankInfo], object] | None = None,
        **options: Any,
    ) -> None:
        self._stack: AsyncExitStack | None = None
        self._closed = False
        if "wait" in options:
            raise TypeError("wait is the supervisor's own, and cannot be given")
        client = options.pop("client", None) or ClientOptions()
        if client.on_engine_change is not None:
            raise TypeError("on_engine_change is the supervisor's own, and cannot be given")
        self._lives: dict[int, EngineLife] = {}
        self._restarting: Restarting | None = None
        self._restart = restart or Restart()
        self._lockstep = lockstep
        self._start_timeout = (
            engine_ready_timeout() if start_timeout is None else check_seconds("start_timeout", start_timeout)
        )
        self._on_change = on_change
        self._options = {
            **options,
            "client": replace(
                client,
                on_engine_death="continue",
                resubmit=resubmit or client.resubmit,
                on_engine_change=self._engine_changed,
            ),
            "wait": False,
        }
        self._target = check_plain("target_fn", target_fn)
        self._count = check_int("engine_count", engine_count, minimum=1)

    def __repr__(self) -> str:
        if self._stack is None:
            return "<EngineSupervisor, not open>"
        return f"<EngineSupervisor of engines {', '.join(f'{each.rank} {each.state}' for each in self.engines)}>"

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
    def engines(self) -> tuple[RankInfo, ...]:
        """The engines of this host, by rank."""
        return tuple(life.info for _, life in sorted(self._lives.items()))

    def stats(self) -> EngineSupervisorStats:
        """Return what has become of the engines so far, and what their client has done; from any thread."""
        has_client = self._stack is not None and self._launch.has_client
        return EngineSupervisorStats(self.engines, self._launch.client.stats() if has_client else None)

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
        async with AsyncExitStack() as stack:
            self._launch = await stack.enter_async_context(
                launch_core_engines(self._target, self._count, **self._options)
            )
            self._launch.watch_coordinator = False
            if self._launch.has_client:
                self._launch.client.leave_deaths_to_supervisor()
            await self._launch.shake_hands()
            # Before the client waits: an engine that dies now is started again, too.
            self._restarting = Restarting(
                self._launch,
                self._restart,
                lockstep=self._lockstep,
                start_timeout=self._start_timeout,
                on_change=self._on_change,
            )
            stack.push_async_callback(self._restarting.aclose)
            self._lives = self._restarting.lives
            await self._launch.wait_until_ready()
            self._scaling: asyncio.Lock = asyncio.Lock()
            self._stack = stack.pop_all()

    async def wait(self) -> None:
        """Wait until the engines are in a crash loop. Cancelling this changes nothing.

        Raises:
            EngineDead: They are; the text has the cause of every death that counts.
            QueueClosed, RoleError: The supervisor was closed, or is not open.
        """
        restarting = self._supervision()
        await restarting.failed.wait()
        if (failure := restarting.failure) is not None:
            raise EngineDead(*failure.args, engine=failure.engine, pid=failure.pid)
        raise EndClosed("the supervisor of engines was closed")

    async def join_first(self) -> None:
        """Do what `wait` does, for `wait_for_completion_or_failure`."""
        await self.wait()

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every engine serves, also after deaths; see `EngineClient.wait_until_ready`.

        Where API servers have the clients: until each of those that there are now has all engines.
        """
        await self._members().wait_until_ready(timeout)

    async def aclose(self) -> None:
        """Stop everything, the client first. Idempotent; finishes also when it is cancelled."""
        self._closed = True
        stack, self._stack = self._stack, None
        if stack is None:
            return
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
            RoleError: The engines are in lockstep, or not all of them are this process', or other clients than its own
                and those of its API servers have them, or there are fewer placement groups, which were given.
            TypeError, ValueError: An argument makes no sense.
        """
        check_int("engine_count", engine_count, minimum=1)
        members = self._members()
        if self._lockstep:
            raise RoleError("engines in lockstep cannot be scaled: they need each other")
        lives = self._lives
        if len(members.ranks) != len(lives):
            raise RoleError("engines are scaled where all of them are this process'")
        manager = self._launch.engine_manager
        if isinstance(manager, CoreEngineActorManager):
            manager.check_engine_count(engine_count)
        async with self._scaling:
            while len(lives) > engine_count:
                await self._take_out(lives[max(lives)], timeout)
            newcomers = []
            for rank in range(len(lives), engine_count):
                members.add_engine(rank)
                self._tell_coordinator()
                newcomers.append(self._supervision().add(rank))
            if newcomers:
                await asyncio.gather(*map(asyncio.shield, newcomers))
                await members.wait_until_ready(self._start_timeout)

    def _tell_coordinator(self) -> None:
        if self._launch.coordinator is not None:
            self._launch.coordinator.scale(len(self._members().ranks))

    async def _take_out(self, life: EngineLife, timeout: float | None) -> None:
        restarting = self._supervision()
        before = life.state
        restarting.set_state(life, "stopping")
        try:
            await self._members().remove_engine(life.rank, timeout=timeout)
        except BaseException:
            restarting.set_state(life, before)
            raise
        self._tell_coordinator()
        await restarting.remove(life.rank)

    def _engine_changed(self, rank: int, error: EngineDead | None) -> None:
        if error is not None and self._restarting is not None and rank not in self._lives:
            self._restarting.expect(rank)

    def _members(self) -> EngineClient | FrontEnds:
        members = self._open().members
        if members is None:
            raise RoleError("no client of these engines is told which ones there are")
        return members

    def _supervision(self) -> Restarting:
        self._open()
        assert self._restarting is not None
        return self._restarting

    def _open(self) -> CoreEngineLaunch:
        if self._stack is None:
            raise RoleError("a supervisor of engines is used inside `async with`")
        return self._launch
