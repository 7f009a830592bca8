"""Batches of a publisher: the queue of batches to send, and the buffer of sent batches for replay. No I/O.

A batch that finds the queue full keeps its number, so subscribers notice the hole. If no batch follows a hole, the
sender sends an empty batch with one more number, which reveals the hole.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Literal, TypeAlias

from aioshm.arguments import check_int
from aioshm.errors import PublisherClosed, QueueFull, RoleError
from aioshm.events.protocol.messages import EventBatch

Overflow: TypeAlias = Literal["block", "drop", "raise"]
OVERFLOWS = ("block", "drop", "raise")


@dataclass(slots=True)
class PublisherStats:
    """Counters of a publisher.

    Attributes:
        published: Numbers given out, including those of dropped batches and of the empty batches that reveal a hole.
        sent: Batches passed to ZeroMQ.
        queued: Batches that wait to be sent.
        dropped: Batches that found the queue full, or were not sent before the publisher was closed.
        unencodable: Batches that could not be encoded.
        replay_requests: Well-formed replay requests.
        replayed: Batches sent in answers to replay requests.
        malformed_requests: Malformed replay requests.
        abandoned_replays: Clients that left or stalled before the end of their answer.
        handshake_failures: Connections that ended before their handshake: no ZeroMQ, wrong keys, or closed.
        cut_off: Connections that were closed because of too many subscriptions.
    """

    published: int = 0
    sent: int = 0
    queued: int = 0
    dropped: int = 0
    unencodable: int = 0
    replay_requests: int = 0
    replayed: int = 0
    malformed_requests: int = 0
    abandoned_replays: int = 0
    handshake_failures: int = 0
    cut_off: int = 0


class Outbox:
    """A bounded queue between publishing threads and the sender."""

    def __init__(self, max_size: int, overflow: Overflow = "drop") -> None:
        check_int("max_queue_size", max_size, minimum=1)
        if overflow not in OVERFLOWS:
            raise ValueError(f"overflow must be one of {OVERFLOWS}, not {overflow!r}")
        self.dropped: int = 0  # batches that found the queue full, or were abandoned
        self.published: int = 0  # numbers given out
        self.last_sent: int = -1  # last number that was sent, or -1; set by the sender and `take`
        self.closed: bool = False
        self.waiting: deque[tuple[int, EventBatch]] = deque()  # numbers and batches in order; the sender removes
        self._max_size = max_size
        self._overflow = overflow
        self._lock = threading.RLock()  # a handler that comes back gets an error, not a deadlock
        self._inside = False
        self._idle = True  # the sender found nothing to do, and must be woken

    def _enter(self) -> None:
        """Note that the lock is in use; raise if a call of the same thread has the lock."""
        if self._inside:
            raise RoleError("a signal handler has interrupted a call of this event publisher: publish after the call")
        self._inside = True

    def put(self, batch: EventBatch, *, may_drop: bool = True) -> bool:
        """Number ``batch`` and queue it if there is room; True if the caller must wake the sender."""
        with self._lock:
            self._enter()
            try:
                if self.closed:
                    raise PublisherClosed("this event publisher is closed")
                seq = self.published
                if len(self.waiting) < self._max_size:
                    self.waiting.append((seq, batch))
                elif may_drop and self._overflow == "drop":
                    self.dropped += 1
                else:
                    raise QueueFull(f"{len(self.waiting)} event batches wait to be sent, max_queue_size allows no more")
                self.published = seq + 1
                wake = self._idle
                self._idle = False
                return wake
            finally:
                self._inside = False

    def close(self) -> bool:
        """Refuse further batches; True the first time."""
        with self._lock:
            was_open = not self.closed
            self.closed = True  # a signal handler may close inside of another call
            return was_open

    def take(self) -> tuple[int, EventBatch | None] | None:
        """Return the next number and its batch, which is None for an empty batch that reveals a hole.

        If there is nothing to send, return None: the sender is idle, and the next ``put`` returns True.
        """
        with self._lock:
            self._enter()
            try:
                if self.waiting:
                    return self.waiting.popleft()
                if self.last_sent == self.published - 1:
                    self._idle = True
                    return None
                self.last_sent = self.published
                self.published += 1
                return self.last_sent, None
            finally:
                self._inside = False

    def abandon(self) -> tuple[int, int] | None:
        """Drop all waiting batches; return the first and the last number, or None."""
        with self._lock:
            if not self.waiting:
                return None
            first = self.waiting[0][0]
            last = self.waiting[-1][0]
            self.dropped += len(self.waiting)
            self.waiting.clear()
            return first, last


Entry: TypeAlias = tuple[int, bytes]


class ReplayBuffer:
    """The last ``size`` batches, in rising order of their numbers."""

    def __init__(self, size: int) -> None:
        check_int("buffer_steps", size, minimum=0)
        self._entries: deque[Entry] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, seq: int, payload: bytes) -> None:
        """Store a batch; drop the oldest batch if the buffer is full."""
        self._entries.append((seq, payload))

    def since(self, start: int) -> deque[Entry]:
        """Return a copy of the entries from number ``start`` on."""
        first = bisect_left(self._entries, start, key=itemgetter(0))
        return deque(islice(self._entries, first, None))
