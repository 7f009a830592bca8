"""Arithmetic on ZeroMQ endpoints: ranks, bind or connect, wildcards. No I/O."""

from __future__ import annotations

from aioshm.lifeline.address import connectable

_TRANSPORTS = ("tcp", "ipc", "inproc")
_LAST_PORT = 65535


def check_endpoint(endpoint: str, argument: str = "endpoint") -> str:
    """Return ``endpoint`` if it can be one.

    Raises:
        TypeError: It is not a string.
        ValueError: No known transport, no address, or a tcp address without a port.
    """
    if not isinstance(endpoint, str):
        raise TypeError(f"{argument} must be a str, not {type(endpoint).__name__}")
    transport, separator, address = endpoint.partition("://")
    if not separator or transport not in _TRANSPORTS or not address:
        raise ValueError(f"{argument} must be tcp://, ipc:// or inproc:// and an address, not {endpoint!r}")
    if transport == "tcp":
        host, colon, port = address.rpartition(":")
        if not colon or not host or not (port == "*" or (port.isascii() and port.isdigit())):
            raise ValueError(f"{argument} must end in host:port, which {endpoint!r} does not")
        if port != "*" and int(port) > _LAST_PORT:
            raise ValueError(f"{argument} {endpoint!r}: there is no port above {_LAST_PORT}")
    return endpoint


def for_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of one data-parallel rank.

    Rank 0 has the endpoint itself. For other ranks a tcp port moves up by the rank (0 and ``*`` stay: the
    system chooses), and the name of an inproc or ipc endpoint gets the suffix ``_dp<rank>``.

    Raises:
        ValueError: The endpoint cannot be one, or the port would lie above 65535.
    """
    check_endpoint(endpoint)
    if rank < 0:
        raise ValueError(f"data_parallel_rank must not be negative, not {rank}")
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    base, _, port = endpoint.rpartition(":")
    if port in ("*", "0"):
        return endpoint
    moved = int(port) + rank
    if moved > _LAST_PORT:
        raise ValueError(f"{endpoint!r} for rank {rank} would be port {moved}, above {_LAST_PORT}")
    return f"{base}:{moved}"


def publisher_binds(endpoint: str) -> bool:
    """Tell whether a publisher binds here by vLLM's rule: wildcards, ``::``, ipc and inproc."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def subscriber_binds(endpoint: str) -> bool:
    """Tell whether a subscriber binds here: only where it cannot connect, at a ``*``."""
    return endpoint.startswith("tcp://") and "*" in endpoint


def passed_on(asked: str, bound: str) -> str:
    """Return what a configuration says of an endpoint that was asked for and bound: others may connect to it.

    As in vLLM, that is this host's own address where both address and port were left to the system.
    """
    return connectable(bound) if asked.endswith((":0", ":*")) else bound
