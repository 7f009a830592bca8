"""Coordinator, engines, handshake and client in one call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from aioshm.arguments import check_int, check_plain, check_seconds, check_type
from aioshm.config import Options
from aioshm.engine.client.client import ClientOptions, EngineClient
from aioshm.engine.dp import DPCoordinator
from aioshm.engine.protocol.addresses import CoreEngine, EngineZmqAddresses, StartupReport, engine_index
from aioshm.engine.ray.actor import EngineActor
from aioshm.engine.ray.manager import CoreEngineActorManager
from aioshm.engine.security.bound_sockets import get_engine_client_zmq_addr
from aioshm.engine.startup.coordinator import EngineStartupCoordinator
from aioshm.engine.startup.front_ends import FrontEnds
from aioshm.engine.startup.options import EngineLayout, ResolvedLayout, StartupOptions
from aioshm.engine.startup.processes import CoreEngineProcManager
from aioshm.errors import EndClosed, EngineDead, RoleError
from aioshm.lifeline.sockets import sweep_leftovers
from aioshm.process.child import Child
from aioshm.process.placement import check_placement
from aioshm.process.restart import Restart
from aioshm.process.stalls import ProgressWatch, Watched
from aioshm.process.watch import WatchedProcess


@dataclass(eq=False, kw_only=True)
class CoreEngineLaunch:
    """The engines and their surroundings, as started by `launch_core_engines`.

    Attributes:
        engine_manager: The engines of this host, or Ray's actors; has no process where all engines are on other hosts.
        coordinator: The data-parallel coordinator, if there is one.
        addresses: The addresses for engines, and for an `EngineClient` in API servers.
        handshake_address: Where engines say HELLO, also engines of other hosts.
        core_engines: The engines that shake hands here.
        watched_processes: Processes that end the startup by their exit, such as API servers; with ``wait=False`` they
            may be set until `wait_until_ready`.
        report: The answers of the engines; None until all are ready.
        front_ends: The clients in API servers, with ``on_engine_death="continue"``.
        startup: The handshake; stays open for engines that come back, with ``on_engine_death="continue"``.
        watch_coordinator: Whether the exit of the coordinator ends the client, too.
        options: The options of the client.
    """

    engine_manager: CoreEngineProcManager | CoreEngineActorManager
    coordinator: DPCoordinator | None
    addresses: EngineZmqAddresses
    handshake_address: str
    core_engines: list[CoreEngine]
    watched_processes: Sequence[WatchedProcess] = ()
    report: StartupReport | None = None
    front_ends: FrontEnds | None = field(default=None, repr=False)
    watch_coordinator: bool = field(default=True, repr=False)
    _client: EngineClient | None = field(default=None, repr=False)
    startup: EngineStartupCoordinator = field(repr=False)
    options: Options = field(repr=False)
    _stalls: ProgressWatch | None = field(default=None, repr=False)
    _lockstep: bool = field(default=False, repr=False)
    _stays_open: bool = field(default=False, repr=False)

    @property
    def processes(self) -> Sequence[Child | EngineActor]:
        """The engines of this launch: processes of this host, or Ray's actors."""
        return self.engine_manager.processes

    @property
    def membership_address(self) -> str | None:
        """Where API servers learn which engines are present, see `ClientOptions`; None: nowhere."""
        if self.front_ends is None:
            return None
        return self.front_ends.address

    @property
    def has_client(self) -> bool:
        """Whether there is a `client`."""
        return self._client is not None

    @property
    def client(self) -> EngineClient:
        """The client of these engines; ready, unless the launch did not wait.

        Raises:
            RoleError: API servers have the clients, or there is no engine.
        """
        if self._client is None:
            raise RoleError(
                "there is no client here: create an EngineClient(launch.addresses, ...) in each API server"
                " (or launch with num_api_servers=0 for a client in this process)"
            )
        return self._client

    @property
    def members(self) -> EngineClient | FrontEnds | None:
        """All clients of the engines as one object: the client here, or the clients in API servers."""
        if self.front_ends is None:
            return self._client
        return self.front_ends

    async def wait_until_ready(self, timeout: float | None = None) -> StartupReport:
        """Wait until every engine is ready, and return their answers; needed after ``wait=False`` only.

        Cancelling this call changes nothing: it may be called again.

        Args:
            timeout: Seconds to wait; None waits for as long as there is progress.

        Raises:
            EngineStartupError: As from `launch_core_engines`.
            EngineDead: An engine was ready, and died before the client noticed it.
            TimeoutError: Not all engines are ready in time. The startup continues, and may be waited for again.
        """
        began = monotonic()
        report = await self.shake_hands(timeout)
        if self._stalls is None:
            self.watch_progress()
        left_s = self.startup.progress_timeout
        if timeout is not None:
            left_s = max(0.001, check_seconds("timeout", timeout) - round(monotonic() - began, 3))
        if self._client is not None:
            await self._client.wait_until_ready(left_s)
        return report

    async def shake_hands(self, timeout: float | None = None) -> StartupReport:
        """Wait until every engine has said READY, as `wait_until_ready`; the client may still wait for them."""
        if self.report is None:
            self.startup.watched_processes = [*self.startup.watched_processes, *self.watched_processes]
            report = await self.startup.wait(timeout)
            if self._client is not None:
                watched = []
                if self.coordinator is not None and self.watch_coordinator:
                    watched.append(self.coordinator.proc)
                self._client.watch(self.engine_manager, watched)
            self.report = report
            if not self._stays_open:
                await self.startup.aclose()
        return self.report

    # Progress

    def watch_progress(
        self,
        restart: Restart | None = None,
        *,
        lockstep: bool = False,
        on_change: Callable[[Watched], object] | None = None,
    ) -> None:
        """Name engines and the coordinator in the log when they make no progress, and inform the clients."""

        def changed(watched: Watched) -> None:
            rank = engine_index(watched.process.name)
            if rank is not None and self.members is not None:
                with suppress(EngineDead, EndClosed):
                    self.members.note_health(rank, watched.health, watched.where)
            if on_change is not None:
                on_change(watched)

        self._lockstep = lockstep
        self._stalls = ProgressWatch(self.options.stall_warning_s, restart, changed)
        if self.coordinator is not None:
            self.watch(self.coordinator.proc)
        for process in self.processes:
            self.watch(process)

    def watch(self, process: Child | EngineActor) -> None:
        """Watch the progress of one more process."""
        if self._stalls is not None and isinstance(process, Child):  # not an actor, on a node of Ray's
            rank = engine_index(process.name)
            name = "the coordinator" if rank is None else f"engine {rank}"
            self._stalls.add(name, process, in_step=self._lockstep and rank is not None)

    def stop_watching_progress(self) -> None:
        """Stop watching for engines that hang, see `watch_progress`. Idempotent."""
        if self._stalls is not None:
            self._stalls.close()


@asynccontextmanager
async def launch_core_engines(
    target_fn: Callable[..., object],
    engine_count: int = 1,
    local_engine_count: int | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_api_servers: int = 0,
    wait: bool = True,
    layout: EngineLayout | None = None,
    client: ClientOptions | None = None,
    startup: StartupOptions | None = None,
) -> AsyncIterator[CoreEngineLaunch]:
    """Start coordinator and engines, shake hands with them, and open a client; a context manager.

        async with launch_core_engines(serve, 2) as launch:
            async for output in launch.client.submit(request):
                ...

    Each engine runs ``target_fn(*args, **kwargs, handshake_address=..., dp_rank=rank, local_dp_rank=rank on its host)``
    in a process of its own, in which it calls `run_engine_core`. Leaving the block stops everything: first the client,
    then the engines, then the coordinator. A failure or a cancellation leaves nothing behind.

    Args:
        target_fn: The target of each engine process; importable there, without side effects.
        engine_count: The number of engines on all hosts.
        local_engine_count: How many of them run on this host, the first ones; None: all. Other programs start the other
            engines on their hosts, with the `handshake_address` of this launch, unless the backend is ``"ray"``.
        args: Positional arguments of the target.
        kwargs: Keyword arguments of the target.
        num_api_servers: How many API servers in other processes have the clients; 0: this process has the client.
        wait: Whether to wait until the engines are ready. False: call `CoreEngineLaunch.wait_until_ready` after the
            start of processes that can start at the same time, such as API servers.
        layout: Where engines run, and the addresses; None: on this host.
        client: Options of the client; ``keys`` and ``secure`` hold for the whole launch.
        startup: Options of the handshake.

    Yields:
        The launch.

    Raises:
        EngineStartupError: A process exited, a handshake message was refused, or there was no progress for too long;
            the text names each culprit, with the last lines of its stderr.
        EngineDead: An engine was ready, and died before the client noticed it.
        OSError: An address cannot be bound.
        TypeError, ValueError: An argument is invalid; the text names it.
        Exception: A process could not be started.
    """
    layout = check_type("layout", layout, EngineLayout) or EngineLayout()
    client = check_type("client", client, ClientOptions) or ClientOptions()
    startup = check_type("startup", startup, StartupOptions) or StartupOptions()
    check_plain("target_fn", target_fn)
    check_int("num_api_servers", num_api_servers, minimum=0)
    if startup.keys is not None or not startup.secure:
        raise ValueError("keys and secure of a launch are set in client=ClientOptions(...), not in startup")
    keys = client.keys
    secure = client.secure and (client.options is None or client.options.secure)
    resolved = ResolvedLayout(engine_count, local_engine_count, layout, startup.parallel_config)
    addresses = resolved.client_addresses(num_api_servers)
    options = {"keys": keys, **(layout.manager_options or {})}
    if layout.placement is not None:
        options["placement"] = layout.placement
    check_placement(options.get("placement"), [engine.index for engine in resolved.core_engines if engine.local])
    continues = client.on_engine_death == "continue"
    async with AsyncExitStack() as stack:
        stack.callback(sweep_leftovers)
        coordinator = None
        coordinator_process = None
        if resolved.coordinator:
            coordinator = await stack.enter_async_context(
                await DPCoordinator.start(engine_count, **resolved.coordinator_options, keys=keys, secure=secure)
            )
            addresses.coordinator_input, addresses.coordinator_output = coordinator.get_engine_socket_addresses()
            addresses.frontend_stats_publish_address = coordinator.get_stats_publish_address()
            coordinator_process = coordinator.proc
        engine_client = None
        if not num_api_servers and resolved.client_engines:
            engine_client = EngineClient(addresses, resolved.client_engines, client)
            await stack.enter_async_context(engine_client)
        front_ends = None
        if num_api_servers and continues:
            where = layout.membership_address or get_engine_client_zmq_addr(True, "")
            ranks = [engine.index for engine in resolved.client_engines]
            front_ends = stack.enter_context(FrontEnds(where, ranks, keys=keys, secure=secure))
        shaking = EngineStartupCoordinator(
            resolved.own_handshake_address,
            resolved.core_engines,
            addresses,
            coord_process=coordinator_process,
            options=replace(startup, remote_headless=not resolved.local_engines_only, keys=keys, secure=secure),
        )
        await stack.enter_async_context(shaking)
        for members in (engine_client, front_ends):
            if members is not None:
                shaking.handshake.pause_order = members.pause_order
                shaking.handshake.serves = members.serves
        arguments = {**(kwargs or {}), **resolved.engine_arguments(shaking.handshake_address)}
        manager: CoreEngineProcManager | CoreEngineActorManager
        if layout.backend == "ray":
            manager = await CoreEngineActorManager.start(
                target_fn, engine_count, resolved.local_engine_count, args=args, **options, **arguments
            )
        else:
            options.setdefault("shutdown_timeout", layout.shutdown_timeout)
            manager = await CoreEngineProcManager.start(
                target_fn, resolved.local_engine_count, layout.start_index, args=args, **options, **arguments
            )
        shaking.proc_manager = await stack.enter_async_context(manager)
        if engine_client is not None:
            stack.push_async_callback(engine_client.aclose)  # first: the client expects no exit of an engine
        launch = CoreEngineLaunch(
            engine_manager=manager,
            coordinator=coordinator,
            addresses=addresses,
            handshake_address=shaking.handshake_address,
            core_engines=resolved.core_engines,
            front_ends=front_ends,
            _client=engine_client,
            startup=shaking,
            options=client.options or Options.from_env(),
            _stays_open=continues,
        )
        stack.callback(launch.stop_watching_progress)
        if wait:
            await launch.wait_until_ready()
        yield launch
