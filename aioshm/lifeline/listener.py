"""The writer's side of the lifelines: listen, admit readers, notice their signals and their death.

The end of a connection is how death is noticed: at once, without a timer, and across pid namespaces, because the
kernel closes a dead process' sockets.

A writer that is busy stands still while a reader comes or goes. So either is done in steps, each short, of which a turn
of the loop does one: the writer's calls go on in between. `LifelineListener.look` does all steps at once.
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

from aioshm.errors import HandleError, NoPlaceVacant, OutOfDescriptors, SharedMemoryError
from aioshm.lifeline import protocol
from aioshm.lifeline.address import peer_credentials, remove, sockaddr
from aioshm.lifeline.bell import HAVE_EVENTFD, Bell
from aioshm.lifeline.peer import TOO_MANY_UNDER_WAY, Host, Peer
from aioshm.lifeline.protocol import BYE, PING, PONG, PROVEN, WAKE, Hello
from aioshm.lifeline.quiet import QuietSocket
from aioshm.process.limits import is_out_of_descriptors, naming_limits, out_of_descriptors, why_no_descriptor
from aioshm.ring.layout import VERSION

logger: logging.Logger = logging.getLogger("aioshm.lifeline")

HELLO_TIMEOUT_S = 5.0
ASK_S = 0.005
"""How often to look, while a newcomer waits, whether a reader that is being ended is gone."""
MAX_STRANGERS = 64
"""Connections that have not greeted yet; one more, and the oldest is dropped."""

_ACCEPT_PAUSE_S = 0.2  # after a failed accept, where the socket stays readable


class LifelineListener:
    """Accepts a queue's readers.

    Binding needs no event loop, so that a handle can exist before any loop runs; `start` begins to answer.

    Args:
        address: Where to listen, from `new_address`.
        queue_id: The queue.
        token: What a reader must know.
        backlog: How many readers may be waiting to be accepted.

    Attributes:
        bell: What readers ring, where there are eventfds.
        lacking: Why the last reader could not be admitted, if that was for want of a descriptor here.
        hurry: Called when there is a step to do in the loop's next turn, which is to come soon.

    Raises:
        SharedMemoryError: The socket cannot be bound.
        OutOfDescriptors: There are not enough.
    """

    def __init__(self, address: str, queue_id: bytes, token: bytes, backlog: int) -> None:
        self.address = address
        self._queue_id = queue_id
        self._token = token
        self._host: Host | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: dict[socket.socket, _Connection] = {}
        self._steps: deque[_Connection] = deque()  # whose next steps are to be done, in this order
        self._resume: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None  # when the oldest stranger has to have greeted, or before
        self._spare = -1  # lets one more reader in when there are no descriptors left, to tell it so
        self.lacking: OutOfDescriptors | None = None
        self.hurry: Callable[[], None] = _nothing
        self.bell: Bell | None = None
        with naming_limits(f"a writer that listens on {address}"):
            self._sock: socket.socket = QuietSocket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._listen(backlog)
                self.bell = Bell.create() if HAVE_EVENTFD else None
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
            self._sock.close()  # without the file, which may be another writer's
            raise SharedMemoryError(error.errno, f"cannot listen on {self.address}: {error.strerror}") from None

    def start(self, loop: asyncio.AbstractEventLoop, host: Host) -> None:
        """Begin to admit readers."""
        self._loop, self._host = loop, host
        loop.add_reader(self._sock.fileno(), self._accept)
        if self.bell is not None:
            loop.add_reader(self.bell.fd, self._rung)

    def close(self) -> None:
        """Say goodbye to every reader, those that wait to be admitted too, and stop listening. Idempotent."""
        for connection in list(self._connections.values()):
            connection.close(goodbye=True)
        for timer in (self._resume, self._deadline):
            if timer is not None:
                timer.cancel()
        if self._sock.fileno() >= 0:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._sock.fileno())
                if self.bell is not None:
                    self._loop.remove_reader(self.bell.fd)
            self._turn_away()
            self._sock.close()
            remove(self.address)
        if self.bell is not None:
            self.bell.close()
        self._close_spare()

    def _turn_away(self) -> None:
        """Tell the readers that nobody has accepted yet that the queue is closed, not that its writer has died."""
        self._close_spare()  # which leaves a descriptor for them, one after the other
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # so that none comes after the last one: connect() fails from here on
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

    def abandon(self) -> None:
        """Close the descriptors and nothing else: a forked child's copies would hide this process' death."""
        for sock in [self._sock, *self._connections]:
            if sock.fileno() >= 0:
                os.close(sock.detach())
        self._close_spare()  # it listens as well

    def _close_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _rung(self) -> None:
        assert self.bell is not None
        assert self._host is not None
        self.bell.drain()
        self._host.woken()

    def _accept(self) -> bool:
        """Accept a connection; return whether there may be more."""
        assert self._loop is not None
        assert self._host is not None
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError as error:
            if is_out_of_descriptors(error) and self._refuse_one(error):
                return True
            logger.warning("cannot accept a reader: %s", error)  # let others finish instead of turning in circles
            self._loop.remove_reader(self._sock.fileno())
            if self._resume is not None:
                self._resume.cancel()
            self._resume = self._loop.call_later(
                _ACCEPT_PAUSE_S, self._loop.add_reader, self._sock.fileno(), self._accept
            )
            return False
        sock.setblocking(False)
        if self._spare < 0:
            self._open_spare()
        pid, uid = peer_credentials(sock)
        if uid != os.geteuid():
            logger.debug("refused a connection of uid %d (pid %d)", uid, pid)
            sock.close()
            return True
        if len(self._connections) >= MAX_STRANGERS and len(strangers := self._strangers()) >= MAX_STRANGERS:
            strangers[0].give_up()  # the oldest
        self._connections[sock] = _Connection(self, self._loop, self._host, sock, pid)
        if self._deadline is None:
            self._deadline = self._loop.call_later(HELLO_TIMEOUT_S, self._drop_late)
        return True

    def _strangers(self) -> list[_Connection]:
        """Return the connections that have not greeted yet, the oldest first."""
        return [connection for connection in self._connections.values() if connection.peer is None]

    def _drop_late(self) -> None:
        """Drop those that have not greeted in time; one timer is for all of them."""
        assert self._loop is not None
        self._deadline = None
        for connection in self._strangers():
            left = connection.since + HELLO_TIMEOUT_S - self._loop.time()
            if left > 0:
                self._deadline = self._loop.call_later(left, self._drop_late)
                return
            connection.give_up()

    def put_off(self, connection: _Connection) -> None:
        """Do a connection's next step in the loop's next turn, or in a later one if others have steps to do before."""
        assert self._loop is not None
        self._steps.append(connection)
        if len(self._steps) == 1:
            self._loop.call_soon(self._step)
        self.hurry()

    def _step(self) -> None:
        """Do one step: more than one would keep the writer for longer."""
        assert self._loop is not None
        while self._steps and not self._steps[0].has_step:  # it was done meanwhile, or the connection was closed
            self._steps.popleft()
        if not self._steps:
            return
        connection = self._steps[0]  # which stays there, so that what it puts off schedules nothing
        try:
            connection.step()
        finally:
            self._steps.popleft()
            if self._steps:
                self._loop.call_soon(self._step)
                self.hurry()

    def _refuse_one(self, error: OSError) -> bool:
        """Tell the next reader that there is no descriptor for it, by means of the one that is kept for that."""
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
        """Note that there was no descriptor for a reader, and return what it is told."""
        self.lacking = out_of_descriptors("a reader that attaches", error.errno)
        reason = why_no_descriptor(error.errno, "its process")
        logger.warning("refused the reader of pid %d: %s", pid, reason)
        return reason

    def _open_spare(self) -> None:
        with suppress(OSError):
            self._spare = os.dup(self._sock.fileno())

    def check(self, hello: Hello) -> None:
        protocol.check_hello(hello, VERSION, self._queue_id, self._token)

    def look(self) -> None:
        """Report now what the loop would find out later: who has come, who has gone."""
        for _ in range(MAX_STRANGERS):
            if not self._accept():
                break
        for connection in list(self._connections.values()):
            connection.look()  # strangers, too: a greeting may have come a moment after its connection was accepted

    def look_at(self, socks: Iterable[socket.socket]) -> bool:
        """Read what has come over some connections of admitted readers; return whether any of them has ended."""
        ended = False
        for sock in list(socks):
            connection = self._connections.get(sock)
            if connection is not None and connection.peer is not None:
                connection.look()
                ended |= sock not in self._connections
        return ended

    def look_at_readers(self) -> None:
        """Report now which admitted readers have gone, if the loop can still be told."""
        if self._loop is not None and not self._loop.is_closed():
            self.look_at(self._connections)

    def look_at_rank(self, rank: int) -> bool:
        """Notice now, and return, if a reader of this rank has gone: its successor may be heard of before that."""
        return self.look_at(
            sock
            for sock, other in self._connections.items()
            if other.peer is not None and rank in (other.peer.rank, protocol.ANY_RANK)
        )

    def forget(self, sock: socket.socket) -> None:
        self._connections.pop(sock, None)


class _Connection:
    """One accepted connection: a stranger until its greeting was accepted, a peer from then on.

    Its steps: the greeting is read and checked; those who may have its place are looked at; it is admitted and told so;
    the writer is told. And when it ends: the end is seen; the host is told; it is closed.

    Attributes:
        peer: The reader, once it is admitted.
        since: When it was accepted, by the loop's clock.
    """

    def __init__(
        self,
        listener: LifelineListener,
        loop: asyncio.AbstractEventLoop,
        host: Host,
        sock: socket.socket,
        pid: int,
    ) -> None:
        self._listener = listener
        self._loop = loop
        self._host = host
        self._sock = sock
        self._pid = pid
        self._received = bytearray()
        self._hello: Hello | None = None
        self._said_goodbye = False
        self._bell: Bell | None = None
        self._watched = False  # whether the loop tells of what can be read
        self.peer: Peer | None = None
        self.since: float = loop.time()
        self._waiting: HandleError | None = None  # what it is told unless a reader ends that has what this one wants
        self._asking: asyncio.TimerHandle | None = None
        self._next: Callable[[], None] | None = None
        self._put_off(self.read)  # what came with it: readers greet when they connect

    # Steps

    def _put_off(self, step: Callable[[], None]) -> None:
        """Do a step in the loop's next turn; until then nothing more is read."""
        self._next = step
        self._listener.put_off(self)

    @property
    def has_step(self) -> bool:
        """Whether there is something to do that was put off."""
        return self._next is not None

    def step(self) -> None:
        """Do what was put off, if anything was."""
        step, self._next = self._next, None
        if step is not None:
            step()

    def look(self) -> None:
        """Do all that there is to do, and read what there is to read."""
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
        if self._asking is not None:
            self._asking.cancel()
        if not self._loop.is_closed():
            self._unwatch()
            if self.peer is not None and self.peer.is_handing_over:
                self._loop.remove_writer(self._sock.fileno())
        self._listener.forget(self._sock)
        self._sock.close()
        if self._bell is not None:
            self._bell.close()

    def _watch(self) -> None:
        if not self._watched:
            self._watched = True
            self._loop.add_reader(self._sock.fileno(), self.read)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._loop.remove_reader(self._sock.fileno())

    def read(self) -> None:
        # Until nothing is left: where last words come together with a reset, uvloop calls this only once (libuv takes
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
                self._unwatch()  # the end stays there to be read
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
        self._put_off(self._close_ended)  # first: whatever the host does of it
        self._host.gone(self.peer, self._said_goodbye)

    def _close_ended(self) -> None:
        assert self.peer is not None
        self.close()
        self._host.announce()

    def _signals(self, peer: Peer, data: bytes) -> None:
        if PING in data:  # one answer to all of them
            peer.send(PONG)
        for signal in (data[i : i + 1] for i in range(len(data))):
            if signal == PROVEN:
                self._host.proven(peer)
            elif signal == WAKE:
                self._host.woken()
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
        """Notice who has gone that had what this reader wants, or whether it has gone itself; then admit it."""
        assert self._hello is not None
        if self._has_gone():
            self.close()
            self._host.missed(self._hello, self._said_goodbye)
            return
        self._listener.look_at_rank(self._hello.rank)
        if self._sock.fileno() < 0:  # what the host did of that has closed this connection, too
            return
        if self._bell is None and self._listener.bell is not None:
            try:
                self._bell = Bell.create()
            except OSError as error:  # nobody but this reader has to do without
                self._refuse(self._listener.lack(self._pid, error))
                return
        self._put_off(self._admit)

    def _admit(self) -> None:
        hello = self._hello
        assert hello is not None
        try:
            welcome, fds = self._host.admit(hello)
        except HandleError as error:
            if self._host.awaits_end(hello):
                self._waiting, self._asking = error, self._loop.call_later(ASK_S, self._find_place)
                self._watch()
            elif self._listener.look_at_rank(hello.rank):  # one has ended after it was asked for
                self._put_off(self._find_place)
            else:
                self._turn_down(error)
            return
        bell = None
        if welcome.bells:
            assert self._bell is not None
            assert self._listener.bell is not None
            bell = self._bell
            fds = [*fds, bell.fd, self._listener.bell.fd]
        if not self._send_all(protocol.pack(welcome), fds):  # first of all: signals that follow must come after it
            self._host.withdrawn(welcome)
            self._refuse("the system does not let its process pass on more descriptors now (unix(7), ETOOMANYREFS)")
            return
        self._waiting = None
        self.peer = Peer(self._loop, self._sock, hello, self._pid, bell)
        if welcome.rank != protocol.ANY_RANK:
            self.peer.rank = welcome.rank
        self._listener.lacking = None
        self._host.attached(self.peer)
        if self._next is None and self._sock.fileno() >= 0:
            self._put_off(self._announce)

    def _announce(self) -> None:
        """Let a new reader be known to those who wait for it, and listen to it."""
        assert self.peer is not None
        self._watch()
        self._host.announce()
        if self._received:
            self._signals(self.peer, bytes(self._received))
            self._received.clear()

    def _turn_down(self, error: HandleError) -> None:
        logger.debug("refused pid %d: %s", self._pid, error)
        self._refuse(str(error), full=isinstance(error, NoPlaceVacant))

    def give_up(self) -> None:
        """Hang up on a stranger that has had its time, unless its greeting only was not read, or answered, yet."""
        self.look()
        if self.peer is not None:
            return
        if self._waiting is None:
            self.close()
        else:
            self._turn_down(self._waiting)

    def _has_gone(self) -> bool:
        """Return whether the reader has hung up, or died, before its greeting was read."""
        said, there = bytes(self._received), True
        try:
            more = self._sock.recv(protocol.MAX_GREETING_BYTES, socket.MSG_PEEK)
            said, there = said + more, bool(more)
        except BlockingIOError:
            pass
        except OSError:
            there = False
        self._said_goodbye = BYE in said
        return self._said_goodbye or not there

    def _refuse(self, reason: str, *, full: bool = False) -> None:
        self._send_all(protocol.pack(protocol.Refusal(reason, full=full)), [])
        self.close()

    def _send_all(self, data: bytes, fds: list[int]) -> bool:
        """Send a greeting and descriptors; return False if the system will not pass those on now."""
        # A greeting is far smaller than an empty socket buffer, so it goes in one piece or the peer is gone.
        try:
            socket.send_fds(self._sock, [data], fds)
        except OSError as error:
            logger.debug("lifeline of pid %d: %s", self._pid, error)
            return error.errno not in TOO_MANY_UNDER_WAY
        return True


def _nothing() -> None: ...
