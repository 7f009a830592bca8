"""A process on Linux that has nothing which macOS has not, as far as Python can take it away."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import signal
import socket
import struct
import sys
from types import FrameType
from typing import Any

_MISSING = {
    os: (
        "eventfd", "eventfd_read", "eventfd_write", "memfd_create", "pidfd_open", "pipe2", "posix_fallocate",
        "sched_getaffinity", "sched_setaffinity", "splice", "timerfd_create", "timerfd_settime", "timerfd_settime_ns",
        "waitid",
    ),
    fcntl: tuple(name for name in dir(fcntl) if name.startswith(("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL"))),
    mmap: ("MAP_NORESERVE", "MAP_POPULATE"),
    select: ("epoll", "POLLRDHUP"),
    signal: ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo"),
    socket: (
        "MSG_CMSG_CLOEXEC", "SCM_CREDENTIALS", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "SO_PASSCRED", "SO_PEERCRED",
        "TCP_INFO", "TCP_USER_TIMEOUT",
    ),
}  # fmt: skip
_SOL_LOCAL, _LOCAL_PEERCRED = 0, 1
_LINUX_ONLY = ("/proc", "/dev/shm", "/sys")


def pretend() -> None:
    """Take away what is missing on macOS, and say that this is macOS. For good."""
    peer_credentials = socket.SOL_SOCKET, socket.SO_PEERCRED
    getsockopt = socket.socket.getsockopt

    def with_xucred(self: socket.socket, level: int, option: int, *size: int) -> Any:
        if (level, option, *size) != (_SOL_LOCAL, _LOCAL_PEERCRED, 76):
            return getsockopt(self, level, option, *size)
        _pid, uid, gid = struct.unpack("iII", getsockopt(self, *peer_credentials, 12))
        return struct.pack("=IIhxx16I", 0, uid, 1, gid, *[0] * 15)

    socket.socket.getsockopt = with_xucred  # type: ignore[method-assign, assignment]
    for module, names in _MISSING.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    sys.modules.update(ray=None, torch=None)  # would ask the platform for more than this
    sys.platform = "darwin"
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Hide the files of Linux from aioshm, not from what it uses, which knows the true platform."""
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(_LINUX_ONLY):
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and "/psutil/" not in frame.f_code.co_filename:
            if "/aioshm/" in frame.f_code.co_filename:
                raise FileNotFoundError(2, "No such file or directory: Linux only", str(arguments[0]))
            frame = frame.f_back
