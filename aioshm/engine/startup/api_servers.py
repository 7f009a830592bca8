"""The API server processes of a front end."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

from aioshm.arguments import check_int
from aioshm.engine.security.keys import EngineKeys, as_attributes, keys_to_hand_over
from aioshm.process.manager import Job, ProcessManager
from aioshm.process.stopping import SHUTDOWN_TIMEOUT_S


class APIServerProcessManager(ProcessManager):
    """API server processes that share one listening socket, named ``ApiServer_0`` and so on.

    Each runs ``target_server_fn(listen_address, sock, args, client_config)``. The client config is a dict:
    ``input_address`` and ``output_address``, where this server meets the engines; ``client_count``, how many servers
    there are; ``client_index``, which one it is; ``stats_update_address`` and ``membership_address``,
    only if there is one.

    Args:
        target_server_fn: What each process runs.
        listen_address: Where the socket listens, for people.
        sock: The listening socket; each process gets a copy. It stays the caller's to close.
        args: For the target, as it is.
        num_servers: How many.
        input_addresses: One for each.
        output_addresses: One for each.
        stats_update_address: Where the DP coordinator publishes, if there is one.
        shutdown_timeout: See `ProcessManager`.
        capture_stderr: See `ProcessManager`.
        keys: Each process starts with them, for its `EngineClient`; None: with those of this process.
        membership_address: Where front ends are told which engines there are, if they are; see `EngineClient`.
    """

    def __init__(
        self,
        target_server_fn: Callable[..., object],
        listen_address: str,
        sock: socket.socket | None,
        args: Any,
        num_servers: int,
        input_addresses: Sequence[str],
        output_addresses: Sequence[str],
        stats_update_address: str | None = None,
        *,
        shutdown_timeout: float = SHUTDOWN_TIMEOUT_S,
        capture_stderr: bool = True,
        keys: EngineKeys | None = None,
        membership_address: str | None = None,
    ) -> None:
        check_int("num_servers", num_servers, minimum=1)
        for name, addresses in (("input_addresses", input_addresses), ("output_addresses", output_addresses)):
            if len(addresses) != num_servers:
                raise ValueError(f"{name} must be {num_servers}, one for each server, not {addresses!r}")
        self.listen_address = listen_address
        self.sock = sock
        jobs, attributes = [], as_attributes(keys_to_hand_over(keys))
        for index, addresses in enumerate(zip(input_addresses, output_addresses, strict=True)):
            config: dict[str, Any] = dict(zip(("input_address", "output_address"), addresses, strict=True))
            config |= {"client_count": num_servers, "client_index": index}
            if stats_update_address is not None:
                config["stats_update_address"] = stats_update_address
            if membership_address is not None:
                config["membership_address"] = membership_address
            jobs.append(Job(f"ApiServer_{index}", (listen_address, sock, args, config), attributes=attributes))
        super().__init__(target_server_fn, jobs, shutdown_timeout=shutdown_timeout, capture_stderr=capture_stderr)
