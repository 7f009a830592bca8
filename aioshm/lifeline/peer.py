"""An admitted reader as the writer knows it, and the writer's interface to lifelines."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from contextlib import suppress
from typing import Protocol

from aioshm.lifeline.doorbell import Doorbell
from aioshm.lifeline.protocol import EVICTED, GO, OVERFLOW, SUBSCRIBE, WAKE, Hello, Welcome

TOO_MANY_UNDER_WAY = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)
"""The system does not take a descriptor for another process now: unix(7)."""

_PAUSE_S = 0.01  # after that


class Host(Protocol):
    """The writer's answers and callbacks. Called on its loop."""

    def admit(self, hello: Hello) -> tuple[Welcome, list[int]]:
        """Return the answer to a checked greeting with the descriptors that go along, or raise `HandleError`."""

    def awaits_end(self, hello: Hello) -> bool:
        """Return whether the reader at the wanted rank is being ended, and soon gone."""

    def missed(self, hello: Hello, said_goodbye: bool) -> None:
        """Note that a reader had gone before its greeting was read; it is not admitted."""

    def attached(self, peer: Peer) -> None:
        """Note a reader that was admitted and has its answer."""

    def announce(self) -> None:
        """Notify those who wait for readers, or for their end; called a turn of the loop later."""

    def withdrawn(self, welcome: Welcome) -> None:
        """Note a reader that was admitted but could not be answered."""

    def proven(self, peer: Peer) -> None:
        """Note that a reader has the ring mapped."""

    def gone(self, peer: Peer, said_goodbye: bool) -> None:
        """Note that a reader's connection has ended."""

    def woken(self) -> None:
        """Note that a reader rang for the writer."""


class Peer:
    """An admitted reader."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        hello: Hello,
        seen_pid: int,
        doorbell: Doorbell | None,
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._doorbell = doorbell
        self._outbox: deque[int] = deque()
        self.rank: int = hello.rank
        self.pid: int = hello.pid
        self.slow: str = hello.slow
        self.seen_pid = seen_pid

    def ring(self) -> None:
        """Wake the reader."""
        if self._doorbell is not None:
            self._doorbell.ring()
        else:
            self.send(WAKE)

    def go(self) -> None:
        """Notify the reader that every reader is ready."""
        self.send(GO)

    def evict(self) -> None:
        """Notify the reader of its eviction; one whose socket is full finds the end of file."""
        try:
            self._sock.send(EVICTED)
        except BlockingIOError:
            # Not closed: only its own end of file tells that it writes to the ring no more, and its place is free.
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # as below

    def call_to_subscribe(self) -> None:
        """Notify the reader that messages begin to come over ZeroMQ, too."""
        self.send(SUBSCRIBE)

    @property
    def is_handing_over(self) -> bool:
        """True while descriptors wait for room in the socket."""
        return bool(self._outbox)

    def hand_over(self, fd: int) -> None:
        """Pass a descriptor on, in the order of the calls. It must stay open as long as this peer is connected."""
        self._outbox.append(fd)
        if len(self._outbox) == 1:
            self._empty_outbox()

    def _empty_outbox(self) -> None:
        if self._sock.fileno() < 0:
            return
        while self._outbox:
            try:
                socket.send_fds(self._sock, [OVERFLOW], [self._outbox[0]])
            except BlockingIOError:  # it has not looked for a long time
                self._loop.add_writer(self._sock.fileno(), self._empty_outbox)
                return
            except OSError as error:
                if error.errno in TOO_MANY_UNDER_WAY:
                    self._loop.remove_writer(self._sock.fileno())
                    self._loop.call_later(_PAUSE_S, self._empty_outbox)
                    return
                self._outbox.clear()  # its end of file is coming
                break
            self._outbox.popleft()
        self._loop.remove_writer(self._sock.fileno())

    def send(self, signal: bytes) -> None:
        try:
            self._sock.send(signal)
        except OSError:
            pass  # its end of file is on its way
