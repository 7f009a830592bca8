"""Endpoints of the sockets between front ends, engines and the coordinator."""

from __future__ import annotations

import secrets

import msgspec

from aioshm.arguments import check_int
from aioshm.config import Options
from aioshm.lifeline.sockets import new_address
from aioshm.zeromq.hosts import bracketed

_LAST_PORT = 65535


def get_engine_client_zmq_addr(local_only: bool, host: str, port: int = 0) -> str:
    """Return an address for a socket between the front end and its engines.

    With port 0 the kernel chooses a port when the socket is bound, and the end that binds publishes the port
    (`EngineStartupCoordinator.handshake_address`, ``zmq.LAST_ENDPOINT``).

    Args:
        local_only: Whether both ends are on this host. Then the address is a new ``ipc://`` path in the runtime
            directory, which only this user can reach.
        host: The address to bind if not ``local_only``; IPv6 may stand in brackets.
        port: The port to bind if not ``local_only``.

    Raises:
        SharedMemoryError: The runtime directory is unusable.
        TypeError, ValueError: ``host`` or ``port`` is invalid.
    """
    if local_only:
        options = msgspec.structs.replace(Options.from_env(), lifeline="directory")
        return f"ipc://{new_address(options, secrets.token_bytes(8), 'engine')}"
    check_int("port", port, minimum=0, maximum=_LAST_PORT)
    if not isinstance(host, str) or not host:
        raise ValueError(f"host must be an address, not {host!r}")
    return f"tcp://{bracketed(host)}:{port}"


def check_handshake_address(address: object) -> str:
    """Return ``address`` if a front end can bind it."""
    if not isinstance(address, str):
        raise TypeError(f"handshake_address must be a string, not {address!r}")
    transport, _, rest = address.partition("://")
    if transport not in ("ipc", "tcp") or not rest:
        raise ValueError(f"handshake_address must be ipc://PATH or tcp://HOST:PORT, not {address!r}")
    return address
