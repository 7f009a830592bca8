"""Which engines a launch is for, where they run, and where sockets between them and front ends are bound. No I/O."""

from __future__ import annotations

from typing import Any

from aioshm.arguments import check_int
from aioshm.engine.endpoints import check_handshake_address, get_engine_client_zmq_addr
from aioshm.engine.protocol.addresses import CoreEngine, EngineZmqAddresses, balanced_outside, identity
from aioshm.lifeline.address import own_address


class Layout:
    """The engines of `launch_core_engines`, whose arguments these are."""

    def __init__(
        self,
        engine_count: int,
        local_engine_count: int | None,
        *,
        start_index: int,
        local_engines_only: bool | None,
        parallel_config: object,
        host: str | None,
        handshake_address: str | None,
        coordinator: bool | None,
    ) -> None:
        check_int("engine_count", engine_count, minimum=1)
        identity(engine_count - 1)
        here = engine_count if local_engine_count is None else local_engine_count
        self.local_engine_count: int = check_int("local_engine_count", here, minimum=0)
        check_int("start_index", start_index, minimum=0)
        if start_index + here > engine_count:
            first = f" from rank {start_index} on" if start_index else ""
            raise ValueError(f"local_engine_count must fit engine_count, {engine_count}{first}, not {here}")
        self._at_head = start_index == 0
        self._all_local = here == engine_count
        self.local_engines_only: bool = (
            balanced_outside(parallel_config) if local_engines_only is None else local_engines_only
        )
        if not self._at_head:
            if handshake_address is None:
                raise ValueError(f"handshake_address must be the head node's with start_index {start_index}, not None")
            if coordinator:
                raise ValueError(
                    f"coordinator must be the head node's with start_index {start_index}, not {coordinator}"
                )
            if local_engines_only is False:
                raise ValueError(f"local_engines_only must not be False with start_index {start_index}")
            self.local_engines_only = True
        if handshake_address is not None:
            check_handshake_address(handshake_address)
        self._handshake_address = handshake_address
        self._host = own_address() if host is None and not self._all_local else host or ""
        self.coordinator: bool = engine_count > 1 and self._at_head if coordinator is None else bool(coordinator)
        local = [CoreEngine(start_index + number) for number in range(here)]
        others = [CoreEngine(rank, local=False) for rank in range(here, engine_count)] if self._at_head else []
        self.core_engines: list[CoreEngine] = local + others  # those that shake hands here
        self.client_engines: list[CoreEngine] = local if self.local_engines_only else self.core_engines
        self.own_handshake_address: str = (
            handshake_address
            if handshake_address is not None and self._at_head
            else get_engine_client_zmq_addr(self._all_local or not self._at_head, self._host)
        )

    def client_addresses(self, num_api_servers: int) -> EngineZmqAddresses:
        """Return where clients meet engines."""
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
        """Where the coordinator meets the others."""
        options: dict[str, Any] = {"local_engines": self._all_local, "local_front_ends": not self.local_engines_only}
        if not (self._all_local and options["local_front_ends"]):
            options["host"] = self._host or own_address()
        return options

    def told_engines(self, bound: str) -> dict[str, str]:
        """Return what engines are told of handshakes; ``bound`` is where this host's really is."""
        if self._at_head:
            return {"handshake_address": bound}
        assert self._handshake_address is not None
        return {"handshake_address": self._handshake_address, "client_handshake_address": bound}
