"""Unix sockets and eventfds of lifelines: addresses, peer credentials, passed descriptors, doorbells."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import select
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import Any

from aioshm.config import Options
from aioshm.errors import SharedMemoryError
from aioshm.lifeline.protocol import MAX_GREETING_BYTES, OVERFLOW
from aioshm.process.limits import naming_limits
from aioshm.ring.segment import orphans, remove_orphan

_PATH_BYTES = 103 if sys.platform == "darwin" else 107  # sun_path without its final zero (unix(7))
_SOL_LOCAL = 0  # macOS: sys/un.h
_LOCAL_PEERCRED = 1


def new_address(options: Options, queue_id: bytes, kind: str) -> str:
    """Return an address for a queue's socket: ``@name`` in the abstract namespace, else a path."""
    global _uses_segments
    _uses_segments = _uses_segments or options.backing == "named"
    if options.lifeline == "abstract":
        return f"@aioshm-{queue_id.hex()}.{kind}"
    directory = Path(options.runtime_dir)
    with naming_limits(f"reading {directory}"):
        secure_directory(directory)
        _sweep(directory)
    _directories.add(directory)
    path = socket_file(options, queue_id, kind)
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise SharedMemoryError(
            errno.ENAMETOOLONG,
            f"socket path {path!r} is longer than {_PATH_BYTES} bytes: set AIOSHM_RUNTIME_DIR to a shorter one",
        )
    return path


def socket_file(options: Options, queue_id: bytes, kind: str) -> str:
    """Return the path of a queue's socket file."""
    return str(Path(options.runtime_dir) / f"{queue_id.hex()}.{kind}")


def sockaddr(address: str) -> str:
    """Return an address for ``socket.bind`` and ``connect``."""
    return "\0" + address[1:] if address.startswith("@") else address


def remove(address: str) -> None:
    """Remove the file of an address, if any."""
    if not address.startswith("@"):
        Path(address).unlink(missing_ok=True)


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the peer's pid and uid, as the kernel reports them (0: not visible)."""
    if sys.platform == "darwin":
        credentials = sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, 76)  # struct xucred: version, uid, groups
        return 0, int(struct.unpack_from("=II", credentials)[1])
    pid, uid, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def secure_directory(directory: Path) -> None:
    """Create the directory for socket files; raise an error unless it is private to this user."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise SharedMemoryError(
            error.errno, f"cannot make the directory {directory}: {error.strerror}: set AIOSHM_RUNTIME_DIR to another"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise SharedMemoryError(
            errno.EACCES,
            f"{directory} must be a directory of this user with mode 0700: remove it, or set AIOSHM_RUNTIME_DIR",
        )


def _sweep(directory: Path) -> None:
    """Remove socket files of killed processes: no socket is bound to these files."""
    for path in directory.iterdir():
        with suppress(OSError):
            if stat.S_ISSOCK(path.lstat().st_mode) and not _is_bound(path):
                aside = path.rename(directory / f"-{threading.get_native_id()}")
                if _is_bound(aside):  # since just now: a restarted process has the same address
                    aside.rename(path)
                else:
                    aside.unlink()


def sweep_leftovers() -> None:
    """Remove socket files and segments of dead processes.

    Runs after processes were stopped, and when Python ends.
    """
    for directory in _directories:
        with suppress(OSError):
            _sweep(directory)
    if _uses_segments:
        for name in orphans():
            remove_orphan(name)


_directories: set[Path] = set()
_uses_segments = False
util.Finalize(None, sweep_leftovers, exitpriority=-1)  # below 0: after multiprocessing has joined all children


def _is_bound(path: Path) -> bool:
    """Return whether any process has bound a socket file (platform notes: socket files)."""
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.setblocking(False)
            if probe.connect_ex(str(path)) != errno.ECONNREFUSED:
                return True
    return False


_MAX_FDS = 3
_CLOSED = getattr(select, "POLLRDHUP", select.POLLHUP)  # POLLRDHUP on Linux
_RECV_FLAGS = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # SCM_RIGHTS does not keep the flag by itself
_PEEK = int(socket.MSG_PEEK)  # plain ints: `|` and `&` of an enumeration take 10 us
_CUT = int(socket.MSG_CTRUNC)
_PEEKS = sys.platform == "linux"  # whether MSG_PEEK returns duplicates of passed descriptors


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
        sock.recv(len(data))  # no more: a descriptor arrives with its own bytes only
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
    """Return whether the peer has closed, even if bytes are still unread."""
    poll = select.poll()
    poll.register(sock, _CLOSED)
    return bool(poll.poll(0))


class QuietSocket(socket.socket):
    """A socket without a `ResourceWarning`: the end that owns the socket warns."""

    def accept(self) -> tuple[QuietSocket, Any]:
        """Accept a connection as a socket of this class."""
        sock, address = super().accept()
        return QuietSocket(sock.family, sock.type, sock.proto, sock.detach()), address

    def __del__(self) -> None:
        # Without a free descriptor, `__init__` raises before it sets the attributes that `close` reads.
        if self.fileno() >= 0:
            self.close()


HAVE_EVENTFD = hasattr(os, "eventfd")


class Doorbell:
    """An eventfd by which one end wakes the peer."""

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
        """Call back on a loop after each ring. Does nothing once closed."""
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
