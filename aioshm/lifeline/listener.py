"""The writer's end of the lifelines: listen, admit readers, notice their signals and their death.

The kernel closes a dead process's sockets, so a death is noticed immediately. Admission and
departure take several short steps, one per iteration of the loop, so that the writer's calls continue.
`LifelineListener.look` does all steps.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from aioshm.errors import OutOfDescriptors, SharedMemoryError
from aioshm.lifeline import protocol
from aioshm.lifeline.connection import Connection, Host
from aioshm.lifeline.protocol import Hello
from aioshm.lifeline.sockets import HAVE_EVENTFD, Doorbell, QuietSocket, peer_credentials, remove, sockaddr
from aioshm.process.limits import is_out_of_descriptors, naming_limits, out_of_descriptors, why_no_descriptor
from aioshm.ring.layout import VERSION

logger: logging.Logger = logging.getLogger("aioshm.lifeline")

HELLO_TIMEOUT_S = 5.0
MAX_STRANGERS = 64
"""Connections without a greeting so far; a further connection drops the oldest."""

_ACCEPT_PAUSE_S = 0.2  # after a failed accept, where the socket stays readable


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
        self._connections: dict[socket.socket, Connection] = {}
        self._steps: deque[Connection] = deque()  # with pending steps, in their order
        self._resume: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None  # for the oldest missing greeting, or earlier
        self._spare = -1  # a descriptor to accept and refuse a reader when no other is left
        # Why the last reader was not admitted, if a descriptor was missing here.
        self.lacking: OutOfDescriptors | None = None
        # Called when a step is pending.
        self.hurry: Callable[[], None] = _nothing
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
        for timer in (self._resume, self._deadline):
            if timer is not None:
                timer.cancel()
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

    def _close_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _accept(self) -> bool:
        """Accept a connection; return whether there may be more."""
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
        if self._spare < 0:
            self._open_spare()
        pid, uid = peer_credentials(sock)
        if uid != os.geteuid():
            logger.debug("refused a connection of uid %d (pid %d)", uid, pid)
            sock.close()
            return True
        if len(self._connections) >= MAX_STRANGERS and len(strangers := self._strangers()) >= MAX_STRANGERS:
            strangers[0].give_up()  # the oldest
        self._connections[sock] = Connection(self, sock, pid)
        if self._deadline is None:
            self._deadline = self.loop.call_later(HELLO_TIMEOUT_S, self._drop_late)
        return True

    def _strangers(self) -> list[Connection]:
        """Return the connections without an accepted greeting, the oldest first."""
        return [connection for connection in self._connections.values() if connection.peer is None]

    def _drop_late(self) -> None:
        """Drop connections without a greeting in time. All share one timer."""
        self._deadline = None
        for connection in self._strangers():
            left = connection.since + HELLO_TIMEOUT_S - self.loop.time()
            if left > 0:
                self._deadline = self.loop.call_later(left, self._drop_late)
                return
            connection.give_up()

    def put_off(self, connection: Connection) -> None:
        """Do a connection's next step in a later iteration of the loop, after earlier steps."""
        self._steps.append(connection)
        if len(self._steps) == 1:
            self.loop.call_soon(self._step)
        self.hurry()

    def _step(self) -> None:
        """Do one step only, so that the writer waits for a short time."""
        while self._steps and not self._steps[0].has_step:  # done by `look`, or the connection was closed
            self._steps.popleft()
        if not self._steps:
            return
        connection = self._steps[0]  # stays in the queue, so that `put_off` schedules nothing
        try:
            connection.step()
        finally:
            self._steps.popleft()
            if self._steps:
                self.loop.call_soon(self._step)
                self.hurry()

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

    def _open_spare(self) -> None:
        with suppress(OSError):
            self._spare = os.dup(self._sock.fileno())

    def check(self, hello: Hello) -> None:
        protocol.check_hello(hello, VERSION, self._queue_id, self._token)

    def look(self) -> None:
        """Report arrivals and departures now, before the loop does."""
        for _ in range(MAX_STRANGERS):
            if not self._accept():
                break
        for connection in list(self._connections.values()):
            connection.look()  # a greeting may have come a moment after its connection was accepted

    def look_at(self, socks: Iterable[socket.socket]) -> bool:
        """Read connections of admitted readers; return whether any has ended."""
        ended = False
        for sock in list(socks):
            connection = self._connections.get(sock)
            if connection is not None and connection.peer is not None:
                connection.look()
                ended |= sock not in self._connections
        return ended

    def look_at_readers(self) -> None:
        """Report departed readers now, if the loop can still call back."""
        if self._started and not self.loop.is_closed():
            self.look_at(self._connections)

    def look_at_rank(self, rank: int) -> bool:
        """Report a departed reader of this rank now, before its successor; return whether there was one."""
        return self.look_at(
            sock
            for sock, other in self._connections.items()
            if other.peer is not None and rank in (other.peer.rank, protocol.ANY_RANK)
        )

    def forget(self, sock: socket.socket) -> None:
        self._connections.pop(sock, None)


def _nothing() -> None: ...
