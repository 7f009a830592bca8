"""Batches of a publisher: those that wait to be sent, and the last ones that were, kept for replay. No I/O.

A batch that finds no room keeps the number it was given, and nobody else gets that number: the hole is what
tells the subscribers. If nothing is published after a hole, nobody would see it; the sender is then given one
more number, for an empty batch.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left
from collections import deque
from itertools import islice
from operator import itemgetter
from typing import Literal, TypeAlias

from aioshm.errors import PublisherClosed, QueueFull
from aioshm.events.protocol.messages import EventBatch

Overflow: TypeAlias = Literal["block", "drop", "raise"]
OVERFLOWS = ("block", "drop", "raise")

# The sender is at work: no number of batches needs to wake it.
_NEVER = sys.maxsize


class Outbox:
    """A bounded queue between publishers, in any thread, and the one who sends."""

    def __init__(self, max_size: int, overflow: Overflow = "drop") -> None:
        if max_size < 1:
            raise ValueError(f"max_queue_size must be at least 1, not {max_size}")
        if overflow not in OVERFLOWS:
            raise ValueError(f"overflow must be one of {OVERFLOWS}, not {overflow!r}")
        self.dropped: int = 0  # batches that found no room
        self.first_dropped: int | None = None  # the number of the first of them, or None
        self.published: int = 0  # numbers given out
        self.last_sent: int = -1  # the number that went out last, or -1; for the sender to set
        self._max_size = max_size
        self._overflow = overflow
        self.closed: bool = False  # whether it takes no more batches
        # Batches and their numbers, in order; only the sender takes any away.
        self.waiting: deque[tuple[int, EventBatch]] = deque()
        self.blocked: int = 0  # threads that wait for room
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._wake_at = 1

    @property
    def room(self) -> int:
        """How many batches more can wait."""
        return self._max_size - len(self.waiting)

    def waiting_before(self, seq: int) -> int:
        """Return how many batches with a number below ``seq`` wait; dropped ones may count."""
        with self._lock:
            if not self.waiting:
                return 0
            return max(0, min(len(self.waiting), seq - self.waiting[0][0]))

    def put(self, batch: EventBatch) -> bool:
        """Give ``batch`` the next number and keep it if there is room; True if the sender must be woken."""
        with self._lock:
            if self.closed:
                raise PublisherClosed("this event publisher is closed")
            seq = self.published
            if len(self.waiting) < self._max_size:
                self.waiting.append((seq, batch))
            else:
                self._has_no_room(seq)
            self.published = seq + 1
            if len(self.waiting) < self._wake_at:
                return False
            self._wake_at = _NEVER
            return True

    def wait_for_room(self, timeout: float) -> bool:
        """Block this thread until there is room, which another thread may take first, or the outbox is closed."""
        with self._room:
            self.blocked += 1
            try:
                return self._room.wait_for(lambda: self.closed or self.room > 0, timeout)
            finally:
                self.blocked -= 1

    def make_room(self) -> None:
        """Wake the threads that wait for room."""
        with self._room:
            self._room.notify_all()

    def close(self) -> None:
        """Take no more batches. Idempotent."""
        with self._room:
            self.closed = True
            self._room.notify_all()

    def _has_no_room(self, seq: int) -> None:
        if self._overflow != "drop":
            raise QueueFull(f"{len(self.waiting)} event batches wait to be sent, max_queue_size allows no more")
        self.dropped += 1
        if self.first_dropped is None:
            self.first_dropped = seq

    def take(self) -> tuple[int, EventBatch | None] | None:
        """Return the next number to send and its batch; None in place of the batch means: send an empty one.

        On None there is nothing to do: the sender is idle, and the next ``put`` asks to wake it.
        """
        with self._lock:
            if self.waiting:
                return self.waiting.popleft()
            if self.last_sent == self.published - 1:
                self._wake_at = 1
                return None
            self.last_sent = self.published
            self.published += 1
            return self.last_sent, None

    def gather(self, count: int) -> None:
        """Let ``put`` ask to wake the sender only when so many wait; until ``take`` finds nothing to do again.

        The sender must look by itself before long: nobody knows whether so many will come.
        """
        with self._lock:
            self._wake_at = min(count, self._max_size)

    def abandon(self) -> tuple[int, int] | None:
        """Drop what waits; return its first and last number."""
        with self._lock:
            if not self.waiting:
                return None
            first, last = self.waiting[0][0], self.waiting[-1][0]
            self.dropped += len(self.waiting)
            self.waiting.clear()
            return first, last


Entry: TypeAlias = tuple[int, bytes]


class ReplayBuffer:
    """The last ``size`` batches, in rising order of their numbers."""

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"buffer_steps must not be negative, not {size}")
        self._entries: deque[Entry] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, seq: int, payload: bytes) -> None:
        """Store one more batch; drop the oldest one where there are more than ``size``."""
        self._entries.append((seq, payload))

    def since(self, start: int) -> deque[Entry]:
        """Return a copy of the entries from number ``start`` on."""
        first = bisect_left(self._entries, start, key=itemgetter(0))
        return deque(islice(self._entries, first, None))
