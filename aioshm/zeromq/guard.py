"""Limits on what strangers make a bound ZeroMQ socket hold: peers that send more than their budget are hung up on.

ZeroMQ collects all parts of a message before it delivers any, and neither its high-water mark nor ``MAXMSGSIZE`` bounds
how many: two bytes from a peer are 64 in memory, for ever. So the bytes are counted where nobody can hold them back, in
the kernel (``TCP_INFO``, tcp(7)), for each connection that the socket accepts: its monitor has the descriptors. One
daemon thread of the process sleeps in ``epoll``, edge-triggered, until some peer sends something; while none does, all
of this costs nothing; see ``sentry.py``.

Linux only. Elsewhere, and for peers over ipc and inproc, nothing is counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import zmq

from aioshm.logs import LogLimiter
from aioshm.process.limits import naming_limits
from aioshm.zeromq.connection import Look
from aioshm.zeromq.monitor import Monitor
from aioshm.zeromq.sentry import Sentry

logger: logging.Logger = logging.getLogger("aioshm.zeromq")

# Of ZMTP 3, which is sent as a whole to those who have begun with theirs.
_GREETING_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLimits:
    """What the peers of one socket may send that does not become a message which the socket delivers.

    Attributes:
        burst_bytes: Of one peer at once.
        total_bytes: Of all peers together; the one that has sent most is hung up on first.
        rate: Bytes a second that each may send besides, for heartbeats.
        free_bytes: What each may send for nothing, for the handshake.
        admitted_after: Bytes sent *to* a peer after which it is trusted and not counted any more; None never trusts. A
            server says more than 250 bytes only to those who have passed the CURVE handshake.
    """

    burst_bytes: int = 1 << 13
    total_bytes: int = 1 << 20
    rate: float = 32.0
    free_bytes: int = 256
    admitted_after: int | None = None


class _Peer:
    """One connection: its descriptor, which is ZeroMQ's own, and the inode that tells it from a later one."""

    __slots__ = ("at", "credit", "fd", "inode", "level", "received")

    def __init__(self, fd: int, inode: int, free_bytes: int) -> None:
        self.fd = fd
        self.inode = inode
        self.level = 0.0
        self.received = free_bytes
        self.credit = 0
        self.at = time.monotonic()


class GuardedMonitor(Monitor):
    """A monitor that also holds the peers of its socket to limits; to be made before the socket is bound.

    Args:
        socket: The socket, of one thread as always; only the thread of this module reads its monitor besides.
        limits: What its peers may send.
        name: What warnings call the socket.
        nudge: Called in the guard's thread when it has put something by that ``read`` or ``events`` will return.

    Attributes:
        cut_off: Peers that were hung up on.

    Raises:
        OutOfDescriptors, OutOfThreads: No descriptors or no thread can be had.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        limits: PeerLimits,
        *,
        name: str = "",
        nudge: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(socket, also=zmq.EVENT_ACCEPTED)
        self.cut_off: int = 0
        self._open: dict[int, bool] = {}  # descriptors of connections, and whether they have been greeted
        self._greeted = 0  # of those that are open
        self._succeeded = self._accounted = 0  # handshakes, and those of which it is known whose they were
        self._departed = 0
        self._failed = False
        self._limits = limits
        self._name = name
        self._nudge = nudge
        self._lock = threading.Lock()
        self._put_by: deque[tuple[int, int, str]] = deque()
        self._peers: dict[int, _Peer] = {}
        self._total = 0.0
        self._limiter = LogLimiter(10.0)
        self._closed = False
        self._sentry: Sentry | None = None
        try:
            with naming_limits("what guards sockets against strangers"):
                self._sentry = Sentry.join(self)
        except BaseException:
            self.close()
            raise

    def events(self) -> Iterator[tuple[int, int, str]]:
        with self._lock:
            self._drain()
            events = list(self._put_by)
            self._put_by.clear()
        yield from events

    @property
    def peers(self) -> int:
        """How many peers have finished the handshake and are there."""
        return self._greeted if self._sentry is not None else self._succeeded - self._accounted

    def take_gone(self) -> set[int]:
        with self._lock:
            nudge = self._drain()
            gone = super().take_gone()
        nudge()
        return gone

    def is_open(self, fd: int) -> bool:
        """Return whether ``fd`` is that of a connection which has not ended."""
        with self._lock:
            nudge = self._drain()
            is_open = fd in self._open
        nudge()
        return is_open

    def take_departed(self) -> int:
        """Return how many peers that had finished the handshake have left since the last call."""
        with self._lock:
            nudge = self._drain()
            departed, self._departed = self._departed, 0
        nudge()
        return departed

    def credit(self, fd: int, nbytes: int) -> None:
        """Note that a message of so many bytes was delivered, which came over ``fd`` (``zmq.SRCFD`` of its frame)."""
        with self._lock:
            peer = self._peers.get(fd)
            if peer is None:
                return
            peer.credit += nbytes
            if peer.credit > self._limits.burst_bytes:  # the thread is late: what it would count is counted here
                self._count(peer)
                peer.credit = min(peer.credit, self._limits.burst_bytes)
            self._settle(peer)

    def cut(self, fd: int, why: str) -> bool:
        """Hang up on the peer behind ``fd``, if it is not gone and its connection is guarded; return whether it was."""
        with self._lock:
            peer = self._peers.get(fd)
            if peer is not None:
                self._cut(peer, why)
            return peer is not None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._sentry is not None:
                self._sentry.leave(self, [peer.fd for peer in self._peers.values()])
            self._peers.clear()
            super().close()

    def forked(self) -> None:
        """Go on without the guard, in a forked child."""
        self._lock = threading.Lock()
        self._sentry = None

    # The guard's thread calls

    def look(self) -> None:
        """Read the monitor."""
        with self._lock:
            nudge = self._drain()
        nudge()

    def check(self, fd: int) -> bool:
        """Count what the peer behind ``fd`` has sent; if that is too much, hang up on the one that has sent most.

        Returns:
            Whether nobody was hung up on.
        """
        with self._lock:
            nudge = self._drain()  # it may be another one by now
            peer, before = self._peers.get(fd), self.cut_off
            if peer is not None:
                self._count(peer)
            calm = self.cut_off == before
        nudge()
        return calm

    def _hang_up(self, peer: _Peer) -> None:
        """Hang up on a peer that was silenced; in the guard's thread."""
        with self._lock, suppress(OSError), Look(peer.fd) as look:
            if look.inode == peer.inode:
                look.hang_up()

    def _drain(self) -> Callable[[], None]:
        """Read the monitor; return what is to be called without the lock.

        Whoever reads takes away the sign that there was something to read, so nobody else is told by the descriptor.
        """
        before = len(self._put_by)
        while not self._closed and (event := self._receive()) is not None:
            kind, value, endpoint = event
            if kind == zmq.EVENT_ACCEPTED:
                self._welcome(value, endpoint)
                continue
            if kind == zmq.EVENT_DISCONNECTED:
                self._forget(value)
                self._gone.add(value)
                if self._has_failed(value):
                    unspecified = int(zmq.PROTOCOL_ERROR_ZMTP_UNSPECIFIED)
                    self._put_by.append((zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, unspecified, endpoint))
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._succeeded += 1
            else:
                self._failed = True  # the end of that connection follows
            self._put_by.append((kind, value, endpoint))
        return self._nudge if self._nudge is not None and len(self._put_by) > before else _nothing

    def _has_failed(self, fd: int) -> bool:
        """Return whether a connection that has ended was one whose handshake failed without an event that says so.

        ZeroMQ has none for those that do not begin to speak ZMTP where it asks who may come in (RFC 27). Nor do its
        events say whose handshake has succeeded; the greeting, which only those are sent to the end, does.
        """
        greeted, said_so, self._failed = self._open.pop(fd, False), self._failed, False
        if greeted:
            self._greeted -= 1
        elif said_so:
            return False
        elif self._sentry is not None and self._succeeded - self._accounted <= len(self._open) - self._greeted:
            return True  # whatever handshakes have succeeded may be of those who are there and not looked at yet
        else:  # it has gone before it was looked at
            self._accounted += 1
        self._departed += 1
        return False

    def _welcome(self, fd: int, endpoint: str) -> None:
        self._forget(fd)
        self._greeted -= self._open.get(fd, False)
        self._open[fd] = False
        if self._sentry is None:
            return
        try:
            with Look(fd) as look:
                if look.port != endpoint.rpartition(":")[2]:  # it is gone, and the number is another descriptor's
                    return
                look.counts()
                self._peers[fd] = peer = _Peer(fd, look.inode, self._limits.free_bytes)
        except OSError:  # not TCP, or gone again
            return
        self._sentry.watch(fd, self)
        self._count(peer)

    def _forget(self, fd: int) -> None:
        peer = self._peers.pop(fd, None)
        if peer is not None:
            self._total -= peer.level

    def _count(self, peer: _Peer) -> None:
        limits, now = self._limits, time.monotonic()
        try:
            with Look(peer.fd) as look:
                if look.inode != peer.inode:
                    self._forget(peer.fd)
                    return
                acknowledged, received = look.counts()
        except OSError:
            self._forget(peer.fd)
            return
        if acknowledged >= _GREETING_BYTES and self._open.get(peer.fd) is False:
            self._open[peer.fd] = True
            self._greeted += 1
            self._accounted += 1
            if self._sentry is not None:
                self._sentry.relax(peer.fd, self)
        if limits.admitted_after is not None and acknowledged > limits.admitted_after:
            self._forget(peer.fd)
            if self._sentry is not None:
                self._sentry.unwatch(peer.fd, self)
            return
        before = peer.level
        peer.level = max(0.0, peer.level - limits.rate * (now - peer.at)) + max(0, received - peer.received)
        peer.received, peer.at = max(received, peer.received), now
        self._total += peer.level - before
        self._settle(peer)
        if peer.level > limits.burst_bytes:
            self._cut(peer, f"it has sent {peer.level:.0f} bytes that make no message")
        while self._total > limits.total_bytes and self._peers:
            most = max(self._peers.values(), key=lambda one: one.level)
            self._cut(most, f"of too many bytes that make no message it has sent {most.level:.0f}, the most of all")

    def _settle(self, peer: _Peer) -> None:
        used = min(peer.level, peer.credit)
        peer.level -= used
        peer.credit -= int(used)
        self._total -= used

    def _cut(self, peer: _Peer, why: str) -> None:
        self._forget(peer.fd)
        try:
            with Look(peer.fd) as look:
                if look.inode != peer.inode:
                    return
                address = look.silence()
        except OSError:
            return
        if self._sentry is not None:
            self._sentry.condemn(partial(self._hang_up, peer))
        self.cut_off += 1
        held_back = self._limiter.admit()
        if held_back is not None:
            logger.warning(
                "%s: hung up on %s: %s (%d more since the last warning)", self._name, address, why, held_back
            )


def _nothing() -> None: ...
