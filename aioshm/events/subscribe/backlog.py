"""The queues of a subscriber: messages of an endpoint that are not decoded yet, and deliveries for the consumer."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from aioshm.events.protocol.messages import Delivery, Received

# Python's memory for a message and for each of its frames, in addition to their bytes.
MESSAGE_OVERHEAD = 128
FRAME_OVERHEAD = 48

RECONNECTED = object()
"""Stands in place of a connection in the marker of a connection that broke and came back."""


class Entry(NamedTuple):
    """A message; or, without frames, the marker that its connection ended, or of `RECONNECTED`."""

    connection: object
    frames: list[bytes] | None
    number: int  # messages that came before
    size: int  # memory of the message, in bytes


class Backlog:
    """A queue of messages and markers, bounded by bytes: a full backlog drops its oldest messages.

    A full backlog shrinks to half of its bound: few large gaps in the publishers' numbers cost less than many small
    ones. The newest message stays, so that its number reveals the gap. All markers stay, in their order.
    """

    def __init__(self, max_bytes: int) -> None:
        self.received: int = 0  # messages that were put in
        self.dropped: int = 0  # messages that were dropped
        self.size: int = 0  # memory of all messages, in bytes
        self._max_bytes = max_bytes
        self._entries: deque[Entry] = deque()

    def put(self, connection: object, frames: list[bytes]) -> None:
        """Append a message; drop the oldest ones if the backlog is full."""
        size = MESSAGE_OVERHEAD + FRAME_OVERHEAD * len(frames) + sum(map(len, frames))
        self._entries.append(Entry(connection, frames, self.received, size))
        self.size += size
        self.received += 1
        if self.size > self._max_bytes:
            self._shrink()

    def note(self, connection: object) -> None:
        """Append a marker: this connection ended, or a connection came back."""
        self._entries.append(Entry(connection, None, self.received, 0))

    def take(self) -> Entry | None:
        """Remove and return the oldest entry; None if the backlog is empty."""
        if not self._entries:
            return None
        entry = self._entries.popleft()
        self.size -= entry.size
        return entry

    def clear(self) -> None:
        """Remove all entries, without counting them as dropped."""
        self._entries.clear()
        self.size = 0

    def _shrink(self) -> None:
        markers: list[Entry] = []
        while self.size > self._max_bytes // 2 and len(self._entries) > 1:
            entry = self._entries.popleft()
            self.size -= entry.size
            if entry.frames is None:
                markers.append(entry)
            else:
                self.dropped += 1
        self._entries.extendleft(reversed(markers))


# Payloads that may wait for the consumer together; decoded, they take up to 112 times as much.
MAX_WAITING_BYTES = 1 << 20


class Inbox:
    """Deliveries that wait for the consumer.

    The sources refer to the inbox, not to the subscriber, so an abandoned subscriber can be garbage-collected.
    """

    def __init__(self, capacity: int) -> None:
        self.waiting: deque[Delivery] = deque()
        self._capacity = capacity
        self._full = False
        self._bytes = 0
        self._failure: BaseException | None = None
        self._arrived = asyncio.Event()

    def put(self, delivery: Delivery) -> bool:
        """Append a delivery; False if the inbox is full now."""
        self.waiting.append(delivery)
        if isinstance(delivery, Received):
            self._bytes += len(delivery.payload)
        self._arrived.set()
        if len(self.waiting) >= self._capacity or self._bytes >= MAX_WAITING_BYTES:
            self._full = True
        return not self._full

    def take(self) -> Delivery:
        """Remove and return the next delivery."""
        delivery = self.waiting.popleft()
        if isinstance(delivery, Received):
            self._bytes -= len(delivery.payload)
        return delivery

    def has_room_again(self) -> bool:
        """Return True once after the inbox was full, when half of its deliveries have been taken."""
        if self._full and len(self.waiting) <= self._capacity // 2 and self._bytes <= MAX_WAITING_BYTES // 2:
            self._full = False
            return True
        return False

    async def arrival(self) -> None:
        """Wait until something may have arrived."""
        self._arrived.clear()
        await self._arrived.wait()

    def wake(self) -> None:
        """Wake all waiting consumers."""
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """Pass an error of a callback to the consumer."""
        self._failure = error
        self._arrived.set()

    def raise_failure(self) -> None:
        """Raise the error passed to `fail`, if any."""
        if self._failure is not None:
            raise self._failure
