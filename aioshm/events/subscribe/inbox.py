"""Deliveries on their way from a subscriber's sources to its consumer."""

from __future__ import annotations

import asyncio
from collections import deque

from aioshm.events.protocol.deliveries import Delivery, Received

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
