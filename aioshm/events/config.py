"""What a KV-event publisher is told, and the numbers behind the defaults."""

from __future__ import annotations

from dataclasses import dataclass

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
