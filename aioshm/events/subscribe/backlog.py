"""What waits in a subscriber: messages of an endpoint that are not decoded yet, and deliveries for the consumer."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TypeAlias

from aioshm.errors import CodecError
from aioshm.events.protocol.deliveries import Delivery, Received
from aioshm.events.protocol.wire import parse_live

# What Python takes for a message and for each of its frames beside their bytes.
MESSAGE_OVERHEAD = 128
FRAME_OVERHEAD = 48
# Messages that one call drops at most: about 5 ms.
_MAX_SHRINK = 8192
# Of so many connections and topics, so many ranges of dropped numbers each are remembered.
_MAX_STREAMS = 1024
_MAX_RANGES = 4

CAME_BACK = object()
"""Stands in place of a connection in the marker of a connection that broke and is back."""

Entry: TypeAlias = tuple[object, list[bytes] | None, int]
"""A connection, its message, and the bytes that count; a marker has no message: a connection ended, or `CAME_BACK`."""


class Backlog:
    """A queue of messages and markers, bounded by bytes: the oldest messages are dropped.

    A full backlog shrinks to half of its bound: few large gaps in the publishers' numbers cost less than many small
    ones. The newest message stays, so that its number shows the gap. All markers stay, in their order.
    """

    def __init__(self, max_bytes: int) -> None:
        self.received: int = 0  # messages that were put in
        self.taken: int = 0  # how many of them came before the one that was taken last
        self.dropped: int = 0  # how many of them were dropped
        self.size: int = 0  # bytes of memory that all messages take
        self.is_shrinking: bool = False  # whether it was full, and has not shrunk to half yet
        self._max_bytes = max_bytes
        self._passed = 0  # taken or dropped
        self._entries: deque[Entry] = deque()
        self._ranges: dict[tuple[object, bytes], deque[tuple[int, int]]] = {}  # dropped, by connection and topic

    @property
    def is_half_full(self) -> bool:
        """Whether it holds more than half of its bound."""
        return self.size > self._max_bytes // 2

    def put(self, connection: object, frames: list[bytes]) -> None:
        """Append a message."""
        size = MESSAGE_OVERHEAD + FRAME_OVERHEAD * len(frames) + sum(map(len, frames))
        self._entries.append((connection, frames, size))
        self.size += size
        self.received += 1
        if self.size > self._max_bytes:
            self.is_shrinking = True

    def note(self, connection: object) -> None:
        """Append a marker: this connection ended, or one came back."""
        self._entries.append((connection, None, 0))

    def take(self) -> Entry | None:
        """Remove the oldest entry and return it; None if there is none, or it may have to be dropped."""
        if self.is_shrinking or not self._entries:
            return None
        entry = self._entries.popleft()
        if entry[1] is not None:
            self.size -= entry[2]
            self.taken = self._passed
            self._passed += 1
        return entry

    def clear(self) -> None:
        """Forget all entries; they do not count as dropped."""
        self._entries.clear()
        self.size = 0
        self.is_shrinking = False

    def shrink(self) -> None:
        """Drop some of the oldest messages, if the backlog was full; call again while ``is_shrinking``."""
        if not self.is_shrinking:
            return
        entries = self._entries
        markers: list[Entry] = []
        ends: dict[tuple[object, bytes], tuple[list[bytes], list[bytes]]] = {}  # first and last message of each stream
        target = self._max_bytes // 2
        left = _MAX_SHRINK
        while left and self.size > target and len(entries) > 1:
            entry = entries.popleft()
            connection, frames, size = entry
            if frames is None:
                markers.append(entry)
                continue
            left -= 1
            self.size -= size
            key = connection, frames[0]
            known = ends.get(key)
            ends[key] = (frames, frames) if known is None else (known[0], frames)
        entries.extendleft(reversed(markers))
        self.dropped += _MAX_SHRINK - left
        self._passed += _MAX_SHRINK - left
        self.is_shrinking = left == 0
        for key, (oldest, newest) in ends.items():
            try:
                self._remember(key, parse_live(oldest).seq, parse_live(newest).seq)
            except CodecError:  # garbage, which would not have been decoded
                continue

    def dropped_between(self, topic: bytes | None, first: int, last: int) -> tuple[int, int] | None:
        """Return the first and the last of a topic's numbers from ``first`` to ``last`` that were dropped, if any."""
        found = [
            (max(first, low), min(last, high))
            for (_, of_topic), ranges in self._ranges.items()
            if topic in (of_topic, None)
            for low, high in ranges
            if low <= last and high >= first
        ]
        if not found:
            return None
        return min(low for low, _ in found), max(high for _, high in found)

    def _remember(self, key: tuple[object, bytes], first: int, last: int) -> None:
        ranges = self._ranges.setdefault(key, deque(maxlen=_MAX_RANGES))
        if ranges and ranges[-1][1] + 1 == first:
            first = ranges.pop()[0]
        ranges.append((first, last))
        if len(self._ranges) > _MAX_STREAMS:
            del self._ranges[next(iter(self._ranges))]


# Payloads that may wait for the consumer together; decoded, they take up to 34 times as much.
MAX_WAITING_BYTES = 1 << 20


class Inbox:
    """Deliveries that wait for the consumer.

    The sources know only this, not the subscriber, so a subscriber that is forgotten can be collected.
    """

    def __init__(self, room: int) -> None:
        self.waiting: deque[Delivery] = deque()
        self._room = room
        self._full = False
        self._bytes = 0
        self._failure: BaseException | None = None
        self._arrived = asyncio.Event()

    def put(self, delivery: Delivery) -> bool:
        """Keep a delivery; False if that was the last one with room."""
        self.waiting.append(delivery)
        if isinstance(delivery, Received):
            self._bytes += len(delivery.payload)
        self._arrived.set()
        if len(self.waiting) >= self._room or self._bytes >= MAX_WAITING_BYTES:
            self._full = True
        return not self._full

    def take(self) -> Delivery:
        """Remove the next delivery and return it."""
        delivery = self.waiting.popleft()
        if isinstance(delivery, Received):
            self._bytes -= len(delivery.payload)
        return delivery

    def has_room_again(self) -> bool:
        """Tell once, when half of what filled it has been taken."""
        if self._full and len(self.waiting) <= self._room // 2 and self._bytes <= MAX_WAITING_BYTES // 2:
            self._full = False
            return True
        return False

    async def arrival(self) -> None:
        """Wait until something may have arrived."""
        self._arrived.clear()
        await self._arrived.wait()

    def wake(self) -> None:
        """Let everybody who waits look again."""
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """Let the consumer have an error that came up in a callback."""
        self._failure = error
        self._arrived.set()

    def raise_failure(self) -> None:
        """Raise that error, if there is one."""
        if self._failure is not None:
            raise self._failure
