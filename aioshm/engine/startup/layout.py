"""Which engines a launch is for, where they run, and where sockets between them and front ends are bound. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from aioshm.arguments import check_int
from aioshm.engine.endpoints import check_handshake_address, get_engine_client_zmq_addr
from aioshm.engine.protocol.addresses import CoreEngine, EngineZmqAddresses, balanced_outside, identity
from aioshm.process.stopping import SHUTDOWN_TIMEOUT_S
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
        ValueError: There is no such backend.
    """

    # Engines
    backend: Backend = "mp"
    manager_options: Mapping[str, Any] | None = None
    start_index: int = 0
    local_engines_only: bool | None = None
    shutdown_timeout: float = SHUTDOWN_TIMEOUT_S
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


class ResolvedLayout:
    """An `EngineLayout` with every default decided.

    Attributes:
        core_engines: The engines that shake hands here.
        client_engines: The engines of the client here.
    """

    def __init__(
        self, engine_count: int, local_engine_count: int | None, layout: EngineLayout, parallel_config: object
    ) -> None:
        check_int("engine_count", engine_count, minimum=1)
        identity(engine_count - 1)
        here = engine_count if local_engine_count is None else local_engine_count
        start_index = layout.start_index
        self.local_engine_count: int = check_int("local_engine_count", here, minimum=0)
        check_int("start_index", start_index, minimum=0)
        if start_index + here > engine_count:
            first = f" from rank {start_index} on" if start_index else ""
            raise ValueError(f"local_engine_count must fit engine_count, {engine_count}{first}, not {here}")
        self._layout = layout
        self._at_head = start_index == 0
        self._all_local = here == engine_count
        self.local_engines_only: bool = (
            balanced_outside(parallel_config) if layout.local_engines_only is None else layout.local_engines_only
        )
        if not self._at_head:
            self._check_beside_head()
            self.local_engines_only = True
        if layout.handshake_address is not None:
            check_handshake_address(layout.handshake_address)
        self._host = own_address() if layout.host is None and not self._all_local else layout.host or ""
        self.coordinator: bool = (
            engine_count > 1 and self._at_head if layout.coordinator is None else bool(layout.coordinator)
        )
        local = [CoreEngine(start_index + number) for number in range(here)]
        others = [CoreEngine(rank, local=False) for rank in range(here, engine_count)] if self._at_head else []
        self.core_engines: list[CoreEngine] = local + others
        self.client_engines: list[CoreEngine] = local if self.local_engines_only else self.core_engines
        if layout.handshake_address is not None and self._at_head:
            self.own_handshake_address: str = layout.handshake_address
        else:
            beside_head = self._all_local or not self._at_head
            self.own_handshake_address = get_engine_client_zmq_addr(beside_head, self._host)

    def _check_beside_head(self) -> None:
        layout = self._layout
        start_index = layout.start_index
        if layout.handshake_address is None:
            raise ValueError(f"handshake_address must be the head node's with start_index {start_index}, not None")
        if layout.coordinator:
            raise ValueError(
                f"coordinator must be the head node's with start_index {start_index}, not {layout.coordinator}"
            )
        if layout.local_engines_only is False:
            raise ValueError(f"local_engines_only must not be False with start_index {start_index}")

    def client_addresses(self, num_api_servers: int) -> EngineZmqAddresses:
        """Return where clients meet engines."""
        given = self._layout.addresses
        if given is not None:
            if num_api_servers not in (0, len(given.inputs)):
                raise ValueError(f"addresses must be one for each of {num_api_servers} API servers, not {given.inputs}")
            return given
        local = self._all_local or self.local_engines_only
        if num_api_servers and not local:
            raise ValueError(
                "addresses must be given, with ports, where API servers in other processes serve engines on other"
                f" hosts: num_api_servers is {num_api_servers}, and {self.local_engine_count} engines are local"
            )
        count = range(num_api_servers or 1)
        return EngineZmqAddresses(
            [get_engine_client_zmq_addr(local, self._host) for _ in count],
            [get_engine_client_zmq_addr(local, self._host) for _ in count],
        )

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
