"""The thread that watches the peers of guarded sockets, one for all of a process.

It is a thread because a loop that ZeroMQ itself keeps busy could not cut the peer that does so.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import zmq

from aioshm.errors import OutOfThreads
from aioshm.process.threads import start_thread

# How long the thread lets data gather before it looks again: what a peer can send in between is its head start.
_TURN_S = 0.0005
# The least time between two hang-ups: after each, ZeroMQ walks through all subscriptions, and many at
# once would add up. Until its turn comes a peer is silenced.
_HANG_UP_S = 0.1


class Watched(Protocol):
    """A monitor whose socket's peers are watched. Its methods are called in the thread, `forked` in a forked child."""

    @property
    def pair(self) -> zmq.Socket[bytes]: ...

    def look(self) -> None:
        """Read the monitor."""

    def check(self, fd: int) -> bool:
        """Count what the peer behind ``fd`` has sent; return whether nobody was hung up on."""

    def forked(self) -> None:
        """Go on without being watched."""


class Sentry:
    """The thread, and what it waits for; there as long as any monitor is."""

    _lock = threading.Lock()
    _current: Sentry | None = None

    def __init__(self) -> None:
        self._epoll = select.epoll()
        try:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._epoll.register(self._bell, select.EPOLLIN)
        except BaseException:
            self._epoll.close()
            raise
        self._monitors: dict[int, Watched] = {}  # by the descriptor of each one's own socket
        self._peers: dict[int, Watched] = {}
        self._condemned: deque[Callable[[], None]] = deque()
        self._hung_up_at = 0.0

    @classmethod
    def join(cls, monitor: Watched) -> Sentry | None:
        """Guard a socket's peers from now on; None where that cannot be done."""
        if not hasattr(select, "epoll"):
            return None
        with cls._lock:
            sentry = cls._current or cls._start()
            fd = int(monitor.pair.getsockopt(zmq.FD))
            sentry._monitors[fd] = monitor
            sentry._epoll.register(fd, select.EPOLLIN)
            return sentry

    @classmethod
    def _start(cls) -> Sentry:
        cls._current = sentry = cls()
        try:
            start_thread(sentry._work, name="aioshm-guard", what="what guards sockets against strangers")
        except OutOfThreads:
            cls._current = None
            sentry._end()
            raise
        return sentry

    @classmethod
    def forget(cls) -> None:
        """Start anew in a forked child, which has no such thread, whatever locks that held."""
        cls._lock = threading.Lock()
        sentry, cls._current = cls._current, None
        for monitor in sentry._monitors.values() if sentry is not None else ():
            monitor.forked()

    def leave(self, monitor: Watched, fds: list[int]) -> None:
        """Let go of a monitor, and of its peers; idempotent."""
        with self._lock:
            if self._current is not self:  # ended, or the parent's
                return
            for fd in fds:
                self.unwatch(fd, monitor)
            for fd in [fd for fd, one in self._monitors.items() if one is monitor]:
                del self._monitors[fd]
                self._unregister(fd)
            if not self._monitors:
                type(self)._current = None  # first: the thread that is woken looks at it, maybe at once
                os.eventfd_write(self._bell, 1)

    def watch(self, fd: int, monitor: Watched) -> None:
        """Have ``monitor.check`` called after every arrival of bytes at ``fd``; see also `relax`.

        An arrival is told of only if the descriptor is still ready for something when the thread looks, and ZeroMQ's
        reads quickly (``ep_send_events`` in Linux' fs/eventpoll.c asks once more). It stays ready to be written to.
        """
        self._peers[fd] = monitor
        try:
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
        except (OSError, ValueError):  # gone again, or registered already; or the thread has ended
            return

    def relax(self, fd: int, monitor: Watched) -> None:
        """Have ``monitor.check`` called only after arrivals that are not read yet: among many there always are such.

        From then on it is not called whenever there is room again in a full buffer.
        """
        if self._peers.get(fd) is monitor:
            with suppress(OSError, ValueError):  # gone, or the thread has ended
                self._epoll.modify(fd, select.EPOLLIN | select.EPOLLET)

    def unwatch(self, fd: int, monitor: Watched) -> None:
        """Undo ``watch``."""
        if self._peers.get(fd) is monitor:
            del self._peers[fd]
            self._unregister(fd)

    def condemn(self, hang_up: Callable[[], None]) -> None:
        """Have a peer hung up on, when its turn comes."""
        self._condemned.append(hang_up)
        with suppress(OSError):  # the thread has ended
            os.eventfd_write(self._bell, 1)

    def _hang_up(self) -> None:
        now = time.monotonic()
        if self._condemned and now - self._hung_up_at >= _HANG_UP_S:
            self._hung_up_at = now
            self._condemned.popleft()()

    def _unregister(self, fd: int) -> None:
        try:
            self._epoll.unregister(fd)
        except (OSError, ValueError):  # closed: the kernel has done it; or the thread has ended
            return

    def _work(self) -> None:
        while type(self)._current is self:
            calm = True
            for fd, _ in self._epoll.poll(_HANG_UP_S if self._condemned else None):
                if fd == self._bell:
                    os.eventfd_read(self._bell)
                    continue
                monitor = self._monitors.get(fd)
                if monitor is not None:
                    monitor.look()
                elif (monitor := self._peers.get(fd)) is not None:
                    calm &= monitor.check(fd)
            self._hang_up()
            if calm:
                time.sleep(_TURN_S)
        with self._lock:  # whoever lets it end may have to ring yet
            self._end()

    def _end(self) -> None:
        self._epoll.close()
        os.close(self._bell)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Sentry.forget)
