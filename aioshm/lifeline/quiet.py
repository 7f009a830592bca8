"""Sockets that the garbage collector closes without a warning: the ends that have them give one."""

from __future__ import annotations

import socket
from typing import Any


class QuietSocket(socket.socket):
    """A socket of an end of a queue.

    An end that is forgotten says so when it is collected, and closes its sockets. These may be collected first.
    """

    def accept(self) -> tuple[QuietSocket, Any]:
        """Do what `socket.socket.accept` does, without asking the kernel what the new socket is: a stream, as this."""
        accept: Any = super()._accept  # type: ignore[misc]
        fd, address = accept()
        return QuietSocket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd), address

    def __del__(self) -> None:
        self.close()
