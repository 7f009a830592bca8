"""A startup in one call: with everything around it, or of engines that another program has started."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from aioshm.arguments import check_int, check_plain
from aioshm.config import Options, engine_ready_timeout
from aioshm.engine.client.client import EngineClient
from aioshm.engine.client.link import OnEngineChange, OnEngineDeath, Resubmit
from aioshm.engine.dp.coordinator import DPCoordinator
from aioshm.engine.endpoints import get_engine_client_zmq_addr
from aioshm.engine.protocol.addresses import CoreEngine, EngineZmqAddresses
from aioshm.engine.protocol.progress import StartupProgress, StartupReport
from aioshm.engine.ray.manager import CoreEngineActorManager
from aioshm.engine.security.keys import EngineKeys
from aioshm.engine.startup.coordinator import EngineStartupCoordinator
from aioshm.engine.startup.front_ends import FrontEnds
from aioshm.engine.startup.layout import Layout
from aioshm.engine.startup.processes import CoreEngineProcManager
from aioshm.errors import RoleError
from aioshm.lifeline.address import sweep_leftovers
from aioshm.process.child import Child
from aioshm.process.stopping import SHUTDOWN_TIMEOUT_S
from aioshm.process.watch import WatchedManager, WatchedProcess
from aioshm.zeromq.sockets import Socket

Backend = Literal["mp", "ray"]


@dataclass(eq=False)
class CoreEngineLaunch:
    """What `launch_core_engines` has started.

    Attributes:
        engine_manager: The engines of this host, or Ray's actors; has no process where all engines are on other hosts.
        coordinator: The data-parallel coordinator, if there is one.
        addresses: What engines are told, and what API servers in other processes need for an `EngineClient`.
        handshake_address: Where engines say HELLO, those of other hosts, too.
        core_engines: The engines that shake hands here.
        watched_processes: Processes without which there is nothing to start for, such as API servers; with
            ``wait=False`` they may be set until `wait_until_ready`.
        report: What the engines have said; None until they are ready.
        watch_coordinator: Whether the client takes the exit of the coordinator for the end of everything.
    """

    engine_manager: CoreEngineProcManager | CoreEngineActorManager
    coordinator: DPCoordinator | None
    addresses: EngineZmqAddresses
    handshake_address: str
    core_engines: list[CoreEngine]
    watched_processes: Sequence[WatchedProcess] = ()
    report: StartupReport | None = None
    _client: EngineClient | None = field(default=None, repr=False)
    _startup: EngineStartupCoordinator | None = field(default=None, repr=False)
    _cache_config: Any = field(default=None, repr=False)
    _progress_timeout: float = 0.0
    _stays_open: bool = False
    front_ends: FrontEnds | None = field(default=None, repr=False)
    watch_coordinator: bool = field(default=True, repr=False)

    @property
    def processes(self) -> list[Child]:
        """The processes of this host's engines; of Ray's actors, the manager has to be asked."""
        manager = self.engine_manager
        return manager.processes if isinstance(manager, CoreEngineProcManager) else []

    @property
    def membership_address(self) -> str | None:
        """Where API servers are told which engines there are, see `EngineClient`; None: they are not told."""
        return None if self.front_ends is None else self.front_ends.address

    @property
    def has_client(self) -> bool:
        """Whether there is a `client`."""
        return self._client is not None

    @property
    def client(self) -> EngineClient:
        """The client of these engines; ready, unless they were not waited for.

        Raises:
            RoleError: API servers have the clients, or there is no engine to have one for.
        """
        if self._client is None:
            raise RoleError(
                "there is no client here: make an EngineClient(launch.addresses, ...) in each API server"
                " (launch with num_api_servers=0 to have one in this process)"
            )
        return self._client

    @property
    def members(self) -> EngineClient | FrontEnds | None:
        """The clients of these engines, as one: the one of this process, or those of API servers that are told."""
        return self._client if self.front_ends is None else self.front_ends

    async def wait_until_ready(self, timeout: float | None = None) -> StartupReport:
        """Wait until every engine is ready, and return what they said; needed after ``wait=False`` only.

        Cancelling this call changes nothing: it may be called again.

        Args:
            timeout: Seconds to wait; None waits for as long as there is progress.

        Raises:
            EngineStartupError: As from `launch_core_engines`.
            EngineDead: An engine was ready, and then gone before the client had heard of it.
            TimeoutError: They are not ready in time. They go on, and it may be waited for them again.
        """
        report = await self.shake_hands(timeout)
        if self._client is not None:
            await self._client.wait_until_ready(self._progress_timeout if timeout is None else timeout)
        return report

    async def shake_hands(self, timeout: float | None = None) -> StartupReport:
        """Wait until every engine has said READY, as `wait_until_ready`; the client may still wait for them."""
        assert self._startup is not None
        if self.report is None:
            self._startup.watch_also(self.watched_processes)
            report = await self._startup.wait(timeout)
            coordinator = self.coordinator if self.watch_coordinator else None
            coordinators = [coordinator.proc] if coordinator is not None else []
            if self._client is not None:
                self._client.watch(self.engine_manager, coordinators)
            _add_gpu_blocks(report, self._cache_config)
            self.report = report
            if not self._stays_open:
                await self._startup.aclose()
        return self.report

    def stay_open(self, on_ready: Callable[[int], object]) -> EngineStartupCoordinator:
        """Shake hands with engines that come back, see `EngineStartupCoordinator.stay_open`.

        Raises:
            RoleError: Not all engines were ready, or they were not launched with ``on_engine_death="continue"``.
        """
        if self._startup is None or not self._stays_open:
            raise RoleError('engines may come back if they are launched with on_engine_death="continue"')
        return self._startup.stay_open(on_ready)


@asynccontextmanager
async def launch_core_engines(
    target_fn: Callable[..., object],
    engine_count: int = 1,
    local_engine_count: int | None = None,
    *,
    # What engines are told
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    parallel_config: object = None,
    parallel_config_hash: object = None,
    # Where they run
    backend: Backend = "mp",
    manager_options: Mapping[str, Any] | None = None,
    host: str | None = None,
    handshake_address: str | None = None,
    addresses: EngineZmqAddresses | None = None,
    start_index: int = 0,
    local_engines_only: bool | None = None,
    # Who is between them and the requests
    coordinator: bool | None = None,
    enable_wave_coordination: bool = True,
    num_api_servers: int = 0,
    membership_address: str | None = None,
    request_type: type[Any] | None = None,
    output_type: Any = None,
    options: Options | None = None,
    keys: EngineKeys | None = None,
    secure: bool = True,
    on_engine_death: OnEngineDeath = "fail",
    resubmit: Resubmit | None = None,
    on_engine_change: OnEngineChange | None = None,
    # How they are waited for
    wait: bool = True,
    watched_processes: Iterable[WatchedProcess] = (),
    progress_timeout: float | None = None,
    shutdown_timeout: float = SHUTDOWN_TIMEOUT_S,
    on_progress: Callable[[StartupProgress], object] | None = None,
    cache_config: Any = None,
) -> AsyncIterator[CoreEngineLaunch]:
    """Start coordinator and engines, shake hands with them, and have a client ready; a context manager.

        async with launch_core_engines(serve, 2) as launch:
            async for output in launch.client.submit(request):
                ...

    Each engine runs ``target_fn(*args, **kwargs, handshake_address=..., dp_rank=rank, local_dp_rank=rank on its host)``
    in a process of its own, in which it calls `run_engine_core`. When the block is left everything is stopped: first
    the client, then the engines, then the coordinator. Whatever fails, and if this is cancelled, nothing is left.

    Args:
        target_fn: What each engine's process runs; importable in it, without side effects.
        engine_count: How many engines there are in all.
        local_engine_count: How many of them run on this host, the first ones; None: all. The others are started on
            their hosts by others, who tell them `handshake_address`, unless ``backend`` is ``"ray"``.
        args: For the target.
        kwargs: For the target.
        parallel_config: See `EngineStartupCoordinator`.
        parallel_config_hash: See `EngineStartupCoordinator`.
        backend: ``"mp"``, processes of this host, or ``"ray"``, actors, which are also told ``local_client``.
        manager_options: For `CoreEngineProcManager` or `CoreEngineActorManager`.
        host: This host's address, for engines on other hosts; ``"*"`` binds all of them; None: the one that its packets
            to others come from.
        handshake_address: Where engines say HELLO; None: at a socket file, or with engines on other hosts at a port of
            ``host``. With ``start_index`` it is the head node's.
        addresses: Where this process, or its API servers, meet the engines; None: chosen in the same way.
        start_index: The rank of the first engine of this host, if its head node is another one (hybrid and external
            load balancing): the engines shake hands there and here.
        local_engines_only: Whether engines on other hosts have front ends of their own, so that the client here is only
            for those of this host; None: as ``parallel_config`` says.
        coordinator: Whether to start a coordinator; None: if there is more than one engine, and this is the head node.
        enable_wave_coordination: See `DPCoordinator`.
        num_api_servers: How many API servers in other processes have the clients; 0: this process has the client.
        membership_address: Where they are told which engines there are, with ``on_engine_death="continue"``; None: at a
            socket file.
        request_type: See `EngineClient`.
        output_type: See `EngineClient`.
        options: See `EngineClient`.
        keys: Who may connect over TCP, and as whom; None: those of this process. Engines on other hosts need theirs.
        secure: Whether connections over TCP are encrypted, see `EngineClient`.
        on_engine_death: See `EngineClient`. With ``"continue"`` engines may come back, see
            `CoreEngineLaunch.stay_open`.
        resubmit: See `EngineClient`.
        on_engine_change: See `EngineClient`.
        wait: Whether to wait until the engines are ready. Otherwise `CoreEngineLaunch.wait_until_ready` does it, after
            what can be started at the same time, such as API servers.
        watched_processes: Processes without which there is nothing to start for.
        progress_timeout: See `EngineStartupCoordinator`.
        shutdown_timeout: Seconds that engines may take to exit when asked to.
        on_progress: See `EngineStartupCoordinator`.
        cache_config: See `wait_for_engine_startup`.

    Yields:
        What was started.

    Raises:
        EngineStartupError: A process exited, a handshake message was refused, or nothing has moved for too long; the
            text names each culprit, with the last lines of its stderr.
        EngineDead: An engine was ready, and then gone before the client had heard of it.
        OSError: An address cannot be bound.
        TypeError, ValueError: An argument makes no sense; the text names it.
        Exception: A process could not be started.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be 'mp' or 'ray', not {backend!r}")
    check_plain("target_fn", target_fn)
    check_int("num_api_servers", num_api_servers, minimum=0)
    secure = secure and (options is None or options.secure)
    layout = Layout(
        engine_count,
        local_engine_count,
        start_index=start_index,
        local_engines_only=local_engines_only,
        parallel_config=parallel_config,
        host=host,
        handshake_address=handshake_address,
        coordinator=coordinator,
    )
    if addresses is None:
        addresses = layout.client_addresses(num_api_servers)
    elif num_api_servers not in (0, len(addresses.inputs)):
        raise ValueError(f"addresses must be one for each of {num_api_servers} API servers, not {addresses.inputs}")
    async with AsyncExitStack() as stack:
        stack.callback(sweep_leftovers)
        coordination = None
        if layout.coordinator:
            coordination = await stack.enter_async_context(
                await DPCoordinator.start(
                    engine_count,
                    **layout.coordinator_options,
                    enable_wave_coordination=enable_wave_coordination,
                    keys=keys,
                    secure=secure,
                )
            )
            addresses.coordinator_input, addresses.coordinator_output = coordination.get_engine_socket_addresses()
            addresses.frontend_stats_publish_address = coordination.get_stats_publish_address()
        client = None
        if not num_api_servers and layout.client_engines:
            client = EngineClient(
                addresses,
                layout.client_engines,
                request_type=request_type,
                output_type=output_type,
                options=options,
                keys=keys,
                secure=secure,
                on_engine_death=on_engine_death,
                resubmit=resubmit,
                on_engine_change=on_engine_change,
            )
            await stack.enter_async_context(client)
        front_ends = None
        if num_api_servers and on_engine_death == "continue":
            where = membership_address or get_engine_client_zmq_addr(True, "")
            ranks = [engine.index for engine in layout.client_engines]
            front_ends = stack.enter_context(FrontEnds(where, ranks, keys=keys, secure=secure))
        startup = EngineStartupCoordinator(
            layout.own_handshake_address,
            layout.core_engines,
            addresses,
            parallel_config=parallel_config,
            coord_process=coordination.proc if coordination is not None else None,
            progress_timeout=progress_timeout,
            parallel_config_hash=parallel_config_hash,
            remote_headless=not layout.local_engines_only,
            on_progress=on_progress,
            keys=keys,
            secure=secure,
        )
        await stack.enter_async_context(startup)
        told = {**(kwargs or {}), **layout.told_engines(startup.handshake_address)}
        more = {"keys": keys, **(manager_options or {})}
        manager: CoreEngineProcManager | CoreEngineActorManager
        if backend == "ray":
            manager = await CoreEngineActorManager.start(
                target_fn, engine_count, layout.local_engine_count, args=args, **more, **told
            )
        else:
            more.setdefault("shutdown_timeout", shutdown_timeout)
            manager = await CoreEngineProcManager.start(
                target_fn, layout.local_engine_count, start_index, args=args, **more, **told
            )
        startup.proc_manager = await stack.enter_async_context(manager)
        if client is not None:
            stack.push_async_callback(client.aclose)  # first of all: that the engines then exit is no surprise
        launch = CoreEngineLaunch(
            manager,
            coordination,
            addresses,
            startup.handshake_address,
            layout.core_engines,
            tuple(watched_processes),
            None,
            client,
            startup,
            cache_config,
            engine_ready_timeout() if progress_timeout is None else progress_timeout,
            on_engine_death == "continue",
            front_ends,
        )
        if wait:
            await launch.wait_until_ready()
        yield launch


async def wait_for_engine_startup(
    handshake_address_or_socket: str | Socket,
    addresses: EngineZmqAddresses,
    core_engines: Iterable[CoreEngine],
    parallel_config: object,
    cache_config: Any = None,
    proc_manager: WatchedManager | None = None,
    coord_process: WatchedProcess | None = None,
    **options: Any,
) -> StartupReport:
    """Wait until every engine is ready, and return what they said; `EngineStartupCoordinator` in one call.

    Cancelling this stops the engines, as does whatever it raises.

    Args:
        handshake_address_or_socket: See `EngineStartupCoordinator`, as for everything else.
        addresses: What engines are told.
        core_engines: The engines.
        parallel_config: What engines are told of their parallel configuration.
        cache_config: Its ``num_gpu_blocks`` grows by what the engines have in all, if they say.
        proc_manager: What has started the local engines.
        coord_process: The process of the data-parallel coordinator.
        options: Every other argument of `EngineStartupCoordinator`, such as ``watched_processes`` and ``keys``.

    Raises:
        HandshakeError: A message was refused.
        EngineStartupError: A process exited, or nothing has moved for too long.
        OSError: The address cannot be bound.
    """
    async with EngineStartupCoordinator(
        handshake_address_or_socket,
        core_engines,
        addresses,
        parallel_config=parallel_config,
        proc_manager=proc_manager,
        coord_process=coord_process,
        **options,
    ) as startup:
        report = await startup.wait()
    _add_gpu_blocks(report, cache_config)
    return report


def _add_gpu_blocks(report: StartupReport, cache_config: Any) -> None:
    """Add to the ``num_gpu_blocks`` of a cache configuration, if there is one, what engines have, if they say."""
    said = any(each.ready.get("num_gpu_blocks") is not None for each in report.engines.values())
    if cache_config is not None and said:
        cache_config.num_gpu_blocks = (getattr(cache_config, "num_gpu_blocks", None) or 0) + report.num_gpu_blocks
