"""The reader's end of its lifeline: dial, be admitted, receive descriptors; then signals, and the writer's death."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from time import monotonic
from typing import Protocol

from aioshm.errors import HandleError, PeerDied, QueueGone
from aioshm.lifeline import protocol
from aioshm.lifeline.protocol import BYE, EVICTED, GO, OVERFLOW, PING, PONG, PROVEN, WAKE, Hello, Welcome
from aioshm.lifeline.sockets import (
    Doorbell,
    QuietSocket,
    has_hung_up,
    peer_credentials,
    receive,
    receive_next,
    sockaddr,
)
from aioshm.process.limits import naming_limits, out_of_descriptors, shortage

_RETRY_S = 0.01  # while the writer's backlog is full
_ROOM_PAUSE_S = 0.05  # between checks for room for a descriptor


class LifelineOwner(Protocol):
    """The reader, called on its loop."""

    def on_go(self) -> None: ...

    def on_wake(self) -> None: ...

    def on_gone(self, said_goodbye: bool) -> None: ...

    # None: the kernel dropped the descriptor, which the owner takes over otherwise.
    def on_descriptor(self, fd: int | None) -> None: ...

    # A descriptor waits in the socket, since this process has too many.
    def on_held_back(self) -> None: ...

    def on_evicted(self) -> None: ...


class Lifeline:
    """A reader's connection to its writer. Made by `attach`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        welcome: Welcome,
        fds: list[int],
        early: bytes,
        writer_pid: int,
    ) -> None:
        self._loop = loop
        self._owner: LifelineOwner
        self._sock = sock
        self._early = early
        self.welcome = welcome
        # The pid in this process's pid namespace; 0: not visible.
        self.writer_pid = writer_pid
        self.said_goodbye: bool = False
        self._asked: float | None = None  # time of the first question without an answer
        self._asking = False  # whether a question is on its way
        self._held_back: asyncio.TimerHandle | None = None
        self._segment_fd: int | None = None
        # The eventfd that the writer writes to; None: the writer sends a byte over the lifeline.
        self.doorbell: Doorbell | None = None
        self._writer_doorbell: Doorbell | None = None
        fds = list(fds)
        if welcome.segment:
            self._segment_fd = fds.pop(0)
        if welcome.bells:
            self.doorbell = Doorbell(fds.pop(0))
            self._writer_doorbell = Doorbell(fds.pop(0))

    def start(self, owner: LifelineOwner) -> None:
        """Start to report events to the owner."""
        self._owner = owner
        self._loop.add_reader(self._sock.fileno(), self._readable)
        if self.doorbell is not None:
            self.doorbell.watch(self._loop, owner.on_wake)
        if self._early:
            self._signals(self._early)

    def take_segment(self) -> int:
        """Return the segment's descriptor; the caller owns it from here on."""
        fd = self._segment_fd
        assert fd is not None
        self._segment_fd = None
        return fd

    def prove(self) -> None:
        """Report to the writer that the ring is mapped here."""
        self._send(PROVEN)

    def has_closed(self) -> bool:
        """Return whether the writer has said goodbye; call this before `start`."""
        data = b""
        with suppress(OSError):
            data = self._sock.recv(protocol.MAX_GREETING_BYTES, socket.MSG_PEEK)
        return BYE in self._early + data

    def ring(self) -> None:
        """Wake the writer."""
        if self._writer_doorbell is not None:
            self._writer_doorbell.ring()
        else:
            self._send(WAKE)

    def ask(self) -> None:
        """Ask whether the writer's event loop runs, unless a question is on its way already."""
        if self._asked is None:
            self._asked = monotonic()
        if not self._asking:
            self._asking = True  # before sending: the loop may read the answer before a waiting thread continues
            sent = False
            try:
                sent = self._send(PING)
            finally:
                if not sent:  # a full socket: the writer does not read it
                    self._asking = False

    @property
    def silent_s(self) -> float | None:
        """Seconds since the first question without an answer; None: no question is open."""
        asked = self._asked
        if asked is None:
            return None
        return monotonic() - asked

    @property
    def holds_back(self) -> bool:
        """Whether a descriptor, and every byte after it, waits until the socket has room."""
        return self._held_back is not None

    def close(self) -> None:
        """Send the goodbye and hang up. Idempotent."""
        self._hang_up(goodbye=True)
        if self._segment_fd is not None:
            os.close(self.take_segment())
        if self.doorbell is not None:
            self.doorbell.unwatch(self._loop)
            self.doorbell.close()
        if self._writer_doorbell is not None:
            self._writer_doorbell.close()

    def detach_after_fork(self) -> None:
        """Close the socket and nothing else: a forked child's copy would hide the death of this process."""
        if self._sock.fileno() >= 0:
            os.close(self._sock.detach())

    def _hang_up(self, goodbye: bool) -> None:
        if self._sock.fileno() < 0:
            return
        if goodbye:
            self._send(BYE)
        if self._held_back is not None:
            self._held_back.cancel()
            self._held_back = None
        if not self._loop.is_closed():
            self._loop.remove_reader(self._sock.fileno())
        self._sock.close()

    def _send(self, signal: bytes) -> bool:
        try:
            self._sock.send(signal)
        except OSError:
            return False  # the writer is gone: the end of file follows
        return True

    def look(self) -> None:
        """Report arrived signals without waiting for the loop."""
        self._readable()

    def _readable(self) -> None:
        if self._held_back is not None and self._sock.fileno() >= 0:
            self._held_back.cancel()
            self._held_back = None
            self._loop.add_reader(self._sock.fileno(), self._readable)
        while self._sock.fileno() >= 0:  # until nothing is left: see Connection.read
            try:
                data, fds, without_room = receive_next(self._sock)
            except BlockingIOError:
                return
            except OSError:
                data = b""
                fds = []
                without_room = False
            for fd in fds:
                self._owner.on_descriptor(fd)
            for _ in range(data.count(OVERFLOW) - len(fds)):  # the kernel dropped these descriptors
                self._owner.on_descriptor(None)
            if data:
                self._signals(data)
            if without_room:
                self._hold_back()
                return
            if not data:
                self._hang_up(goodbye=False)
                self._owner.on_gone(self.said_goodbye)

    def _hold_back(self) -> None:
        """Read again after a pause: nothing notifies of room for a descriptor, and the socket stays readable."""
        self._loop.remove_reader(self._sock.fileno())
        self._held_back = self._loop.call_later(_ROOM_PAUSE_S, self._readable)
        if has_hung_up(self._sock):  # the end of file is behind the descriptor
            self._owner.on_gone(self.said_goodbye)
        self._owner.on_held_back()

    def _signals(self, data: bytes) -> None:
        if GO in data:
            self._owner.on_go()
        if EVICTED in data:
            self._owner.on_evicted()
        if PONG in data:
            self._asked = None
            self._asking = False
        if BYE in data:
            self.said_goodbye = True
        if WAKE in data:
            self._owner.on_wake()


def dial(address: str, hello: Hello) -> socket.socket | None:
    """Connect to a queue's writer and send the greeting; None while the backlog is full."""
    with naming_limits(f"a reader of the queue at {address}"):
        sock = QuietSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(sockaddr(address))
        _pid, uid = peer_credentials(sock)
        if uid != os.geteuid():
            raise HandleError(f"the queue at {address} belongs to another user (uid {uid})")
        try:
            sock.send(protocol.pack(hello))
        except BrokenPipeError:
            if not _has_answered(sock):  # else the writer has sent a refusal
                raise
    except BlockingIOError:
        sock.close()
        return None
    except BaseException as error:
        sock.close()
        if isinstance(error, (FileNotFoundError, ConnectionRefusedError, BrokenPipeError)):
            raise QueueGone(f"nobody listens at {address}: the queue's writer is gone") from None
        if isinstance(error, OSError):
            raise HandleError(f"cannot connect to {address}: {error.strerror or error}") from None
        raise
    return sock


def hang_up(sock: socket.socket) -> None:
    """Send a goodbye and close a dialed socket, so that the writer stops waiting for the reader."""
    try:
        sock.send(BYE)
    except OSError:
        pass  # the writer is gone, or has hung up
    sock.close()


def _has_answered(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


async def attach(address: str, hello: Hello, sock: socket.socket | None) -> Lifeline:
    """Wait for the writer's admission; takes over ``sock``. Cancelling closes everything."""
    loop = asyncio.get_running_loop()
    while sock is None:
        await asyncio.sleep(_RETRY_S)
        sock = dial(address, hello)
    pid, _uid = peer_credentials(sock)
    received = bytearray()
    fds: list[int] = []
    try:
        while (body := protocol.take_frame(received)) is None:
            await _until_readable(loop, sock)
            try:
                data, new_fds, cut = receive(sock)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                data = b""
                new_fds = []
                cut = False
            fds += new_fds
            received += data
            if cut:  # the kernel dropped descriptors: this process has too many
                raise out_of_descriptors(f"a reader of the queue at {address}")
            if not data:
                raise PeerDied(-1, pid, "writer", "while this reader was attaching")
        welcome = protocol.unpack_answer(body)
        expected = welcome.segment + 2 * welcome.bells
        if len(fds) != expected:
            raise shortage(f"a reader of the queue at {address}") or HandleError(
                f"the writer sent {len(fds)} descriptors instead of {expected}"
            )
    except BaseException:
        hang_up(sock)
        for fd in fds:
            os.close(fd)
        raise
    return Lifeline(loop, sock, welcome, fds, bytes(received), pid)


async def _until_readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    readable = loop.create_future()

    def wake() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(sock.fileno(), wake)
    try:
        await readable
    finally:
        loop.remove_reader(sock.fileno())
