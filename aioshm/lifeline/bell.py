"""The doorbell of a parked end: an eventfd(2); without one, a byte on the lifeline wakes it."""

from __future__ import annotations

import os

HAVE_EVENTFD = hasattr(os, "eventfd")


class Bell:
    """An eventfd, which this takes over. One `drain` takes all rings."""

    def __init__(self, fd: int) -> None:
        self.fd: int = fd

    @classmethod
    def create(cls) -> Bell:
        """Make a new eventfd."""
        return cls(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def ring(self) -> None:
        """Make the descriptor readable. Never blocks; does nothing once closed."""
        if self.fd < 0:
            return
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:
            pass  # the counter is full: it rings already

    def drain(self) -> None:
        """Make the descriptor unreadable until the next ring."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
