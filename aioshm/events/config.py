"""The configuration of a publisher with its defaults, and arithmetic on ZeroMQ endpoints: ranks, who binds."""

from __future__ import annotations

from dataclasses import dataclass

from aioshm.zeromq.hosts import connectable

DEFAULT_ENDPOINT = "tcp://*:5557"
DEFAULT_BUFFER_STEPS = 10_000
DEFAULT_HWM = 100_000
DEFAULT_MAX_QUEUE_SIZE = 100_000

# ZeroMQ's own default. A subscriber reads its socket whenever its loop runs: this many wait while the loop is blocked.
DEFAULT_SUBSCRIBER_HWM = 1000
# Of messages that one endpoint of a subscriber has received and not decoded.
DEFAULT_MAX_BACKLOG_BYTES = 1 << 26

# How long close and shutdown let what is queued go out.
CLOSE_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class KVEventsConfig:
    """vLLM's configuration of KV-event publishing.

    Attributes:
        enable_kv_cache_events: Whether anything is published at all.
        publisher: The kind: ``"zmq"``, ``"null"`` or a registered name. None means ``"zmq"`` when enabled,
            else ``"null"``.
        endpoint: Where batches go out, before the rank is added to it.
        replay_endpoint: Where missed batches can be asked for, before the rank is added; None for no replay.
        buffer_steps: Batches kept for replay.
        hwm: Batches that ZeroMQ queues for one slow subscriber before it drops some.
        max_queue_size: Batches that may wait to be sent.
        topic: The first frame of every message.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = DEFAULT_ENDPOINT
    replay_endpoint: str | None = None
    buffer_steps: int = DEFAULT_BUFFER_STEPS
    hwm: int = DEFAULT_HWM
    max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE
    topic: str = ""

    def __post_init__(self) -> None:
        if self.publisher is None:
            object.__setattr__(self, "publisher", "zmq" if self.enable_kv_cache_events else "null")


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
