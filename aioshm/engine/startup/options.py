"""The options of a launch: of its handshake, and where engines run and meet front ends. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from aioshm.arguments import check_int, check_limit, check_type
from aioshm.engine.protocol.addresses import CoreEngine, EngineZmqAddresses, StartupProgress, balanced_outside, identity
from aioshm.engine.security.bound_sockets import check_handshake_address, get_engine_client_zmq_addr
from aioshm.engine.security.keys import EngineKeys
from aioshm.process.placement import Placement, check_placement
from aioshm.process.stopping import SHUTDOWN_TIMEOUT_S
from aioshm.process.watch import WatchedProcess
from aioshm.zeromq.hosts import own_address

Backend: TypeAlias = Literal["mp", "ray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """Where the engines of `launch_core_engines` run, and where they meet front ends and the coordinator.

    Attributes:
        backend: ``"mp"``: processes of this host. ``"ray"``: actors, which also get ``local_client``.
        manager_options: More arguments of `CoreEngineProcManager` or `CoreEngineActorManager`.
        start_index: Rank of the first engine of this host, if the head node is another host (hybrid and external load
            balancing). The engines shake hands with the head node and with this host.
        local_engines_only: Whether engines on other hosts have front ends of their own, so that the client here serves
            the engines of this host only; None: as ``parallel_config`` says.
        shutdown_timeout: Seconds that engines may take to exit.
        placement: Environment, CPUs and NUMA node of each engine, by its rank; see `Placement`. Ray's actors take the
            environment only.
        host: Address of this host, for engines on other hosts; ``"*"`` binds all addresses; None: the source address
            of packets to other hosts.
        handshake_address: Where engines say HELLO; None: a socket file, or with engines on other hosts a port of
            ``host``. With ``start_index``: the address of the head node.
        addresses: Where this process, or its API servers, meet the engines; None: chosen in the same way.
        membership_address: Where API servers learn which engines are present, with ``on_engine_death="continue"``;
            None: a socket file.
        coordinator: Whether to start a coordinator; None: with several engines, on the head node.
        enable_wave_coordination: See `DPCoordinator`.

    Raises:
        TypeError: ``placement`` is no `Placement`.
        ValueError: There is no such backend.
    """

    # Engines
    backend: Backend = "mp"
    manager_options: Mapping[str, Any] | None = None
    start_index: int = 0
    local_engines_only: bool | None = None
    shutdown_timeout: float = SHUTDOWN_TIMEOUT_S
    placement: Placement | None = None
    # Addresses
    host: str | None = None
    handshake_address: str | None = None
    addresses: EngineZmqAddresses | None = None
    membership_address: str | None = None
    # Coordinator
    coordinator: bool | None = None
    enable_wave_coordination: bool = True

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise ValueError(f"backend must be 'mp' or 'ray', not {self.backend!r}")
        check_placement(self.placement)
        check_type("addresses", self.addresses, EngineZmqAddresses)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupOptions:
    """The options of an `EngineStartupCoordinator`.

    Attributes:
        parallel_config: Changes to the parallel configuration of engines: a mapping, sent as it is, or an object with
            vLLM's attributes. Its ``data_parallel_hybrid_lb`` and ``data_parallel_external_lb`` say whether engines on
            other hosts have front ends of their own.
        parallel_config_hash: The hash that engines must report, if they report one; None: all report the same.
        remote_headless: Whether engines on other hosts must be headless; None: as ``parallel_config`` says.
        cache_config: Its ``num_gpu_blocks`` grows by the blocks of all engines, if they report them.
        watched_processes: Other processes whose exit ends the startup, such as front ends. They are not stopped.
        progress_timeout: Seconds without progress (a HELLO or a READY) after which the startup has failed; None:
            ``AIOSHM_ENGINE_READY_TIMEOUT_S``, or 600.
        on_progress: Called on the loop when an engine has advanced, and with reminders.
        keys: The keys of the deployment, for TCP; None: the keys of this process.
        secure: Whether TCP connections are encrypted and admit holders of keys only; engines need the same setting.
            False for engines without keys, such as vLLM's.

    Raises:
        TypeError, ValueError: A value is invalid; the text names it.
    """

    # Parallel configuration
    parallel_config: object = None
    parallel_config_hash: object = None
    remote_headless: bool | None = None
    cache_config: Any = None
    # Waiting
    watched_processes: Iterable[WatchedProcess] = ()
    progress_timeout: float | None = None
    on_progress: Callable[[StartupProgress], object] | None = None
    # Security
    keys: EngineKeys | None = None
    secure: bool = True

    def __post_init__(self) -> None:
        check_limit("progress_timeout", self.progress_timeout)


class ResolvedLayout:
    """An `EngineLayout` with every default decided."""

    def __init__(
        self, engine_count: int, local_engine_count: int | None, layout: EngineLayout, parallel_config: object
    ) -> None:
        check_int("engine_count", engine_count, minimum=1)
        identity(engine_count - 1)
        if local_engine_count is None:
            local_engine_count = engine_count
        check_int("local_engine_count", local_engine_count, minimum=0)
        start_index = check_int("start_index", layout.start_index, minimum=0)
        if start_index + local_engine_count > engine_count:
            first = f" from rank {start_index} on" if start_index else ""
            raise ValueError(
                f"local_engine_count must fit engine_count, {engine_count}{first}, not {local_engine_count}"
            )
        self._layout = layout
        self._at_head = start_index == 0
        if layout.handshake_address is not None:
            check_handshake_address(layout.handshake_address)
        if layout.local_engines_only is None:
            self.local_engines_only: bool = balanced_outside(parallel_config)
        else:
            self.local_engines_only = layout.local_engines_only
        if not self._at_head:
            if layout.handshake_address is None:
                raise ValueError(f"handshake_address must be the head node's with start_index {start_index}, not None")
            if layout.coordinator:
                raise ValueError(f"coordinator must be the head node's with start_index {start_index}, not True")
            if layout.local_engines_only is False:
                raise ValueError(f"local_engines_only must not be False with start_index {start_index}")
            self.local_engines_only = True
        self.local_engine_count: int = local_engine_count
        self._all_local = local_engine_count == engine_count
        self._host = layout.host or ""
        if not self._host and not self._all_local:
            self._host = own_address()
        self.coordinator: bool = engine_count > 1 and self._at_head
        if layout.coordinator is not None:
            self.coordinator = bool(layout.coordinator)
        local = [CoreEngine(start_index + number) for number in range(local_engine_count)]
        self.core_engines: list[CoreEngine] = [*local]
        self.own_handshake_address: str = ""
        if self._at_head:
            self.core_engines += [CoreEngine(rank, local=False) for rank in range(local_engine_count, engine_count)]
            self.own_handshake_address = layout.handshake_address or ""
        if not self.own_handshake_address:
            local_only = self._all_local or not self._at_head
            self.own_handshake_address = get_engine_client_zmq_addr(local_only, self._host)
        self.client_engines: list[CoreEngine] = local if self.local_engines_only else self.core_engines

    def client_addresses(self, num_api_servers: int) -> EngineZmqAddresses:
        """Return where clients meet engines."""
        given = self._layout.addresses
        if given is not None:
            if num_api_servers not in (0, len(given.inputs)):
                raise ValueError(f"addresses must be one for each of {num_api_servers} API servers, not {given.inputs}")
            return replace(given, inputs=[*given.inputs], outputs=[*given.outputs])  # a launch writes in its own
        local = self._all_local or self.local_engines_only
        if num_api_servers and not local:
            raise ValueError(
                "addresses must be given, with ports, where API servers in other processes serve engines on other"
                f" hosts: num_api_servers is {num_api_servers}, and {self.local_engine_count} engines are local"
            )
        addresses = EngineZmqAddresses([], [])
        for _ in range(num_api_servers or 1):
            addresses.inputs.append(get_engine_client_zmq_addr(local, self._host))
            addresses.outputs.append(get_engine_client_zmq_addr(local, self._host))
        return addresses

    @property
    def coordinator_options(self) -> dict[str, Any]:
        """Where the coordinator meets engines and front ends."""
        local_front_ends = not self.local_engines_only
        options: dict[str, Any] = {
            "local_engines": self._all_local,
            "local_front_ends": local_front_ends,
            "enable_wave_coordination": self._layout.enable_wave_coordination,
        }
        if not (self._all_local and local_front_ends):
            options["host"] = self._host or own_address()
        return options

    def engine_arguments(self, bound: str) -> dict[str, str]:
        """Return the addresses that engines get as arguments; ``bound`` is the bound handshake address of this host."""
        if self._at_head:
            return {"handshake_address": bound}
        assert self._layout.handshake_address is not None
        return {"handshake_address": self._layout.handshake_address, "client_handshake_address": bound}
