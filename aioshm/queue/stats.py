"""What one end of a queue has done so far."""

from __future__ import annotations

import msgspec


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one end of a queue has done so far.

    Attributes:
        queue: The queue's name, or the first 8 hex digits of its id.
        side: ``"writer"`` or ``"reader"``.
        rank: The reader's rank, or -1.
        ready: Whether `wait_until_ready` has succeeded.
        messages: Messages sent or received.
        overflows: How many of them did not fit a chunk.
        copied_bytes: Bytes that this end has copied into messages, or out of leased ones: none of what is loaned, and
            leased where it lies. What `dequeue` returns is a copy, and does not count; nor does a lease of what was
            enqueued with arrays of less than 72 KiB, which is what `dequeue` returns.
        backlog: Messages that this end (a writer: the slowest reader) has not finished with.
        max_chunks: Chunks of ``max_chunk_bytes`` in the ring.
        slots: Messages that the ring holds.
        readers: A writer's readers that are attached and alive.
        kept: Messages that a writer keeps because a remote reader has not acknowledged them yet.
        kept_bytes: Their size.
        resent: Messages sent again to remote readers, or received twice by this one.
        reconnects: Times that a remote reader has lost a connection and got it back.
        restarts: Times that a reader went on with another writer, and has told so (`QueueRestarted`).
        garbled_traces: Messages that a reader got with a trace context that is none (`Options.trace_context`).
        spins: Times this end span, each for some microseconds.
        spin_hits: Spins that ended with what was waited for.
        spin_s: Seconds spent spinning.
        naps: Short sleeps on a timer, in which the other end does not wake this one.
        parks: Times this end went to sleep.
    """

    queue: str
    side: str
    rank: int
    ready: bool
    messages: int
    overflows: int
    backlog: int
    max_chunks: int
    slots: int
    readers: int
    spins: int
    spin_hits: int
    spin_s: float
    naps: int
    parks: int
    kept: int = 0
    kept_bytes: int = 0
    resent: int = 0
    reconnects: int = 0
    restarts: int = 0
    copied_bytes: int = 0
    garbled_traces: int = 0
