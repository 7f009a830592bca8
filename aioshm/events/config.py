"""Options of publishers with their defaults, and ZeroMQ endpoints: validation, ranks, bind or connect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from aioshm.arguments import check_int, check_limit, check_seconds, shown
from aioshm.events.protocol.encoding import MAX_PAYLOAD_BYTES
from aioshm.events.protocol.outbox import Overflow
from aioshm.events.protocol.tracker import Start
from aioshm.events.protocol.wire import (
    DEFAULT_WIRE,
    MAX_SEQ,
    MAX_TOPIC_BYTES,
    Wire,
)
from aioshm.zeromq.endpoint import CurveKeys
from aioshm.zeromq.hosts import connectable

DEFAULT_ENDPOINT = "tcp://*:5557"
DEFAULT_BUFFER_STEPS = 10_000
DEFAULT_HWM = 100_000
DEFAULT_MAX_QUEUE_SIZE = 100_000

# How long closing a publisher waits until queued batches are sent.
CLOSE_TIMEOUT_S = 1.0

# Of received messages of one endpoint that are not decoded yet.
DEFAULT_MAX_BACKLOG_BYTES = 1 << 26
# Deliveries that may wait for the consumer.
DEFAULT_MAX_WAITING = 1024
# How long a replay may be silent before the subscriber repeats its request.
REPLAY_TIMEOUT_S = 5.0
# How long a publisher may be silent before the subscriber checks for lost messages.
CHECK_INTERVAL_S = 1.0
# How long a publisher may be missing.
GONE_AFTER_S = 60.0
# A hundred times the batch of one step, 250,000 tokens: strangers can make an open port decode that much.
OPEN_MAX_PAYLOAD_BYTES = 1 << 21


@dataclass(frozen=True)
class KVEventsConfig:
    """vLLM's configuration of KV-event publishing.

    Attributes:
        enable_kv_cache_events: Whether events are published.
        publisher: The kind: ``"zmq"``, ``"null"`` or a registered name. None means ``"zmq"`` when enabled,
            else ``"null"``.
        endpoint: Endpoint of the batches, before the rank is added.
        replay_endpoint: Endpoint for replay requests, before the rank is added; None for no replay.
        buffer_steps: Batches kept for replay.
        hwm: Batches that ZeroMQ queues for each slow subscriber before batches for this subscriber are dropped.
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
            default = "zmq" if self.enable_kv_cache_events else "null"
            object.__setattr__(self, "publisher", default)


class PublisherOptions(TypedDict, total=False):
    """Further keyword arguments of `ZmqEventPublisher` and `ThreadedEventPublisher`.

    Attributes:
        hwm: Batches that ZeroMQ queues for each slow subscriber (100,000). A subscriber that falls further behind
            misses batches, and can replay them.
        max_queue_size: Batches that may wait to be sent (100,000).
        topic: The first frame of every message; at most 512 bytes.
        bind: Bind the endpoint, or connect to it. None is vLLM's rule: wildcards, ``::``, ipc and inproc
            bind. By that rule ``tcp://127.0.0.1:5557`` connects; if the address is this host's own, a warning says so.
        wire: The releases of vLLM whose format is written: ``"vllm-0.24+"`` (maps, and the topic in replies, the
            default), ``"vllm-0.24"`` (maps, no topic) or ``"vllm-0.9"`` to 0.23 (arrays, no topic).
        overflow: What ``publish`` does when the queue is full: ``"drop"`` the new batch, ``"raise"``
            ``QueueFull``, or, in `ThreadedEventPublisher` only, ``"block"``.
        curve: Keys for an encrypted connection.
    """

    hwm: int
    max_queue_size: int
    topic: str
    bind: bool | None
    wire: Wire
    overflow: Overflow
    curve: CurveKeys | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSettings:
    """All arguments of a publisher; see `PublisherOptions`."""

    data_parallel_rank: int
    endpoint: str
    replay_endpoint: str | None
    buffer_steps: int
    hwm: int = DEFAULT_HWM
    max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE
    topic: str = ""
    bind: bool | None = None
    wire: Wire = DEFAULT_WIRE
    overflow: Overflow = "drop"
    curve: CurveKeys | None = None


class SubscriberOptions(TypedDict, total=False):
    """Further keyword arguments of `EventSubscriber`.

    Attributes:
        start: The first number wanted of every publisher. None is 0: earlier batches are replayed,
            or reported as lost. ``"live"`` begins with the first batch that arrives.
        bind: Bind the endpoints, for publishers that connect. None binds ``tcp://*:port`` only.
        curve: Keys for encrypted connections.
        replay_timeout: Seconds that a replay may be silent (5). After three timeouts a gap counts as lost.
        check_interval: Seconds of silence after which the subscriber asks a publisher's replay endpoint for missed
            batches (1); doubled up to 30 s as long as the publisher stays silent. None never asks.
        gone_after_s: Seconds until a publisher is reported as gone and forgotten (60), counted from the end of its
            connection, or from an answer of its replay endpoint without its batches. None never forgets.
        max_waiting: Deliveries that may wait for the consumer (1,024), as long as their payloads have 1 MiB together.
        max_backlog_bytes: Memory for messages of each endpoint that are not decoded yet (64 MiB); at least one message
            is kept.
        max_payload_bytes: The largest accepted payload; ZeroMQ disconnects a publisher that connects and sends a
            larger one. None is 2 MiB if this subscriber binds without keys, so that any process may connect, else
            16 MiB. A batch takes up to 112 times its size in memory.
    """

    start: Start
    bind: bool | None
    curve: CurveKeys | None
    replay_timeout: float
    check_interval: float | None
    gone_after_s: float | None
    max_waiting: int
    max_backlog_bytes: int
    max_payload_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberSettings:
    """Validated arguments of a subscriber, for all of its endpoints; see `SubscriberOptions`."""

    topic: str
    start: Start = None
    bind: bool | None = None
    curve: CurveKeys | None = None
    replay_timeout: float = REPLAY_TIMEOUT_S
    check_interval: float | None = CHECK_INTERVAL_S
    gone_after_s: float | None = GONE_AFTER_S
    max_waiting: int = DEFAULT_MAX_WAITING
    max_backlog_bytes: int = DEFAULT_MAX_BACKLOG_BYTES
    max_payload_bytes: int | None = None

    def __post_init__(self) -> None:
        start = self.start
        if not (start is None or start == "live" or (isinstance(start, int) and 0 <= start <= MAX_SEQ)):
            raise ValueError(f"start must be a number from 0 to {MAX_SEQ}, 'live' or None, not {start!r}")
        encoded_topic(self.topic)
        check_seconds("replay_timeout", self.replay_timeout)
        for name in ("check_interval", "gone_after_s"):
            check_limit(name, getattr(self, name))
        check_int("max_waiting", self.max_waiting, minimum=1)
        check_int("max_backlog_bytes", self.max_backlog_bytes, minimum=1)
        if self.max_payload_bytes is not None:
            check_int("max_payload_bytes", self.max_payload_bytes, minimum=1)

    def binds(self, endpoint: str) -> bool:
        """Return whether the subscriber binds an endpoint instead of connecting."""
        if self.bind is None:  # at ``*``, where connecting is impossible
            return endpoint.startswith("tcp://") and "*" in endpoint
        return self.bind

    def is_open(self, endpoint: str) -> bool:
        """Return whether any process that reaches the endpoint may connect and publish."""
        return self.curve is None and endpoint.startswith("tcp://") and self.binds(endpoint)

    def payload_limit(self, endpoint: str) -> int:
        """Return the size of the largest accepted payload."""
        if self.max_payload_bytes is not None:
            return self.max_payload_bytes
        if self.is_open(endpoint):
            return OPEN_MAX_PAYLOAD_BYTES
        return MAX_PAYLOAD_BYTES


def encoded_topic(topic: str) -> bytes:
    """Return a topic as bytes, checked."""
    if not isinstance(topic, str):
        raise TypeError(f"topic must be a str, not {shown(topic)}")
    encoded = topic.encode()
    if len(encoded) > MAX_TOPIC_BYTES:
        raise ValueError(f"topic must have at most {MAX_TOPIC_BYTES} bytes, not {len(encoded)}")
    return encoded


_TRANSPORTS = ("tcp", "ipc", "inproc")
_LAST_PORT = 65535


def check_endpoint(endpoint: str, argument: str = "endpoint") -> str:
    """Return ``endpoint``, or raise TypeError, or ValueError that names ``argument``."""
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

    Rank 0 has ``endpoint`` itself. For higher ranks the rank is added to a tcp port (0 and ``*`` stay: the
    system chooses), and the name of an inproc or ipc endpoint gets the suffix ``_dp<rank>``.
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
    """Return whether a publisher binds by vLLM's rule: wildcards, ``::``, ipc and inproc."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def passed_on(asked: str, bound: str) -> str:
    """Return the endpoint for subscribers: the bound one, with the host's own address if the system chose the port."""
    return connectable(bound) if asked.endswith((":0", ":*")) else bound
