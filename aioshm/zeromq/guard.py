"""Limits on what strangers make a bound ZeroMQ socket hold: peers that send more than their budget are hung up on.

ZeroMQ collects all parts of a message before it delivers any, and neither its high-water mark nor ``MAXMSGSIZE`` bounds
how many: two bytes from a peer are 64 in memory, for ever. So the bytes are counted where nobody can hold them back, in
the kernel (``TCP_INFO``, tcp(7)), for each connection that the socket accepts: its monitor has the descriptors. One
daemon thread of the process sleeps in ``epoll``, edge-triggered, until some peer sends something; while none does, all
of this costs nothing. It is a thread because a loop that ZeroMQ itself keeps busy could not cut the peer that does so.

Linux only. Elsewhere, and for peers over ipc and inproc, nothing is counted.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import socket as sockets
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import zmq

from aioshm.logs import LogLimiter
from aioshm.process.limits import naming_limits, out_of_threads
from aioshm.zeromq.monitor import Monitor

logger = logging.getLogger("aioshm.zeromq")

# How long the thread lets data gather before it looks again: what a peer can send in between is its head start.
_TURN_S = 0.0005
# The least time between two hang-ups: after each, ZeroMQ walks through all that anybody has subscribed to, and many at
# once would add up. Until its turn comes a peer is silenced.
_HANG_UP_S = 0.1
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLimits:
    """What the peers of one socket may send that does not become a message which the socket delivers.

    Attributes:
        burst_bytes: Of one peer at once.
        total_bytes: Of all peers together; whoever has sent most is hung up on first.
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
        self.cut_off = 0
        self._limits = limits
        self._name = name
        self._nudge = nudge
        self._lock = threading.Lock()
        self._put_by: deque[tuple[int, str]] = deque()
        self._peers: dict[int, _Peer] = {}
        self._gone: set[int] = set()
        self._total = 0.0
        self._limiter = LogLimiter(10.0)
        self._closed = False
        self._sentry: _Sentry | None = None
        try:
            with naming_limits("what guards sockets against strangers"):
                self._sentry = _Sentry.join(self)
        except BaseException:
            self.close()
            raise

    def nudge_with(self, nudge: Callable[[], None]) -> None:
        """Replace ``nudge``."""
        self._nudge = nudge

    def events(self) -> Iterator[tuple[int, str]]:
        with self._lock:
            self._drain()
            events = list(self._put_by)
            self._put_by.clear()
        yield from events

    def take_gone(self) -> set[int]:
        """Return the descriptors of connections that have ended since the last call; they may be in use again."""
        with self._lock:
            self._drain()
            gone, self._gone = self._gone, set()
            return gone

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

    def cut(self, fd: int, why: str) -> None:
        """Hang up on the peer behind ``fd``; nothing happens where it is gone, or its connection is not guarded."""
        with self._lock:
            peer = self._peers.get(fd)
            if peer is not None:
                self._cut(peer, why)

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
            if self._closed:
                return
            self._drain()
            nudge = self._nudge if self._put_by else None
        if nudge is not None:
            nudge()

    def hang_up(self, peer: _Peer) -> None:
        """Hang up on a peer that was silenced."""
        with self._lock, suppress(OSError), _Look(peer.fd) as look:
            if look.inode == peer.inode:
                look.hang_up()

    def check(self, fd: int) -> bool:
        """Count what the peer behind ``fd`` has sent; hang up on it, or on whoever has sent most, if that is too much.

        Returns:
            Whether nobody was hung up on.
        """
        with self._lock:
            if self._closed:
                return True
            self._drain()  # it may be another one by now
            peer, before = self._peers.get(fd), self.cut_off
            if peer is not None:
                self._count(peer)
            return self.cut_off == before

    def _drain(self) -> None:
        while not self._closed and (event := self._receive()) is not None:
            kind, value, endpoint = event
            if kind == zmq.EVENT_ACCEPTED:
                self._welcome(value, endpoint)
                continue
            if kind == zmq.EVENT_DISCONNECTED:
                self._forget(value)
                self._gone.add(value)
            self._put_by.append((kind, endpoint))

    def _welcome(self, fd: int, endpoint: str) -> None:
        self._forget(fd)
        if self._sentry is None:
            return
        try:
            with _Look(fd) as look:
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
            with _Look(peer.fd) as look:
                if look.inode != peer.inode:
                    self._forget(peer.fd)
                    return
                acknowledged, received = look.counts()
        except OSError:
            self._forget(peer.fd)
            return
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
            with _Look(peer.fd) as look:
                if look.inode != peer.inode:
                    return
                address = look.silence()
        except OSError:
            return
        if self._sentry is not None:
            self._sentry.condemn(peer, self)
        self.cut_off += 1
        held_back = self._limiter.admit()
        if held_back is not None:
            logger.warning(
                "%s: hung up on %s: %s (%d more since the last warning)", self._name, address, why, held_back
            )


class _Look:
    """A look at the connection behind a descriptor of ZeroMQ's, by a duplicate: it may be closed at any moment.

    Raises:
        OSError: It is closed, or not TCP.
    """

    def __init__(self, fd: int) -> None:
        own = os.dup(fd)
        try:
            self.inode = os.fstat(own).st_ino
            self._socket = sockets.socket(fileno=own)
        except BaseException:
            os.close(own)
            raise

    @property
    def port(self) -> str:
        """The port of this end."""
        return str(self._socket.getsockname()[1])

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

    def __enter__(self) -> _Look:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


class _Sentry:
    """The thread, and what it waits for; there as long as any monitor is."""

    _lock = threading.Lock()
    _current: _Sentry | None = None

    def __init__(self) -> None:
        self._epoll = select.epoll()
        try:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._epoll.register(self._bell, select.EPOLLIN)
        except BaseException:
            self._epoll.close()
            raise
        self._monitors: dict[int, GuardedMonitor] = {}  # by the descriptor of each one's own socket
        self._peers: dict[int, GuardedMonitor] = {}
        self._condemned: deque[tuple[GuardedMonitor, _Peer]] = deque()
        self._hung_up_at = 0.0

    @classmethod
    def join(cls, monitor: GuardedMonitor) -> _Sentry | None:
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
    def _start(cls) -> _Sentry:
        cls._current = sentry = cls()
        try:
            threading.Thread(target=sentry._work, name="aioshm-guard", daemon=True).start()
        except RuntimeError:
            cls._current = None
            sentry._end()
            raise out_of_threads("what guards sockets against strangers") from None
        return sentry

    @classmethod
    def forget(cls) -> None:
        """Start anew in a forked child, which has no such thread, whatever locks that held."""
        cls._lock = threading.Lock()
        sentry, cls._current = cls._current, None
        for monitor in sentry._monitors.values() if sentry is not None else ():
            monitor.forked()

    def leave(self, monitor: GuardedMonitor, fds: list[int]) -> None:
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

    def watch(self, fd: int, monitor: GuardedMonitor) -> None:
        """Have ``monitor.check`` called after every arrival of bytes at ``fd``."""
        self._peers[fd] = monitor
        try:
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)
        except (OSError, ValueError):  # gone again, or registered already; or the thread has ended
            return

    def unwatch(self, fd: int, monitor: GuardedMonitor) -> None:
        """Undo ``watch``."""
        if self._peers.get(fd) is monitor:
            del self._peers[fd]
            self._unregister(fd)

    def condemn(self, peer: _Peer, monitor: GuardedMonitor) -> None:
        """Have ``monitor.hang_up`` called for a peer, when its turn comes."""
        self._condemned.append((monitor, peer))
        with suppress(OSError):  # the thread has ended
            os.eventfd_write(self._bell, 1)

    def _hang_up(self) -> None:
        now = time.monotonic()
        if self._condemned and now - self._hung_up_at >= _HANG_UP_S:
            self._hung_up_at = now
            monitor, peer = self._condemned.popleft()
            monitor.hang_up(peer)

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
    os.register_at_fork(after_in_child=_Sentry.forget)
