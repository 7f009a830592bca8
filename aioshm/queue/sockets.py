"""The ZeroMQ sockets between a writer and its remote readers; what passes over them is known elsewhere.

Data: the writer's XPUB to each reader's SUB. Control: each reader's DEALER to the writer's ROUTER. Each end has a
ZeroMQ context, and so an I/O thread, of its own. The sockets are driven by callbacks of the loop instead of
`zmq.asyncio`: a message costs no future and no turn of the loop, and can be taken where no loop runs.

**Sockets may not wait.** A data connection must not be given up because a large message takes long, so it is watched by
TCP alone (keepalive, ``TCP_USER_TIMEOUT``). Control messages are small, so these connections are watched by ZeroMQ's
heartbeats, which its I/O threads answer however busy the program is.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TypeAlias

import zmq
from zmq.utils import z85

from aioshm.config import Options
from aioshm.errors import SharedMemoryError
from aioshm.queue import wire
from aioshm.wait.address import own_address
from aioshm.zeromq import CurveKeys, Monitor, Watch, attach, open_socket

Socket: TypeAlias = "zmq.Socket[bytes]"

BURST = 64
"""Messages that are read before the loop's other callbacks have their turn."""

HANDSHAKE_MS = 10_000
"""How long somebody who connects may take to prove that they hold the handle."""

HANDLED_AT_ONCE = 1000  # control messages of one peer that wait to be read
_WILDCARDS = ("*", "0.0.0.0", "::")
_NOTHING = memoryview(b"")
_ZAP = "inproc://zeromq.zap.01"


def _host(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip


class WriterSockets:
    """XPUB and ROUTER, bound to ports that the system chose.

    Args:
        ip: From `check_ip`; None: this host's own address.
        secret: What data messages begin with.
        options: For how long peers may be silent, and whether to encrypt.

    Attributes:
        data: The endpoint of the data socket.
        control: The endpoint of the control socket.
        keys: What a reader needs to be let in; None where nothing is encrypted.

    Raises:
        ValueError: The address is not this host's.
        SharedMemoryError: The sockets cannot be had.
    """

    def __init__(self, ip: str | None, secret: bytes, options: Options) -> None:
        self._secret = secret
        self._context: zmq.Context[Socket] = zmq.Context()
        self._watches: list[Watch] = []
        self._looking = False
        self._loop: asyncio.AbstractEventLoop | None = None
        server = self.keys = None
        try:
            if options.secure:
                server = CurveKeys.generate()
                self.keys = CurveKeys.generate(server.public)
                self._admit_only(self.keys.public)
            host = _host(own_address() if ip is None else ip)
            timeout_ms = int(options.remote_timeout * 1000)
            # A reader may have a window's messages on their way, once more if they are sent again. More than that waits
            # only on a connection that has ended without anybody having noticed yet, where it may be dropped.
            hwm = 2 * options.remote_window + HANDLED_AT_ONCE
            self._xpub = open_socket(self._context, zmq.XPUB, f"tcp://{host}:*", bind=True, hwm=hwm, curve=server)
            self._xpub.setsockopt(zmq.XPUB_MANUAL, 1)  # who gets what is not for the subscriber to say
            self._xpub.setsockopt(zmq.MAXMSGSIZE, wire.MAX_SUBSCRIPTION_BYTES)
            _watched_by_tcp(self._xpub, options.remote_timeout)
            self._router = open_socket(
                self._context, zmq.ROUTER, f"tcp://{host}:*", bind=True, hwm=HANDLED_AT_ONCE, curve=server
            )
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # tells who cannot be reached
            self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reader's new connection replaces its old one
            self._router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_CONTROL_BYTES)
            _watched_by_heartbeats(self._router, timeout_ms)
            for each in (self._xpub, self._router):
                each.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            self.data = self._bind(self._xpub, host, ip)
            self.control = self._bind(self._router, host, ip)
        except BaseException:
            self._close_sockets()
            raise

    def _bind(self, sock: Socket, host: str, ip: str | None) -> str:
        try:
            bound = attach(sock, f"tcp://{host}:*", bind=True)
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL):
                raise ValueError(f"connect_ip must be an address of this host, not {ip or host!r}") from None
            raise SharedMemoryError(error.errno, f"no port to be had for remote readers: {error.strerror}") from None
        if ip in _WILDCARDS:
            return f"tcp://{_host(own_address())}:{bound.rpartition(':')[2]}"
        return bound

    def _admit_only(self, key: bytes) -> None:
        """Answer ZeroMQ's questions about who may connect (RFC 27), in a thread: no busy loop keeps them waiting."""
        zap: Socket = self._context.socket(zmq.REP)
        zap.setsockopt(zmq.LINGER, 0)
        zap.bind(_ZAP)
        threading.Thread(target=_answer, args=(zap, z85.decode(key)), name="aioshm-zap", daemon=True).start()

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        on_subscribed: Callable[[int], None],
        on_message: Callable[[bytes, bytes], None],
    ) -> None:
        """Begin to report.

        Args:
            loop: Where.
            on_subscribed: A reader of this rank has a new data connection, over which it gets what is published next.
            on_message: A control message came, from this identity.
        """
        self._loop, self._on_subscribed, self._on_message = loop, on_subscribed, on_message
        self._watches = [Watch(loop, self._xpub, self._look), Watch(loop, self._router, self._look)]

    def publish(self, head: bytes, body: bytes | memoryview | None = None) -> zmq.MessageTracker | None:
        """Send a data message to those whom it is addressed to. Never waits.

        Returns:
            What tells when the body's memory is not used any more; None where there is no body.
        """
        self._look_soon()
        if body is None:
            self._xpub.send(head, zmq.NOBLOCK)
            return None
        self._xpub.send(head, zmq.NOBLOCK | zmq.SNDMORE)
        return self._xpub.send(body, zmq.NOBLOCK, copy=False, track=True)

    def send(self, identity: bytes, message: wire.Control) -> bool:
        """Send a control message; return False if there is no connection to that peer."""
        self._look_soon()
        try:
            self._router.send_multipart([identity, message.pack()], zmq.NOBLOCK)
        except zmq.Again:
            return True  # it does not read what it has been sent already
        except zmq.ZMQError:
            return False
        return True

    def look(self) -> None:
        """Read everything that has come."""
        if self._context.closed:
            return
        while self._read_burst():
            pass

    def close(self) -> None:
        """Close everything now. Idempotent."""
        for watch in self._watches:
            watch.pause()
        self._watches = []
        self._close_sockets()

    def _close_sockets(self) -> None:
        for name in ("_xpub", "_router"):
            sock: Socket | None = getattr(self, name, None)
            if sock is not None:
                sock.close(linger=0)
        self._context.term()  # the thread closes the last socket

    def _look(self) -> None:
        self._looking = False
        if not self._context.closed and self._read_burst():
            self._look_soon()

    def _look_soon(self) -> None:
        """Look again in the loop's next turn.

        What made a descriptor readable may have been noticed, and forgotten, by a call that sends.
        """
        if not self._looking and self._loop is not None and not self._loop.is_closed():
            self._looking = True
            self._loop.call_soon(self._look)

    def _read_burst(self) -> bool:
        """Read some messages; return whether there may be more."""
        return self._read_subscriptions() | self._read_messages()

    def _read_subscriptions(self) -> bool:
        for _ in range(BURST):
            try:
                subscription = self._xpub.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                return False
            rank = wire.subscriber(subscription, self._secret)
            if rank is not None:
                # Both are for the connection that this message came from.
                self._xpub.setsockopt(zmq.SUBSCRIBE, wire.address(self._secret, rank))
                self._xpub.setsockopt(zmq.SUBSCRIBE, wire.address(self._secret))
                self._on_subscribed(rank)
                if self._context.closed:
                    return False
        return True

    def _read_messages(self) -> bool:
        for _ in range(BURST):
            if self._context.closed:
                return False
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return False
            # A message of another form is some stranger's: nobody else misses it.
            if len(frames) == 2:
                self._on_message(frames[0], frames[1])
        return True


class ReaderSockets:
    """SUB and DEALER, connected to a writer's; made on the loop that they belong to.

    Args:
        loop: Calls back.
        data: The endpoint of the writer's data socket.
        control: The endpoint of its control socket.
        keys: What lets this reader in.
        topics: What to subscribe to.
        options: For how long peers may be silent.
        on_data: A data message came: its first frame, and its second.
        on_message: A control message came.
        on_change: A connection came up or went down.

    Raises:
        OSError: The endpoints are malformed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        data: str,
        control: str,
        keys: CurveKeys | None,
        topics: Sequence[bytes],
        options: Options,
        on_data: Callable[[memoryview, memoryview | None], None],
        on_message: Callable[[bytes], None],
        on_change: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._on_data, self._on_message, self._on_change = on_data, on_message, on_change
        self._looking = False
        self._watches: list[Watch] = []
        self._context: zmq.Context[Socket] = zmq.Context()
        timeout_ms = int(options.remote_timeout * 1000)
        # The writer's window bounds what is here.
        self._sub = open_socket(self._context, zmq.SUB, data, bind=False, hwm=0, curve=keys)
        self._dealer = open_socket(self._context, zmq.DEALER, control, bind=False, hwm=HANDLED_AT_ONCE, curve=keys)
        self.data_connection = Connection(self._sub)
        self.control_connection = Connection(self._dealer)
        try:
            for topic in topics:
                self._sub.setsockopt(zmq.SUBSCRIBE, topic)
            self._sub.setsockopt(zmq.MAXMSGSIZE, _largest_frame(options.max_message_bytes))
            _watched_by_tcp(self._sub, options.remote_timeout)
            self._dealer.setsockopt(zmq.ROUTING_ID, b"\x01" + secrets.token_bytes(15))
            self._dealer.setsockopt(zmq.MAXMSGSIZE, wire.MAX_CONTROL_BYTES)
            _watched_by_heartbeats(self._dealer, timeout_ms)
            for each in (self._sub, self._dealer):
                each.setsockopt(zmq.CONNECT_TIMEOUT, max(1, timeout_ms // 2))
            attach(self._sub, data, bind=False)
            attach(self._dealer, control, bind=False)
        except BaseException:
            self.close()
            raise
        self._watches = [
            Watch(loop, self._sub, self._look),
            Watch(loop, self._dealer, self._look),
            Watch(loop, self.data_connection.pair, self._look),
            Watch(loop, self.control_connection.pair, self._look),
        ]

    def send(self, message: wire.Control) -> bool:
        """Send a control message; return False if too many wait already."""
        self._look_soon()
        try:
            self._dealer.send(message.pack(), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    @property
    def closed(self) -> bool:
        """Whether this was closed."""
        return self._context.closed

    def look(self) -> None:
        """Read some of what has come, without waiting for the loop to find it."""
        if not self._context.closed and self._read_burst():
            self._look_soon()

    def close(self) -> None:
        """Close everything; what was not sent yet is forgotten. Idempotent."""
        if self._context.closed:
            return
        for watch in self._watches:
            watch.pause()
        self.data_connection.close()
        self.control_connection.close()
        self._sub.close(linger=0)
        self._dealer.close(linger=0)
        self._context.term()

    def _look(self) -> None:
        self._looking = False
        self.look()

    def _look_soon(self) -> None:
        if not self._looking and not self._loop.is_closed():
            self._looking = True
            self._loop.call_soon(self._look)

    def _read_burst(self) -> bool:
        """Read some messages; return whether there may be more."""
        # What had arrived when a connection ended is there when its end is told: so it is read first.
        more = self._read_data() | self._read_messages()
        if not self._context.closed and (self.data_connection.changed() | self.control_connection.changed()):
            self._on_change()
        return more

    def _read_data(self) -> bool:
        sub = self._sub
        for _ in range(BURST):
            if self._context.closed:
                return False
            try:
                head = sub.recv(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                return False
            if not head.more:
                self._on_data(head.buffer, None)
                continue
            body = sub.recv(zmq.NOBLOCK, copy=False)
            if not body.more:
                self._on_data(head.buffer, body.buffer)
                continue
            while sub.getsockopt(zmq.RCVMORE):
                sub.recv(zmq.NOBLOCK, copy=False)
            self._on_data(_NOTHING, None)  # no writer sends that
        return True

    def _read_messages(self) -> bool:
        for _ in range(BURST):
            if self._context.closed:
                return False
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return False
            if len(frames) == 1:
                self._on_message(frames[0])
        return True


class Connection:
    """Whether a connecting socket has its connection, and since when not.

    Attributes:
        up: Whether it has it.
        down_since: Since when not, by the monotonic clock; None while it has it, and before it ever had.
        refused: Whether the latest handshake failed because this end is not let in.
        connections: How many connections there were.
    """

    def __init__(self, sock: Socket) -> None:
        self._monitor = Monitor(sock)
        self.up = False
        self.down_since: float | None = None
        self.refused = False
        self.connections = 0

    @property
    def pair(self) -> Socket:
        """The socket to watch."""
        return self._monitor.pair

    def changed(self) -> bool:
        """Read what has become known; return whether anything has."""
        before = self.up, self.connections, self.refused
        for event, _endpoint in self._monitor.events():
            self.refused = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or (self.refused and not self.up)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.up, self.down_since, self.refused = True, None, False
                self.connections += 1
            elif self.up:
                self.up, self.down_since = False, monotonic()
        return before != (self.up, self.connections, self.refused)

    def close(self) -> None:
        """Stop watching."""
        self._monitor.close()


def _answer(zap: Socket, key: bytes) -> None:
    """Let in whoever has proven to own a key, and nobody else, until the context ends."""
    try:
        while True:
            version, request, _domain, _address, _identity, mechanism, *credentials = zap.recv_multipart()
            status = b"200" if mechanism == b"CURVE" and credentials == [key] else b"400"
            zap.send_multipart([version, request, status, b"", b"", b""])
    except zmq.ZMQError:
        zap.close(linger=0)


def _watched_by_tcp(sock: Socket, timeout_s: float) -> None:
    sock.setsockopt(zmq.TCP_MAXRT, int(timeout_s * 1000))
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    if sys.platform == "linux":  # elsewhere these are not all there
        sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(1, int(timeout_s / 3)))
        sock.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, int(timeout_s / 6)))
        sock.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def _watched_by_heartbeats(sock: Socket, timeout_ms: int) -> None:
    sock.setsockopt(zmq.HEARTBEAT_IVL, max(1, timeout_ms // 5))
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, timeout_ms // 2))


def _largest_frame(max_message_bytes: int) -> int:
    return min(max_message_bytes + wire.HEAD_BYTES, 2**63 - 1)
