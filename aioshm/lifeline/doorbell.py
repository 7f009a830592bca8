"""The doorbell of a parked end: an eventfd(2); without one, a byte on the lifeline wakes the end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

HAVE_EVENTFD = hasattr(os, "eventfd")


class Doorbell:
    """Owns an eventfd. One `drain` takes all rings."""

    def __init__(self, fd: int) -> None:
        self.fd: int = fd

    @classmethod
    def create(cls) -> Doorbell:
        """Make a new eventfd."""
        return cls(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def ring(self) -> None:
        """Make the descriptor readable. Never blocks; does nothing once closed."""
        if self.fd < 0:
            return
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:
            pass  # the counter is full, so the descriptor is readable

    def drain(self) -> None:
        """Make the descriptor unreadable until the next ring."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass

    def watch(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
        """Call back on a loop whenever this was rung. Does nothing once closed."""
        if self.fd < 0:
            return
        loop.add_reader(self.fd, self._rung, callback)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop calling back. Idempotent."""
        if self.fd >= 0 and not loop.is_closed():
            loop.remove_reader(self.fd)

    def _rung(self, callback: Callable[[], object]) -> None:
        self.drain()
        callback()

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
