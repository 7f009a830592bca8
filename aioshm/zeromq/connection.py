"""TCP connections that are ZeroMQ's own: what their peers have sent, how to silence them, how to hang up.

Linux only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket as sockets
import struct
import sys
from contextlib import suppress

# ``struct sock_filter`` of BPF_RET | BPF_K: keep 0 bytes of a packet (linux/filter.h); and its socket option.
_DROP_ALL = (ctypes.c_uint8 * 8)(0x06)
_SO_ATTACH_FILTER = 26
_FILTER = struct.Struct("@HP")
# ``struct tcp_info``: bytes that the peer has acknowledged, and bytes received from it (linux/tcp.h, since 4.1).
_BYTES = struct.Struct("=QQ")
_BYTES_AT = 120
_TCP_INFO_BYTES = _BYTES_AT + _BYTES.size
# ``struct sockaddr_in``; all zeros is AF_UNSPEC.
_ADDRESS_BYTES = 16
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class Look:
    """A look at the connection behind a descriptor of ZeroMQ's, by a duplicate: it may be closed at any moment.

    Raises:
        OSError: It is closed, or not TCP.
    """

    def __init__(self, fd: int) -> None:
        own = os.dup(fd)
        try:
            self.inode: int = os.fstat(own).st_ino
            self._socket = sockets.socket(fileno=own)
        except BaseException:
            os.close(own)
            raise

    @property
    def port(self) -> str:
        """The port of this end; empty where the number is by now that of a local socket."""
        address = self._socket.getsockname()
        return str(address[1]) if isinstance(address, tuple) else ""

    def counts(self) -> tuple[int, int]:
        """Return how many bytes the peer has acknowledged, and how many came from it."""
        info = self._socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) < _TCP_INFO_BYTES:
            raise OSError(errno.ENOTSUP, "this kernel does not count the bytes of a connection")
        acknowledged, received = _BYTES.unpack_from(info, _BYTES_AT)
        return acknowledged, received

    def silence(self) -> str:
        """Let nothing more come in, not even the end, and forget what was not read yet; return the peer's address.

        ZeroMQ notices nothing of it.
        """
        host, port = self._socket.getpeername()[:2]
        program = _FILTER.pack(1, ctypes.addressof(_DROP_ALL))
        self._socket.setsockopt(sockets.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        with suppress(BlockingIOError):
            while self._socket.recv(1 << 16, sockets.MSG_DONTWAIT):
                pass
        return f"{host}:{port}"

    def hang_up(self) -> None:
        """Reset the connection, and forget what lies in its buffers."""
        # connect(2): an address of no family dissolves the association. ``shutdown`` would leave ZeroMQ much to read.
        if _libc is None or _libc.connect(self._socket.fileno(), bytes(_ADDRESS_BYTES), _ADDRESS_BYTES) != 0:
            self._socket.shutdown(sockets.SHUT_RDWR)

    def __enter__(self) -> Look:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
