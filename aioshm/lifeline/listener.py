"""The writer's end of the lifelines: listen, admit readers, notice their signals and their death.

The kernel closes a dead process's sockets, so a death is noticed immediately.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from aioshm.errors import HandleError, NoPlaceVacant, OutOfDescriptors, SharedMemoryError
from aioshm.lifeline import protocol
from aioshm.lifeline.protocol import BYE, EVICTED, GO, OVERFLOW, PING, PONG, PROVEN, WAKE, Hello, Welcome
from aioshm.lifeline.sockets import HAVE_EVENTFD, Doorbell, QuietSocket, peer_credentials, remove, sockaddr
from aioshm.process.limits import is_out_of_descriptors, naming_limits, out_of_descriptors, why_no_descriptor
from aioshm.ring.layout import VERSION

logger: logging.Logger = logging.getLogger("aioshm.lifeline")

HELLO_TIMEOUT_S = 5.0
MAX_STRANGERS = 64
"""Connections without a greeting so far; a further connection drops the oldest."""

ASK_S = 0.005
"""How often to check, while a new reader waits, whether a dying reader is gone."""

_ACCEPT_PAUSE_S = 0.2  # after a failed accept, where the socket stays readable
_PASS_PAUSE_S = 0.01  # before the next try to pass a descriptor

_TOO_MANY_UNDER_WAY = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)
"""The system does not pass on more descriptors now: unix(7)."""


class Host(Protocol):
    """The writer, called on its loop. `admit` raises `HandleError` to refuse a reader."""

    def admit(self, hello: Hello) -> tuple[Welcome, list[int]]: ...

    # Whether the reader at the wanted rank is dying.
    def awaits_end(self, hello: Hello) -> bool: ...

    # A reader was gone before its greeting was read, and was not admitted.
    def missed(self, hello: Hello, said_goodbye: bool) -> None: ...

    def attached(self, peer: Peer) -> None: ...

    # Wakes calls that wait for readers, or for their end.
    def announce(self) -> None: ...

    # An admitted reader could not be sent the answer.
    def withdrawn(self, welcome: Welcome) -> None: ...

    # A reader has the ring mapped.
    def proven(self, peer: Peer) -> None: ...

    def gone(self, peer: Peer, said_goodbye: bool) -> None: ...

    def woken(self) -> None: ...


class Peer:
    """One connection: of a stranger until the host admits it, then of a reader.

    An admission and an end are a few steps, in one iteration of the loop each: the writer sends between them.
    """

    def __init__(self, listener: LifelineListener, sock: socket.socket, seen_pid: int) -> None:
        self.admitted: bool = False
        self.rank: int = protocol.ANY_RANK
        self.pid: int = 0
        self.slow: str = "block"
        self.seen_pid = seen_pid
        self._listener = listener
        self._loop = listener.loop
        self._sock = sock
        self._received = bytearray()
        self._hello: Hello | None = None
        self._refusal: HandleError | None = None  # unless the dying reader at the wanted rank ends in time
        self._recheck: asyncio.TimerHandle | None = None
        self._deadline = self._loop.call_later(HELLO_TIMEOUT_S, self.give_up)
        self._said_goodbye = False
        self._doorbell: Doorbell | None = None
        self._outbox: deque[int] = deque()
        self._next: Callable[[], None] | None = None  # the next step; until then nothing is read
        self._loop.add_reader(sock.fileno(), self.read)

    # For the host

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

    def hand_over(self, fd: int) -> None:
        """Pass a descriptor, in the order of the calls. It must stay open as long as this peer is connected."""
        self._outbox.append(fd)
        if len(self._outbox) == 1:
            self._empty_outbox()

    def _empty_outbox(self) -> None:
        if self._sock.fileno() < 0:
            return
        self._loop.remove_writer(self._sock.fileno())
        while self._outbox:
            try:
                socket.send_fds(self._sock, [OVERFLOW], [self._outbox[0]])
            except BlockingIOError:  # the reader has not read for a long time
                self._loop.add_writer(self._sock.fileno(), self._empty_outbox)
                return
            except OSError as error:
                if error.errno in _TOO_MANY_UNDER_WAY:
                    self._loop.call_later(_PASS_PAUSE_S, self._empty_outbox)
                else:
                    self._outbox.clear()  # the end of file follows
                return
            self._outbox.popleft()

    def send(self, signal: bytes) -> None:
        with suppress(OSError):  # the end of file follows
            self._sock.send(signal)

    # For the listener

    def close(self, goodbye: bool = False) -> None:
        if self._sock.fileno() < 0:
            return
        if goodbye and self.admitted:
            self.send(BYE)
        elif goodbye:
            self._send_all(protocol.pack(protocol.CLOSED), [])
        self._deadline.cancel()
        if self._recheck is not None:
            self._recheck.cancel()
        self._next = None
        if not self._loop.is_closed():
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
        self._listener.forget(self._sock)
        self._sock.close()
        if self._doorbell is not None:
            self._doorbell.close()

    def _put_off(self, step: Callable[[], None]) -> None:
        self._next = step
        self._loop.call_soon(self._step)

    def _step(self) -> None:
        step = self._next
        self._next = None
        if step is not None:  # else `look` has done it
            step()
            self.read()

    def look(self) -> None:
        """Read everything that has arrived, and do all steps now."""
        self.read()
        while self._next is not None:
            self._step()

    def read(self) -> None:
        # Until nothing is left: if the last bytes come together with a reset, uvloop calls this only once (libuv takes
        # EPOLLERR for a bad descriptor and stops).
        while self._next is None and self._sock.fileno() >= 0 and self._read_some():
            pass

    def _read_some(self) -> bool:
        """Read once; return whether there may be more."""
        try:
            data = self._sock.recv(protocol.MAX_GREETING_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            data = b""
            if error.errno != errno.ECONNRESET:
                logger.debug("lifeline of pid %d: %s", self.seen_pid, error)
        if not data and self.admitted:
            self._put_off(self._end)
        elif not data:
            self.close()
        elif self.admitted:
            self._signals(data)
        else:
            self._received += data
            self._greet()
        return True

    def _end(self) -> None:
        self._put_off(self._close_ended)  # before the host, which may raise
        self._listener.host.gone(self, self._said_goodbye)

    def _close_ended(self) -> None:
        self.close()
        self._listener.host.announce()

    def _signals(self, data: bytes) -> None:
        if PING in data:  # one answer to all questions
            self.send(PONG)
        for signal in (data[i : i + 1] for i in range(len(data))):
            if signal == PROVEN:
                self._listener.host.proven(self)
            elif signal == WAKE:
                self._listener.host.woken()
            elif signal == BYE:
                self._said_goodbye = True

    def _greet(self) -> None:
        if self._hello is not None:  # waits for the end of a dying reader
            return
        try:
            body = protocol.take_frame(self._received)
            if body is None:
                return
            hello = protocol.unpack_hello(body)
            self._listener.check(hello)
        except HandleError as error:
            self._turn_down(error)
            return
        self._hello = hello
        self.rank = hello.rank
        self.pid = hello.pid
        self.slow = hello.slow
        self._put_off(self._find_place)

    def _find_place(self) -> None:
        """Poll for departures at the wanted rank, and of this reader; then admit this reader."""
        hello = self._hello
        assert hello is not None
        if self._sock.fileno() < 0:  # closed before the second try
            return
        if self._has_gone():
            self.close()
            self._listener.host.missed(hello, self._said_goodbye)
            return
        self._listener.look_at_rank(hello.rank)
        if self._sock.fileno() < 0:  # the host has closed this connection, too
            return
        try:
            if self._doorbell is None and self._listener.doorbell is not None:
                self._doorbell = Doorbell.create()
        except OSError as error:  # only this reader is refused
            self._refuse(self._listener.lack(self.seen_pid, error))
            return
        self._put_off(self._admit)

    def _admit(self) -> None:
        hello = self._hello
        assert hello is not None
        try:
            welcome, fds = self._listener.host.admit(hello)
        except HandleError as error:
            # A reader may also have ended since the poll above.
            if self._listener.host.awaits_end(hello) or self._listener.look_at_rank(hello.rank):
                self._refusal = error
                self._recheck = self._loop.call_later(ASK_S, self._find_place)
            else:
                self._turn_down(error)
            return
        if welcome.bells:
            assert self._doorbell is not None
            assert self._listener.doorbell is not None
            fds = [*fds, self._doorbell.fd, self._listener.doorbell.fd]
        if not self._send_all(protocol.pack(welcome), fds):  # before any signal
            self._listener.host.withdrawn(welcome)
            self._refuse("the system does not pass on more descriptors now (unix(7), ETOOMANYREFS)")
            return
        if welcome.rank != protocol.ANY_RANK:
            self.rank = welcome.rank
        self._deadline.cancel()
        self.admitted = True
        self._listener.lacking = None
        self._put_off(self._announce)
        self._listener.host.attached(self)

    def _announce(self) -> None:
        """Wake calls that wait for readers."""
        self._listener.host.announce()
        self._signals(bytes(self._received))

    def give_up(self) -> None:
        """Close a connection that sent no greeting in time."""
        self.look()
        if self.admitted:
            return
        if self._refusal is None:
            self.close()
        else:
            self._turn_down(self._refusal)

    def _has_gone(self) -> bool:
        """Return whether the reader has hung up, or died, before its greeting was read."""
        more = b""
        hung_up = False
        try:
            more = self._sock.recv(protocol.MAX_GREETING_BYTES, socket.MSG_PEEK)
            hung_up = not more
        except BlockingIOError:
            pass
        except OSError:
            hung_up = True
        self._said_goodbye = BYE in self._received + more
        return self._said_goodbye or hung_up

    def _turn_down(self, error: HandleError) -> None:
        logger.debug("refused pid %d: %s", self.seen_pid, error)
        self._refuse(str(error), full=isinstance(error, NoPlaceVacant))

    def _refuse(self, reason: str, *, full: bool = False) -> None:
        self._send_all(protocol.pack(protocol.Refusal(reason, full=full)), [])
        self.close()

    def _send_all(self, data: bytes, fds: list[int]) -> bool:
        """Send a greeting and descriptors; return False if the system does not pass on descriptors now."""
        # A greeting is far smaller than an empty socket buffer: it goes in one piece, or the peer is gone.
        try:
            socket.send_fds(self._sock, [data], fds)
        except OSError as error:
            logger.debug("lifeline of pid %d: %s", self.seen_pid, error)
            return error.errno not in _TOO_MANY_UNDER_WAY
        return True


class LifelineListener:
    """Accepts a queue's readers. Binding needs no event loop; `start` begins to answer."""

    def __init__(self, address: str, queue_id: bytes, token: bytes, backlog: int) -> None:
        self.address = address
        self._queue_id = queue_id
        self._token = token
        # From `start` on.
        self.host: Host
        self.loop: asyncio.AbstractEventLoop
        self._started = False
        self._connections: dict[socket.socket, Peer] = {}
        self._resume: asyncio.TimerHandle | None = None
        self._spare = -1  # a descriptor to accept and refuse a reader when no other is left
        # Why the last reader was not admitted, if a descriptor was missing here.
        self.lacking: OutOfDescriptors | None = None
        self.doorbell: Doorbell | None = None
        with naming_limits(f"a writer that listens on {address}"):
            self._sock: socket.socket = QuietSocket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._listen(backlog)
                if HAVE_EVENTFD:
                    self.doorbell = Doorbell.create()
                self._spare = os.dup(self._sock.fileno())
            except BaseException:
                self.close()
                raise

    def _listen(self, backlog: int) -> None:
        self._sock.setblocking(False)
        try:
            self._sock.bind(sockaddr(self.address))
            self._sock.listen(backlog)
        except OSError as error:
            self._sock.close()  # not the file, which may belong to another writer
            raise SharedMemoryError(error.errno, f"cannot listen on {self.address}: {error.strerror}") from None

    def start(self, loop: asyncio.AbstractEventLoop, host: Host) -> None:
        """Begin to admit readers."""
        self.loop = loop
        self.host = host
        self._started = True
        loop.add_reader(self._sock.fileno(), self._accept)
        if self.doorbell is not None:
            self.doorbell.watch(loop, host.woken)

    def close(self) -> None:
        """Send a goodbye to every reader, stop listening. Idempotent."""
        for connection in list(self._connections.values()):
            connection.close(goodbye=True)
        if self._resume is not None:
            self._resume.cancel()
        if self._sock.fileno() >= 0:
            if self._started and not self.loop.is_closed():
                self.loop.remove_reader(self._sock.fileno())
                if self.doorbell is not None:
                    self.doorbell.unwatch(self.loop)
            self._turn_away()
            self._sock.close()
            remove(self.address)
        if self.doorbell is not None:
            self.doorbell.close()
        self._close_spare()

    def _turn_away(self) -> None:
        """Report a closed queue, not a dead writer, to readers that were not accepted yet."""
        self._close_spare()  # leaves a descriptor to accept them one by one
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # connect() fails from here on
        while True:
            try:
                sock, _ = self._sock.accept()
            except ConnectionAbortedError:
                continue
            except OSError:
                return
            with sock, suppress(OSError):
                sock.setblocking(False)
                if peer_credentials(sock)[1] == os.geteuid():
                    sock.send(protocol.pack(protocol.CLOSED))

    def detach_after_fork(self) -> None:
        """Close the descriptors and nothing else: a forked child's copies would hide the death of this process."""
        for sock in [self._sock, *self._connections]:
            if sock.fileno() >= 0:
                os.close(sock.detach())
        self._close_spare()  # a duplicate of the listening socket

    def _open_spare(self) -> None:
        if self._spare < 0:
            with suppress(OSError):
                self._spare = os.dup(self._sock.fileno())

    def _close_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _accept(self) -> bool:
        """Accept a connection; return whether there may be more."""
        if self._sock.fileno() < 0:  # the host has closed this listener when another reader came or left
            return False
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError as error:
            if is_out_of_descriptors(error) and self._refuse_one(error):
                return True
            logger.warning("cannot accept a reader: %s", error)  # pause, so that the loop does not spin
            self.loop.remove_reader(self._sock.fileno())
            if self._resume is not None:
                self._resume.cancel()
            self._resume = self.loop.call_later(
                _ACCEPT_PAUSE_S, self.loop.add_reader, self._sock.fileno(), self._accept
            )
            return False
        sock.setblocking(False)
        self._open_spare()
        pid, uid = peer_credentials(sock)
        if uid != os.geteuid():
            logger.debug("refused a connection of uid %d (pid %d)", uid, pid)
            sock.close()
            return True
        peer = Peer(self, sock, pid)
        self._connections[sock] = peer
        if len(self._connections) > MAX_STRANGERS:
            strangers = [each for each in self._connections.values() if not each.admitted]
            if len(strangers) > MAX_STRANGERS:
                strangers[0].give_up()  # the oldest
        return True

    def _refuse_one(self, error: OSError) -> bool:
        """Refuse the next reader for lack of a descriptor, by the spare descriptor."""
        if self._spare < 0:
            return False
        self._close_spare()
        try:
            sock, _ = self._sock.accept()
        except OSError:  # another thread was faster
            return False
        else:
            with sock, suppress(OSError):
                pid, uid = peer_credentials(sock)
                if uid == os.geteuid():
                    sock.setblocking(False)
                    sock.send(protocol.pack(protocol.Refusal(self.lack(pid, error))))
        finally:
            self._open_spare()
        return True

    def lack(self, pid: int, error: OSError) -> str:
        """Note that a descriptor for a reader was missing, and return the refusal."""
        self.lacking = out_of_descriptors("a reader that attaches", error.errno)
        reason = why_no_descriptor(error.errno, "its process")
        logger.warning("refused the reader of pid %d: %s", pid, reason)
        return reason

    def check(self, hello: Hello) -> None:
        protocol.check_hello(hello, VERSION, self._queue_id, self._token)

    def look(self) -> None:
        """Report arrivals and departures now, before the loop does."""
        for _ in range(MAX_STRANGERS):
            if not self._accept():
                break
        self._look_at(self._connections.values())  # a greeting may come a moment after its connection is accepted

    def look_at_readers(self) -> None:
        """Report departed readers now, if the loop can still call back."""
        if self._started and not self.loop.is_closed():
            self._look_at(peer for peer in self._connections.values() if peer.admitted)

    def look_at_rank(self, rank: int) -> bool:
        """Report a departed reader of this rank now, before its successor; return whether there was one."""
        before = len(self._connections)
        self._look_at(
            peer for peer in self._connections.values() if peer.admitted and rank in (peer.rank, protocol.ANY_RANK)
        )
        return len(self._connections) < before

    def _look_at(self, peers: Iterable[Peer]) -> None:
        for peer in list(peers):
            peer.look()

    def forget(self, sock: socket.socket) -> None:
        self._connections.pop(sock, None)
