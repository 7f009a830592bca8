"""Unix sockets: descriptors with the bytes that they come with, and a class whose owner warns at collection."""

from __future__ import annotations

import array
import select
import socket
import sys
from typing import Any

from aioshm.lifeline.protocol import MAX_GREETING_BYTES, OVERFLOW

_MAX_FDS = 3
_CLOSED = getattr(select, "POLLRDHUP", select.POLLHUP)  # Linux; macOS tells the end of a Unix socket by the other one
_RECV_FLAGS = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # SCM_RIGHTS does not keep the flag by itself
_PEEK, _CUT = int(socket.MSG_PEEK), int(socket.MSG_CTRUNC)  # as the enumeration they are, `|` and `&` take 10 us
_PEEKS = sys.platform == "linux"  # whether MSG_PEEK hands out descriptors, too, and leaves them where they are


def receive_next(sock: socket.socket) -> tuple[bytes, list[int], bool]:
    """Return bytes, descriptors, and whether the next descriptor waits in the socket for room."""
    if not _PEEKS:
        data, fds, _ = receive(sock)
        return data, fds, False
    data, fds, cut = receive(sock, _PEEK)
    cut = cut and OVERFLOW in data
    if cut:
        data = data[: data.index(OVERFLOW)]
    if data:
        sock.recv(len(data))  # as many: what comes with a descriptor is not read together with what follows
    return data, fds, cut


def receive(sock: socket.socket, flags: int = 0) -> tuple[bytes, list[int], bool]:
    """Return bytes, descriptors, and whether the kernel dropped descriptors for want of room."""
    # socket.recv_fds ignores its flags (seen in CPython 3.11), and would hand out inheritable descriptors.
    data, ancillary, flags, _address = sock.recvmsg(
        MAX_GREETING_BYTES, socket.CMSG_SPACE(_MAX_FDS * 4), _RECV_FLAGS | flags
    )
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds), bool(flags & _CUT)


def has_hung_up(sock: socket.socket) -> bool:
    """Return whether the peer has closed, whatever is still to be read."""
    poll = select.poll()
    poll.register(sock, _CLOSED)
    return bool(poll.poll(0))


class QuietSocket(socket.socket):
    """A socket without a `ResourceWarning`: the end that owns the socket gives the warning."""

    def accept(self) -> tuple[QuietSocket, Any]:
        """Accept a stream without asking the kernel for the new socket's type."""
        accept: Any = super()._accept  # type: ignore[misc]
        fd, address = accept()
        return QuietSocket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd), address

    def __del__(self) -> None:
        self.close()
