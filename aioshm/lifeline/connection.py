"""One connection to a writer: greeting, admission, signals and end, each in short steps."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from aioshm.errors import HandleError, NoPlaceVacant
from aioshm.lifeline import protocol
from aioshm.lifeline.protocol import BYE, EVICTED, GO, OVERFLOW, PING, PONG, PROVEN, WAKE, Hello, Welcome
from aioshm.lifeline.sockets import Doorbell

TOO_MANY_UNDER_WAY = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)
"""The system does not pass on more descriptors now: unix(7)."""

_PAUSE_S = 0.01  # before the next try to pass a descriptor


class Host(Protocol):
    """The writer, called on its loop. `admit` raises `HandleError` to refuse a reader."""

    def admit(self, hello: Hello) -> tuple[Welcome, list[int]]: ...

    # Whether the reader at the wanted rank is dying.
    def awaits_end(self, hello: Hello) -> bool: ...

    # A reader was gone before its greeting was read, and was not admitted.
    def missed(self, hello: Hello, said_goodbye: bool) -> None: ...

    def attached(self, peer: Peer) -> None: ...

    # Wakes calls that wait for readers, or for their end; one iteration of the loop after the event.
    def announce(self) -> None: ...

    # An admitted reader could not be sent the answer.
    def withdrawn(self, welcome: Welcome) -> None: ...

    # A reader has the ring mapped.
    def proven(self, peer: Peer) -> None: ...

    def gone(self, peer: Peer, said_goodbye: bool) -> None: ...

    def woken(self) -> None: ...


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
        """Notify the reader of its eviction; a reader whose socket is full finds the end of file."""
        try:
            self._sock.send(EVICTED)
        except BlockingIOError:
            # Not closed: only the reader's own end of file shows that it writes no more to the ring.
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the end of file follows

    @property
    def is_handing_over(self) -> bool:
        """Whether descriptors wait for room in the socket."""
        return bool(self._outbox)

    def hand_over(self, fd: int) -> None:
        """Pass a descriptor, in the order of the calls. It must stay open as long as this peer is connected."""
        self._outbox.append(fd)
        if len(self._outbox) == 1:
            self._empty_outbox()

    def _empty_outbox(self) -> None:
        if self._sock.fileno() < 0:
            return
        while self._outbox:
            try:
                socket.send_fds(self._sock, [OVERFLOW], [self._outbox[0]])
            except BlockingIOError:  # the reader has not read for a long time
                self._loop.add_writer(self._sock.fileno(), self._empty_outbox)
                return
            except OSError as error:
                if error.errno in TOO_MANY_UNDER_WAY:
                    self._loop.remove_writer(self._sock.fileno())
                    self._loop.call_later(_PAUSE_S, self._empty_outbox)
                    return
                self._outbox.clear()  # the end of file follows
                break
            self._outbox.popleft()
        self._loop.remove_writer(self._sock.fileno())

    def send(self, signal: bytes) -> None:
        try:
            self._sock.send(signal)
        except OSError:
            pass  # the end of file follows


if TYPE_CHECKING:
    from aioshm.lifeline.listener import LifelineListener

logger: logging.Logger = logging.getLogger("aioshm.lifeline")

ASK_S = 0.005
"""How often to check, while a new reader waits, whether a dying reader is gone."""


class Connection:
    """One accepted connection: a stranger until its greeting is accepted, then a peer."""

    def __init__(self, listener: LifelineListener, sock: socket.socket, pid: int) -> None:
        self._listener = listener
        self._sock = sock
        self._pid = pid
        self._received = bytearray()
        self._hello: Hello | None = None
        self._said_goodbye = False
        self._doorbell: Doorbell | None = None
        self._watched = False  # whether the loop watches the socket
        self.peer: Peer | None = None
        self.since: float = listener.loop.time()
        self._waiting: HandleError | None = None  # the refusal, unless the dying reader at the wanted rank ends in time
        self._recheck: asyncio.TimerHandle | None = None
        self._next: Callable[[], None] | None = None
        self._put_off(self.read)  # readers greet when they connect

    # Steps

    def _put_off(self, step: Callable[[], None]) -> None:
        """Do a step in the next iteration of the loop; read nothing more until then."""
        self._next = step
        self._listener.put_off(self)

    @property
    def has_step(self) -> bool:
        """Whether a step was put off."""
        return self._next is not None

    def step(self) -> None:
        """Do the step that was put off, if any."""
        step = self._next
        self._next = None
        if step is not None:
            step()

    def look(self) -> None:
        """Do all pending steps, and read everything that has arrived."""
        while self._sock.fileno() >= 0:
            if self._next is None:
                self.read()
            if self._next is None:
                return
            self.step()

    def close(self, goodbye: bool = False) -> None:
        if self._sock.fileno() < 0:
            return
        self._next = None
        if goodbye and self.peer is not None:
            self.peer.send(BYE)
        elif goodbye:
            self._send_all(protocol.pack(protocol.CLOSED), [])
        if self._recheck is not None:
            self._recheck.cancel()
        if not self._listener.loop.is_closed():
            self._unwatch()
            if self.peer is not None and self.peer.is_handing_over:
                self._listener.loop.remove_writer(self._sock.fileno())
        self._listener.forget(self._sock)
        self._sock.close()
        if self._doorbell is not None:
            self._doorbell.close()

    def _watch(self) -> None:
        if not self._watched:
            self._watched = True
            self._listener.loop.add_reader(self._sock.fileno(), self.read)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._listener.loop.remove_reader(self._sock.fileno())

    def read(self) -> None:
        # Until nothing is left: if the last bytes come together with a reset, uvloop calls this only once (libuv takes
        # EPOLLERR for a bad descriptor and stops).
        while self._next is None and self._sock.fileno() >= 0:
            if not self._read_some():
                break
        if self._next is None and self._sock.fileno() >= 0:
            self._watch()

    def _read_some(self) -> bool:
        """Read once; return whether there may be more."""
        try:
            data = self._sock.recv(protocol.MAX_GREETING_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            data = b""
            if error.errno != errno.ECONNRESET:
                logger.debug("lifeline of pid %d: %s", self._pid, error)
        if not data:
            if self.peer is None:
                self.close()
            else:
                self._unwatch()  # the end of file stays readable
                self._put_off(self._end)
            return False
        if self.peer is None:
            self._received += data
            self._greet()
        else:
            self._signals(self.peer, data)
        return True

    def _end(self) -> None:
        assert self.peer is not None
        self._put_off(self._close_ended)  # before the host, which may raise
        self._listener.host.gone(self.peer, self._said_goodbye)

    def _close_ended(self) -> None:
        assert self.peer is not None
        self.close()
        self._listener.host.announce()

    def _signals(self, peer: Peer, data: bytes) -> None:
        if PING in data:  # one answer to all questions
            peer.send(PONG)
        for signal in (data[i : i + 1] for i in range(len(data))):
            if signal == PROVEN:
                self._listener.host.proven(peer)
            elif signal == WAKE:
                self._listener.host.woken()
            elif signal == BYE:
                self._said_goodbye = True

    def _greet(self) -> None:
        if self._waiting is not None:
            return
        try:
            body = protocol.take_frame(self._received)
            if body is None:
                return
            self._hello = protocol.unpack_hello(body)
            self._listener.check(self._hello)
        except HandleError as error:
            self._turn_down(error)
            return
        self._put_off(self._find_place)

    def _find_place(self) -> None:
        """Poll for departures at the wanted rank, or of this reader; then admit this reader."""
        assert self._hello is not None
        if self._has_gone():
            self.close()
            self._listener.host.missed(self._hello, self._said_goodbye)
            return
        self._listener.look_at_rank(self._hello.rank)
        if self._sock.fileno() < 0:  # the host has closed this connection, too
            return
        if self._doorbell is None and self._listener.doorbell is not None:
            try:
                self._doorbell = Doorbell.create()
            except OSError as error:  # only this reader is refused
                self._refuse(self._listener.lack(self._pid, error))
                return
        self._put_off(self._admit)

    def _admit(self) -> None:
        hello = self._hello
        assert hello is not None
        try:
            welcome, fds = self._listener.host.admit(hello)
        except HandleError as error:
            if self._listener.host.awaits_end(hello):
                self._waiting = error
                self._recheck = self._listener.loop.call_later(ASK_S, self._find_place)
                self._watch()
            elif self._listener.look_at_rank(hello.rank):  # a reader has ended since `_find_place`
                self._put_off(self._find_place)
            else:
                self._turn_down(error)
            return
        doorbell = None
        if welcome.bells:
            assert self._doorbell is not None
            assert self._listener.doorbell is not None
            doorbell = self._doorbell
            fds = [*fds, doorbell.fd, self._listener.doorbell.fd]
        if not self._send_all(protocol.pack(welcome), fds):  # before any signal
            self._listener.host.withdrawn(welcome)
            self._refuse("the system does not pass on more descriptors now (unix(7), ETOOMANYREFS)")
            return
        self._waiting = None
        self.peer = Peer(self._listener.loop, self._sock, hello, self._pid, doorbell)
        if welcome.rank != protocol.ANY_RANK:
            self.peer.rank = welcome.rank
        self._listener.lacking = None
        self._listener.host.attached(self.peer)
        if self._next is None and self._sock.fileno() >= 0:
            self._put_off(self._announce)

    def _announce(self) -> None:
        """Wake calls that wait for readers, and watch the new reader."""
        assert self.peer is not None
        self._watch()
        self._listener.host.announce()
        if self._received:
            self._signals(self.peer, bytes(self._received))
            self._received.clear()

    def _turn_down(self, error: HandleError) -> None:
        logger.debug("refused pid %d: %s", self._pid, error)
        self._refuse(str(error), full=isinstance(error, NoPlaceVacant))

    def give_up(self) -> None:
        """Close a connection that sent no greeting in time."""
        self.look()
        if self.peer is not None:
            return
        if self._waiting is None:
            self.close()
        else:
            self._turn_down(self._waiting)

    def _has_gone(self) -> bool:
        """Return whether the reader has hung up, or died, before its greeting was read."""
        try:
            more = self._sock.recv(protocol.MAX_GREETING_BYTES, socket.MSG_PEEK)
            hung_up = not more
        except BlockingIOError:
            more = b""
            hung_up = False
        except OSError:
            more = b""
            hung_up = True
        self._said_goodbye = BYE in self._received + more
        return self._said_goodbye or hung_up

    def _refuse(self, reason: str, *, full: bool = False) -> None:
        self._send_all(protocol.pack(protocol.Refusal(reason, full=full)), [])
        self.close()

    def _send_all(self, data: bytes, fds: list[int]) -> bool:
        """Send a greeting and descriptors; return False if the system does not pass on descriptors now."""
        # A greeting is far smaller than an empty socket buffer: it goes in one piece, or the peer is gone.
        try:
            socket.send_fds(self._sock, [data], fds)
        except OSError as error:
            logger.debug("lifeline of pid %d: %s", self._pid, error)
            return error.errno not in TOO_MANY_UNDER_WAY
        return True
