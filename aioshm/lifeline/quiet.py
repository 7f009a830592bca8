"""Sockets that the garbage collector closes without a warning: the ends that have them give one."""

from __future__ import annotations

import socket
from typing import Any


class QuietSocket(socket.socket):
    """A socket without a `ResourceWarning`: the end that owns the socket gives the warning."""

    def accept(self) -> tuple[QuietSocket, Any]:
        """Do what `socket.socket.accept` does, without asking the kernel what the new socket is: a stream, as this."""
        accept: Any = super()._accept  # type: ignore[misc]
        fd, address = accept()
        return QuietSocket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd), address

    def __del__(self) -> None:
        self.close()
