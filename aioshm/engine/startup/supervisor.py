"""Restarts dead engines while the others serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Self

from aioshm.arguments import check_int, check_plain, check_seconds
from aioshm.closing import AsyncClosing, warn_not_closed
from aioshm.config import engine_ready_timeout
from aioshm.engine.client.client import EngineClient
from aioshm.engine.client.options import ClientOptions, Resubmit
from aioshm.engine.startup.front_ends import FrontEnds
from aioshm.engine.startup.launch import CoreEngineLaunch, launch_core_engines
from aioshm.engine.startup.restarting import EngineLife, Restarting, RestartRules
from aioshm.engine.stats import EngineSupervisorStats
from aioshm.errors import EndClosed, EngineDead, RoleError
from aioshm.process.background import notify_soon
from aioshm.process.restart import RankInfo, Restart


class EngineSupervisor(AsyncClosing):
    """Engines, coordinator and client, as `launch_core_engines` starts them, with restarts.

        async with EngineSupervisor(serve, 4, resubmit="unstarted") as supervisor:
            async for output in supervisor.client.submit(request):
                ...
            await supervisor.scale(6)

    A dead engine is restarted and shakes hands while the others serve; its requests fail with `EngineDead`, see
    ``on_engine_death="continue"`` in `ClientOptions`. The coordinator is restarted, too. Other programs restart engines
    of other hosts, which are admitted when they say HELLO. Ray's actors are recreated where there is room. A crash
    loop, see `Restart`, ends everything: the client, and `wait`, raise `EngineDead` with the cause of every death.

    Args:
        target_fn: The target of each engine process.
        engine_count: The number of engines at first.
        restart: When processes are restarted, each by itself.
        resubmit: See `ClientOptions`.
        lockstep: Whether no engine can continue without the others, such as those of mixtures of experts: then one
            death restarts all engines.
        start_timeout: Seconds that a restarted engine may take until it is ready; then it is killed, which counts as a
            death. None: ``AIOSHM_ENGINE_READY_TIMEOUT_S``, or 600.
        on_change: Called on the loop when an engine's state has changed.
        options: The other arguments of `launch_core_engines`, such as ``layout`` and ``client``.

    Raises:
        EngineStartupError: As from `launch_core_engines`, on entering: the first start is tried once.
        TypeError, ValueError: An argument is invalid; the text names it.
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
        self._restarting: Restarting | None = None
        if start_timeout is not None:
            check_seconds("start_timeout", start_timeout)
        self._rules = RestartRules(
            restart=restart or Restart(),
            lockstep=lockstep,
            start_timeout=engine_ready_timeout() if start_timeout is None else start_timeout,
            on_change=None if on_change is None else partial(notify_soon, on_change),
        )
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
        """The launch: addresses, and the managers of processes.

        Raises:
            RoleError: The supervisor is not open.
        """
        return self._open()

    @property
    def engines(self) -> tuple[RankInfo, ...]:
        """The engines of this host, by rank."""
        lives = {} if self._restarting is None else self._restarting.lives
        return tuple(life.info for _, life in sorted(lives.items()))

    def stats(self) -> EngineSupervisorStats:
        """Return the counters of the engines and of their client; from any thread."""
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
            self._restarting = Restarting(self._launch, self._rules)
            stack.push_async_callback(self._restarting.aclose)
            await self._launch.wait_until_ready()
            self._scaling: asyncio.Lock = asyncio.Lock()
            self._stack = stack.pop_all()

    async def wait(self) -> None:
        """Wait until the engines are in a crash loop. Cancelling this changes nothing.

        Raises:
            EngineDead: A crash loop; the text has the cause of every death that counts.
            QueueClosed, RoleError: The supervisor was closed, or is not open.
        """
        restarting = self._supervision()
        await restarting.failed.wait()
        if (failure := restarting.failure) is not None:
            raise EngineDead(*failure.args, engine=failure.engine, pid=failure.pid)
        raise EndClosed("the supervisor of engines was closed")

    join_first = wait  # for `wait_for_completion_or_failure`

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every engine serves, also after deaths; see `EngineClient.wait_until_ready`.

        With API servers: until all connected front ends have all engines.
        """
        await self._members().wait_until_ready(timeout)

    async def aclose(self) -> None:
        """Stop everything, the client first. Idempotent; finishes also when cancelled."""
        self._closed = True
        stack = self._stack
        self._stack = None
        if stack is None:
            return
        await stack.aclose()

    def __del__(self) -> None:
        if self._stack is not None:
            warn_not_closed(self)

    # More engines, or fewer

    async def scale(self, engine_count: int, *, timeout: float | None = None) -> None:
        """Start more engines immediately, or stop the last ones after their requests; return when done.

        Cancelling this leaves started engines, and engines with unfinished requests, as they are.

        Args:
            engine_count: The new number of engines.
            timeout: Seconds that each leaving engine may take to finish; unfinished requests then fail with
                `EngineDead`. None: no limit.

        Raises:
            EngineDead: A crash loop.
            RoleError: The engines are in lockstep, or some are not this process', or other clients have them, or there
                are fewer given placement groups.
            TypeError, ValueError: An argument is invalid.
        """
        check_int("engine_count", engine_count, minimum=1)
        members = self._members()
        if self._rules.lockstep:
            raise RoleError("engines in lockstep cannot be scaled: they need each other")
        restarting = self._supervision()
        lives = restarting.lives
        if len(members.ranks) != len(lives):
            raise RoleError("engines are scaled where all of them are this process'")
        most = self._launch.engine_manager.max_engines
        if most is not None and engine_count > most:
            raise RoleError(
                f"{most} placement groups were given, so there can be no {engine_count} engines: let the manager create"
                " them (needs=), or pass more of them"
            )
        async with self._scaling:
            while len(lives) > engine_count:
                await self._take_out(lives[max(lives)], timeout)
            newcomers = []
            for rank in range(len(lives), engine_count):
                members.add_engine(rank)
                self._tell_coordinator()
                newcomers.append(restarting.add(rank))
            if newcomers:
                await asyncio.gather(*map(asyncio.shield, newcomers))
                await members.wait_until_ready(self._rules.start_timeout)

    def _tell_coordinator(self) -> None:
        if self._launch.coordinator is not None:
            self._launch.coordinator.scale(len(self._members().ranks))

    async def _take_out(self, life: EngineLife, timeout: float | None) -> None:
        restarting = self._supervision()
        before = life.state
        life.enter("stopping")
        try:
            await self._members().remove_engine(life.rank, timeout=timeout)
        except BaseException:
            life.enter(before)
            raise
        self._tell_coordinator()
        await restarting.remove(life.rank)

    def _engine_changed(self, rank: int, error: EngineDead | None) -> None:
        restarting = self._restarting
        if error is not None and restarting is not None and rank not in restarting.lives:
            restarting.expect(rank)

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
