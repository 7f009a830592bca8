"""The addresses of lifelines, and the check of the peer's user id."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import sys
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

from aioshm.config import Options
from aioshm.errors import SharedMemoryError
from aioshm.process.limits import naming_limits
from aioshm.ring.segment import orphans, remove_orphan

_PATH_BYTES = 103 if sys.platform == "darwin" else 107  # sun_path without its final zero (unix(7))
_SOL_LOCAL, _LOCAL_PEERCRED = 0, 1  # macOS: sys/un.h


def new_address(options: Options, queue_id: bytes, kind: str) -> str:
    """Return an address for a queue's socket: ``@name`` for an abstract one, else a path."""
    global _uses_segments
    _uses_segments = _uses_segments or options.backing == "named"
    if options.lifeline == "abstract":
        return f"@aioshm-{queue_id.hex()}.{kind}"
    directory = Path(options.runtime_dir)
    with naming_limits(f"looking into {directory}"):
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
    """Return the path of a queue's socket that has a file, for those who connect."""
    return str(Path(options.runtime_dir) / f"{queue_id.hex()}.{kind}")


def sockaddr(address: str) -> str:
    """Return the form of an address that ``socket.bind`` and ``connect`` take."""
    return "\0" + address[1:] if address.startswith("@") else address


def remove(address: str) -> None:
    """Remove the address' file, if it has one."""
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
    """Create the directory for socket files; refuse one that is not this user's alone."""
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
            f"{directory} must be a directory of this user's with mode 0700: remove it, or set AIOSHM_RUNTIME_DIR",
        )


def _sweep(directory: Path) -> None:
    """Remove the socket files of processes that were killed: no socket is bound to them any more."""
    for path in directory.iterdir():
        try:
            if stat.S_ISSOCK(path.lstat().st_mode) and not _is_bound(path):
                path.unlink(missing_ok=True)
        except OSError:
            continue


def sweep_leftovers() -> None:
    """Remove dead processes' files and segments; runs after a stop, and when Python ends."""
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
