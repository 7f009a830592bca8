"""The statistics of one end of a queue."""

from __future__ import annotations

import msgspec

from aioshm.queue.membership import ReaderInfo
from aioshm.ring.header import Latency

RATE_S = 1.0
"""Rates cover the time since an earlier call of `stats`, at least this many seconds ago."""


class ReaderStats(ReaderInfo, frozen=True, kw_only=True):
    """`ReaderInfo`, and statistics of the reader.

    Attributes:
        bytes: Bytes in the bodies of the messages that the reader has finished with; None for a remote reader.
        latency: Times from publishing a message until the reader took it; None for a remote reader.
    """

    bytes: int | None = None
    latency: Latency | None = None

    @property
    def latency_p50_s(self) -> float | None:
        """The median of the latency, in seconds; None if nothing was counted."""
        return self._latency_s(0.5)

    @property
    def latency_p99_s(self) -> float | None:
        """The 99th percentile of the latency, in seconds; None if nothing was counted."""
        return self._latency_s(0.99)

    def _latency_s(self, quantile: float) -> float | None:
        if self.latency is None:
            return None
        return self.latency.quantile(quantile)


class Rates:
    """Messages and bytes per second between calls of `since`; takes the time as an argument."""

    def __init__(self, now: float) -> None:
        # Time, messages and bytes.
        self._before = self._latest = (now, 0, 0)
        self._begun = False

    def begin(self, now: float, messages: int) -> None:
        """Start counting at this message number; only the first call counts."""
        if not self._begun:
            self._begun = True
            self._before = self._latest = (now, messages, 0)

    def since(self, now: float, messages: int, nbytes: int) -> tuple[float, float]:
        """Return both rates, given the total messages and bytes."""
        if now - self._latest[0] >= RATE_S:
            self._before = self._latest
            self._latest = (now, messages, nbytes)
        began, messages_then, bytes_then = self._before
        elapsed_s = now - began
        if elapsed_s <= 0:
            return 0.0, 0.0
        return max(0, messages - messages_then) / elapsed_s, max(0, nbytes - bytes_then) / elapsed_s


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one end of a queue.

    Attributes:
        queue: The queue's name, or the first 8 hex digits of its id.
        side: ``"writer"`` or ``"reader"``.
        rank: The reader's rank, or -1.
        ready: Whether `wait_until_ready` has succeeded.
        messages: Messages sent or received.
        bytes: Bytes in their encoded bodies.
        messages_per_s: Messages per second since an earlier call of ``stats()`` at least a second ago; at first, since
            this end was created, or attached.
        bytes_per_s: Bytes per second, likewise.
        overflows: Number of messages that did not fit a chunk.
        copied_bytes: Bytes that this end has copied into messages, or out of leased messages. Loans and leases in place
            copy nothing. Copies returned by `dequeue`, and leases of small messages, do not count.
        backlog: Messages that this end (a writer: the slowest reader) has not finished with.
        max_chunks: Chunks of ``max_chunk_bytes`` in the ring.
        slots: Messages that the ring holds.
        readers: A writer's readers that are attached and alive.
        per_reader: A writer's readers one by one, as in `MessageQueue.readers`.
        latency: Times from publishing a message until this reader took it; None for a writer and a remote reader.
        kept: Messages that a writer keeps because a remote reader has not acknowledged them yet.
        kept_bytes: Bytes of the kept messages.
        resent: Messages sent again to remote readers, or dropped by this reader behind a gap or as copies.
        reconnects: Times that a remote reader has lost and restored a connection.
        restarts: Times that a reader has raised `QueueRestarted`.
        garbled_traces: Messages that a reader got with a damaged trace context (`Options.trace_context`).
        spins: Busy-waits of this end, each for some microseconds.
        spin_hits: Busy-waits that ended with a message, or with room.
        spin_s: Seconds spent in busy-waits.
        naps: Short sleeps on a timer, from which peers do not wake this end.
        parks: Sleeps from which a peer wakes this end.
    """

    queue: str
    side: str
    rank: int
    ready: bool
    messages: int = 0
    overflows: int = 0
    backlog: int = 0
    max_chunks: int = 0
    slots: int = 0
    readers: int = 0
    spins: int = 0
    spin_hits: int = 0
    spin_s: float = 0.0
    naps: int = 0
    parks: int = 0
    kept: int = 0
    kept_bytes: int = 0
    resent: int = 0
    reconnects: int = 0
    restarts: int = 0
    copied_bytes: int = 0
    garbled_traces: int = 0
    bytes: int = 0
    messages_per_s: float = 0.0
    bytes_per_s: float = 0.0
    per_reader: tuple[ReaderStats, ...] = ()
    latency: Latency | None = None
