"""Restarts dead engines while the remaining engines serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Self

from aioshm.arguments import check_int, check_limit, check_plain, check_seconds, check_type
from aioshm.closing import AsyncClosing, warn_not_closed
from aioshm.config import engine_ready_timeout
from aioshm.engine.client.client import ClientOptions, EngineClient, Resubmit
from aioshm.engine.protocol.messages import PauseMode
from aioshm.engine.startup.front_ends import FrontEnds
from aioshm.engine.startup.launch import CoreEngineLaunch, launch_core_engines
from aioshm.engine.startup.options import EngineLayout
from aioshm.engine.startup.restarts import EngineLife, EngineRestarts, RestartRules
from aioshm.engine.stats import EngineSupervisorStats
from aioshm.errors import EndClosed, EngineDead, RoleError
from aioshm.process.background import notify_soon
from aioshm.process.placement import check_placement
from aioshm.process.restart import RankInfo, Restart


class EngineSupervisor(AsyncClosing):
    """Engines, coordinator and client, as `launch_core_engines` starts them, with restarts.

        async with EngineSupervisor(serve, 4, resubmit="unstarted") as supervisor:
            async for output in supervisor.client.submit(request):
                ...
            await supervisor.scale(6)

    A dead engine restarts and shakes hands while the remaining ones serve; its requests fail with `EngineDead`, see
    ``on_engine_death="continue"`` in `ClientOptions`. The coordinator is restarted, too. Other programs restart engines
    of other hosts; the supervisor admits them when they say HELLO. Ray's actors are recreated where there is room. A
    crash loop, see `Restart`, ends everything: the client, and `wait`, raise `EngineDead` with the cause of every
    death.

    An engine or a coordinator without progress for ``stall_warning_s`` (see `Options`) is named in the log with its
    line of Python, `engines` has its state, and other engines get the new requests. ``Restart(hang_s=)`` kills and
    replaces it. Of engines in lockstep, which wait for each other, one counts as the cause: a stopped one, else one
    outside of ``has_unfinished_dp``, and of these the one whose step began first.

    Args:
        target_fn: The target of each engine process.
        engine_count: The number of engines at first.
        restart: When processes are restarted, each by itself.
        resubmit: See `ClientOptions`; not with API servers, which have the clients.
        lockstep: Whether no engine can continue without all others, such as those of mixtures of experts: then one
            death restarts all engines.
        start_timeout: Seconds that a restarted engine may take until it is ready; then it is killed, which counts as a
            death. None: ``AIOSHM_ENGINE_READY_TIMEOUT_S``, or 600.
        on_change: Called on the loop when an engine's state has changed.
        options: Further arguments of `launch_core_engines`, such as ``layout`` and ``client``.

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
        self._opening: asyncio.Task[None] | None = None
        self._closed = False
        self._closing = asyncio.Lock()
        check_type("restart", restart, Restart)
        if resubmit is not None and options.get("num_api_servers"):
            raise ValueError("resubmit must be an option of the clients in the API servers, not of their supervisor")
        if "wait" in options:
            raise TypeError("wait is the supervisor's own, and cannot be given")
        client = check_type("client", options.pop("client", None), ClientOptions) or ClientOptions()
        layout = check_type("layout", options.get("layout"), EngineLayout) or EngineLayout()
        if client.on_engine_change is not None:
            raise TypeError("on_engine_change is the supervisor's own, and cannot be given")
        if start_timeout is None:
            start_timeout = engine_ready_timeout()
        self._rules = RestartRules(
            restart=restart or Restart(),
            lockstep=lockstep,
            start_timeout=check_seconds("start_timeout", start_timeout),
            shutdown_timeout=layout.shutdown_timeout,
            on_change=None if on_change is None else partial(notify_soon, on_change),
        )
        client = replace(
            client,
            on_engine_death="continue",
            resubmit=resubmit or client.resubmit,
            on_engine_change=self._engine_changed,
        )
        self._options = {**options, "client": client, "wait": False}
        self._target = check_plain("target_fn", target_fn)
        self._count = check_int("engine_count", engine_count, minimum=1)
        self._restarts: EngineRestarts | None = None

    @property
    def launch(self) -> CoreEngineLaunch:
        """The launch: addresses, and the managers of processes.

        Raises:
            RoleError: The supervisor is not open.
        """
        if self._stack is None:
            raise RoleError("a supervisor of engines is used inside `async with`")
        return self._launch

    @property
    def client(self) -> EngineClient:
        """The client of the engines.

        Raises:
            RoleError: The supervisor is not open, or API servers have the clients.
        """
        return self.launch.client

    @property
    def engines(self) -> tuple[RankInfo, ...]:
        """The engines of this host, by rank."""
        if self._restarts is None:
            return ()
        return tuple(life.info for _, life in sorted(self._restarts.lives.items()))

    def stats(self) -> EngineSupervisorStats:
        """Return the counters of the engines and of their client; from any thread."""
        if self._stack is None or not self._launch.has_client:
            return EngineSupervisorStats(self.engines, None)
        return EngineSupervisorStats(self.engines, self._launch.client.stats())

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def open(self) -> None:
        """Start everything, and wait until it is ready; ``async with`` does it.

        Raises:
            EngineStartupError: As from `launch_core_engines`.
            QueueClosed: It was closed meanwhile.
            RoleError: It was opened or closed before.
        """
        if self._opening is not None or self._closed:
            raise RoleError("a supervisor of engines can be entered once")
        self._opening = asyncio.create_task(self._open_all(), name="aioshm-opens-a-supervisor")  # `aclose` cancels it
        try:
            await self._opening
        except asyncio.CancelledError:
            if self._closed:
                raise EndClosed("the supervisor of engines was closed") from None
            await self.aclose()  # everything may just have been ready
            raise

    async def _open_all(self) -> None:
        async with AsyncExitStack() as stack:
            launch = launch_core_engines(self._target, self._count, **self._options)
            self._launch = await stack.enter_async_context(launch)
            self._launch.watch_coordinator = False
            if self._launch.has_client:
                self._launch.client.leave_deaths_to_supervisor()
            await self._launch.shake_hands()
            # Before the client waits: an engine that dies now is started again, too.
            self._restarts = EngineRestarts(self._launch, self._rules)
            stack.push_async_callback(self._restarts.aclose)
            await self._launch.wait_until_ready()
            self._scaling: asyncio.Lock = asyncio.Lock()
            self._stack = stack.pop_all()

    async def wait(self) -> None:
        """Wait until the engines are in a crash loop. Cancelling this changes nothing.

        Raises:
            EngineDead: A crash loop; the text has the cause of every death that counts.
            QueueClosed, RoleError: The supervisor was closed, or is not open.
        """
        restarts = self._open()
        await restarts.failed.wait()
        restarts.check()

    join_first = wait  # for `wait_for_completion_or_failure`

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every engine serves, also after deaths; see `EngineClient.wait_until_ready`.

        With API servers: until all connected front ends have all engines.
        """
        await self._members(timeout).wait_until_ready(timeout)

    async def aclose(self) -> None:
        """Stop everything, the client first. Idempotent; finishes also when cancelled."""
        self._closed = True
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait([self._opening])
        stack = self._stack
        self._stack = None
        async with self._closing:
            if stack is not None:
                await stack.aclose()

    def __del__(self) -> None:
        if getattr(self, "_stack", None) is not None:
            warn_not_closed(self)

    async def restart(self, index: int, *, timeout: float | None = None) -> None:
        """Replace the process of an engine, which may hang; return when its replacement and all other engines serve.

        A running engine gets SIGTERM, and is killed ``EngineLayout.shutdown_timeout`` later; one without progress is
        killed immediately. Its requests fail or move, as after a death. Nothing counts for a crash loop. While a
        replacement is under way, this waits for that one. Engines in lockstep are all restarted. Cancelling this
        changes nothing, once it has begun.

        Args:
            index: The rank of an engine of this host.
            timeout: Seconds to wait; None: no limit. The restart continues after it.

        Raises:
            EngineDead: A crash loop: no replacement could be started.
            QueueClosed: The supervisor was closed.
            RoleError: The engine is being stopped, or runs on another host, or the supervisor is not open.
            TimeoutError: The replacement, or another engine, does not serve yet; the text has that engine's state.
            TypeError, ValueError: There is no such engine, or an argument is invalid.
        """
        check_int("index", index, minimum=0)
        check_limit("timeout", timeout)
        restarts = self._open()
        members = self.launch.members
        life = restarts.lives.get(index)
        if life is None:
            if members is not None and index in members.ranks:
                raise RoleError(f"engine {index} runs on another host: restart it there")
            raise ValueError(f"index must be that of one of the engines {sorted(restarts.lives)}, not {index}")
        if life.state == "stopping" and not life.unit.ends_by_hand:
            raise RoleError(f"engine {index} is being stopped")
        try:
            async with asyncio.timeout(timeout):
                if restarts.failure is None:
                    await restarts.restart(life)
                if restarts.lives.get(index) is not life:
                    raise RoleError(f"engine {index} was stopped by scale()")
                if restarts.failure is None and members is not None:
                    await members.wait_until_ready()
        except TimeoutError:
            late = next((each for each in (life, *restarts.lives.values()) if not each.is_alive), life)
            raise TimeoutError(f"engine {late.rank} does not serve after {timeout} s: it is {late.state}") from None
        restarts.check()

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
            QueueClosed: The supervisor was closed.
            RoleError: The engines are in lockstep, or some are not this process', or other clients have them, or there
                are fewer given placement groups.
            TypeError, ValueError: An argument is invalid, or the placement fails for a new engine.
        """
        check_int("engine_count", engine_count, minimum=1)
        restarts = self._open()
        members = self._members(timeout)
        lives = restarts.lives
        if self._rules.lockstep:
            raise RoleError("engines in lockstep cannot be scaled: they need each other")
        if len(self._launch.startup.handshake.engines) != len(lives):
            raise RoleError("engines are scaled where all of them are this process'")
        most = self._launch.engine_manager.max_engines
        if most is not None and engine_count > most:
            raise RoleError(
                f"{most} placement groups were given, so there can be no {engine_count} engines: let the manager create"
                " them (needs=), or pass more of them"
            )
        check_placement(self._launch.engine_manager.placement, range(len(lives), engine_count))
        async with self._scaling:
            restarts.check()
            while len(lives) > engine_count:
                await self._remove_engine(restarts, lives[max(lives)], timeout)
            starting = []
            for rank in range(len(lives), engine_count):
                members.add_engine(rank)
                self._scale_coordinator()
                starting.append(restarts.add(rank))
            if starting:
                await asyncio.wait(starting)
                restarts.check()
                await members.wait_until_ready(self._rules.start_timeout)

    # The pause

    @property
    def paused(self) -> PauseMode | None:
        """The mode of the pause, see `EngineClient.paused`."""
        return self._members().paused

    async def pause(self, mode: PauseMode = "finish", timeout: float | None = None) -> None:
        """Pause all engines, for all front ends; see `EngineClient.pause`.

        With API servers their clients pause the engines: this waits for one that is connected.
        """
        await self._members(timeout).pause(mode, timeout)

    async def resume(self) -> None:
        """End the pause, see `EngineClient.resume`."""
        await self._members().resume()

    def _scale_coordinator(self) -> None:
        if self._launch.coordinator is not None:
            self._launch.coordinator.scale(len(self._members().ranks))

    async def _remove_engine(self, restarts: EngineRestarts, life: EngineLife, timeout: float | None) -> None:
        before = life.state
        was_alive = life.is_alive
        life.enter("stopping")
        try:
            await self._members().remove_engine(life.rank, timeout=timeout)
        except BaseException:
            if life.state == "stopping":  # else it has died, or has become ready
                life.enter(*(life.health if was_alive else (before,)))
            raise
        self._scale_coordinator()
        await restarts.remove(life.rank)

    def _engine_changed(self, rank: int, error: EngineDead | None) -> None:
        """Admit the replacement of a dead engine of another host, which is restarted there."""
        if error is not None and self._restarts is not None:
            self._launch.startup.retry()

    def _members(self, timeout: float | None = None) -> EngineClient | FrontEnds:
        check_limit("timeout", timeout)
        members = self.launch.members
        if members is None:
            raise RoleError("there is no engine here, and no client or front end of engines")
        return members

    def _open(self) -> EngineRestarts:
        if self._stack is None or self._restarts is None:
            raise RoleError("a supervisor of engines is used inside `async with`")
        return self._restarts
