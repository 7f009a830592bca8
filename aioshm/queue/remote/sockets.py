"""The ZeroMQ sockets of a writer and its remote readers.

Data: from the writer's XPUB to each reader's SUB. Control: between each reader's DEALER and the writer's ROUTER, with
heartbeats, which ZeroMQ's I/O thread answers however busy the program is.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from aioshm.config import Options
from aioshm.errors import OutOfDescriptors, SharedMemoryError
from aioshm.queue.handle import RemoteAddress
from aioshm.queue.remote import wire
from aioshm.zeromq.endpoint import CurveKeys, attach, disconnect, limit_frames, open_socket
from aioshm.zeromq.hosts import bracketed, connectable, own_address
from aioshm.zeromq.monitor import Monitor
from aioshm.zeromq.pump import Pump, drain, receive_frames, whole
from aioshm.zeromq.sockets import CONTROL_HWM, Socket, Sockets, send_frames, send_message
from aioshm.zeromq.zap import ZapAuthenticator, require_zap

if TYPE_CHECKING:
    from aioshm.queue.names.identity import Identity
    from aioshm.queue.remote.readers import RemoteReaders
    from aioshm.queue.remote.source import NetworkSource

PORT_PATIENCE_S = 0.5
"""How long a writer retries to bind the ports of its identity: the system may have assigned one to an outgoing
connection, even to a reader's that dials the very port."""

_PORT_PAUSE_S = 0.02
_MAX_HWM = 2**31 - 1
_READERS = "readers"  # the domain in ZAP (RFC 27) of both sockets


class DataPublisher:
    """An XPUB socket, not bound yet; it serves only subscribers that know the topic."""

    def __init__(
        self,
        sockets: Sockets,
        endpoint: str,
        topic: bytes,
        *,
        hwm: int,
        curve: CurveKeys | None = None,
        silence_s: float | None = None,
    ) -> None:
        self._topic = topic
        self._ranks: dict[int, int] = {}  # of subscribers, by the descriptors of their latest connections
        self.socket: Socket = sockets.add(
            open_socket(sockets.context, zmq.XPUB, endpoint, bind=True, hwm=hwm, curve=curve, silence_s=silence_s)
        )
        self.socket.setsockopt(zmq.XPUB_MANUAL, 1)  # the writer, not the subscriber, chooses the topics
        self.socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_SUBSCRIPTION_BYTES)

    def send(self, head: bytes, body: bytes | memoryview | None = None) -> None:
        """Send a data message without waiting; the body's memory must not change any more."""
        send_frames(self.socket, head, body)

    def look(self, on_subscribed: Callable[[int], None]) -> bool:
        """Admit subscribers and report their ranks; return whether there may be more."""

        def admit(subscription: zmq.Frame) -> None:
            rank = wire.subscriber(subscription.bytes, self._topic)
            if rank is not None:
                self._ranks[int(subscription.get(zmq.SRCFD))] = rank
                # Both calls concern the connection that the subscription came from.
                self.socket.setsockopt(zmq.SUBSCRIBE, wire.address(self._topic, rank))
                self.socket.setsockopt(zmq.SUBSCRIBE, wire.address(self._topic))
                on_subscribed(rank)

        return drain(self.socket, lambda: self.socket.recv(zmq.NOBLOCK, copy=False), admit)

    def cut_off(self, rank: int) -> None:
        """End a subscriber's connection over TCP: no window bounds any more what waits for the subscriber."""
        port = _port(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))
        for descriptor in [each for each, owner in self._ranks.items() if owner == rank]:
            del self._ranks[descriptor]
            disconnect(descriptor, port)


class DataSubscriber:
    """A SUB socket that is connected to a writer's data socket. Create it on the running loop."""

    def __init__(
        self,
        sockets: Sockets,
        endpoint: str,
        on_data: Callable[[memoryview, memoryview | None], None],
        *,
        curve: CurveKeys | None = None,
        silence_s: float | None = None,
        max_frame_bytes: int = -1,
    ) -> None:
        # No high-water mark: the writer's window, or the ring, bounds the messages on their way.
        self._socket = sockets.add(
            open_socket(sockets.context, zmq.SUB, endpoint, bind=False, hwm=0, curve=curve, silence_s=silence_s)
        )
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self.connection: Monitor = Monitor(self._socket, also=zmq.EVENT_CONNECT_RETRIED)
        sockets.add(self.connection.pair)
        attach(self._socket, endpoint, bind=False)
        self._on_data = on_data
        receive = partial(receive_frames, self._socket, 3)
        self.pump: Pump = Pump.of_messages(asyncio.get_running_loop(), self._socket, self._hand_out, receive)

    def subscribe(self, topics: Sequence[bytes]) -> None:
        """Also receive messages that begin with these bytes."""
        for topic in topics:
            self._socket.setsockopt(zmq.SUBSCRIBE, topic)

    def close(self) -> None:
        """Receive nothing more."""
        self.pump.pause()
        self._socket.close()

    def _hand_out(self, frames: list[zmq.Frame]) -> None:
        if len(frames) == 1:
            self._on_data(frames[0].buffer, None)
        elif len(frames) == 2:
            self._on_data(frames[0].buffer, frames[1].buffer)
        else:
            self._on_data(memoryview(b""), None)  # malformed


class ReaderSockets:
    """The SUB and DEALER of a reader, connected to its writer; made on the running loop.

    Raises:
        OSError: The endpoints are malformed.
    """

    def __init__(self, source: NetworkSource, remote: RemoteAddress, options: Options) -> None:
        self._source = source
        # Two sockets with two monitors each, and a connection.
        self._sockets = Sockets("a remote reader", count=6, connections=2)
        loop = asyncio.get_running_loop()
        try:
            self._dealer = _control_socket(
                self._sockets,
                zmq.DEALER,
                remote.control,
                bind=False,
                curve=remote.keys,
                silence_s=options.remote_timeout,
            )
            self.control_connection: Monitor = Monitor(self._dealer, also=zmq.EVENT_CONNECT_RETRIED)
            self._sockets.add(self.control_connection.pair)
            self._dealer.setsockopt(zmq.ROUTING_ID, b"\x01" + secrets.token_bytes(15))
            attach(self._dealer, remote.control, bind=False)
            # Last: the loop watches its descriptor, and would watch a closed one after an error.
            self._data = DataSubscriber(
                self._sockets,
                remote.data,
                source.receive_data,
                curve=remote.keys,
                silence_s=options.remote_timeout,
                max_frame_bytes=wire.MAX_FRAME_BYTES,
            )
        except BaseException:
            self._sockets.close()
            raise
        self.data_connection: Monitor = self._data.connection
        self._control = Pump.of_messages(loop, self._dealer, self._receive, whole(self._dealer))
        self._monitors = [
            Pump(loop, connection.pair, self._look_at_connections)
            for connection in (self.data_connection, self.control_connection)
        ]

    @property
    def closed(self) -> bool:
        return self._sockets.closed

    @property
    def reconnects(self) -> int:
        """How many connections were lost and restored."""
        return max(0, self.data_connection.handshakes - 1) + max(0, self.control_connection.handshakes - 1)

    def subscribe(self, topics: Sequence[bytes]) -> None:
        """Receive messages that begin with these bytes."""
        if not self._sockets.closed:
            self._data.subscribe(topics)

    def send(self, message: wire.Control) -> bool:
        """Send a control message; return False if too many wait already."""
        if self._sockets.closed:
            return False
        self._control.run_soon()  # sending may swallow the event of a received message
        try:
            self._dealer.send(message.pack(), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def look(self) -> None:
        """Read some received data, without waiting for the loop."""
        if not self._sockets.closed:
            self._data.pump.run()

    def end_data(self) -> None:
        """Read the data that was received, and close the socket: no window would bound more of it."""
        while self._data.pump.work():
            pass
        self._data.close()

    def look_at_all(self) -> None:
        """Read everything that was received, and the states of the connections."""
        while not self._sockets.closed and any([self._data.pump.work(), self._control.work()]):
            pass
        self._look_at_connections()

    def close(self) -> None:
        """Close the sockets and drop unsent messages. Idempotent."""
        if self._sockets.closed:
            return
        for pump in (self._data.pump, self._control, *self._monitors):
            pump.pause()
        self._sockets.close()

    def _receive(self, frames: list[bytes]) -> None:
        if len(frames) == 1:
            self._source.receive_control(frames[0])

    def _look_at_connections(self) -> None:
        # Read first: messages that arrived before the end of a connection are available when the monitor reports it.
        self.look()
        self._control.run()
        if not self._sockets.closed and (self.data_connection.changed() | self.control_connection.changed()):
            self._source.check_connections()


class WriterSockets:
    """The XPUB and ROUTER of a writer, bound to free ports or to those of the writer's identity.

    Raises:
        ValueError: The address is not one of this host.
        SharedMemoryError: The sockets cannot be bound.
        OutOfDescriptors, OutOfThreads: A limit of this process is reached.
    """

    def __init__(
        self, ip: str | None, topic: bytes, options: Options, readers: int = 1, identity: Identity | None = None
    ) -> None:
        self._sockets = Sockets("a writer with remote readers", count=3, connections=2 + 2 * readers, threads=1)
        self._pumps: list[Pump] = []
        # The readers' keys; None: connections are not encrypted.
        self.keys: CurveKeys | None = None
        try:
            server = None
            if options.secure:
                server, self.keys = _keys(identity)
                admitted = partial(_recognise, z85.decode(self.keys.public))
                ZapAuthenticator(self._sockets.context, admitted, "a writer with remote readers")
            host = bracketed(own_address() if ip is None else ip)
            endpoint = f"tcp://{host}:*"
            # A window's messages may be on their way to a reader twice, because of retransmissions. More messages wait
            # only for a broken connection before either end has noticed, and ZeroMQ may drop them.
            parts = max(options.remote_window_bytes, options.max_message_bytes) // wire.PART_BYTES + 1
            hwm = min(2 * (options.remote_window + parts) + CONTROL_HWM, _MAX_HWM)
            silence_s = options.remote_timeout
            self._data = DataPublisher(self._sockets, endpoint, topic, hwm=hwm, curve=server, silence_s=silence_s)
            self._router = _control_socket(
                self._sockets, zmq.ROUTER, endpoint, bind=True, curve=server, silence_s=silence_s
            )
            if server is not None:
                require_zap(self._data.socket, _READERS)
                require_zap(self._router, _READERS)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to an unreachable reader fails
            self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reader's new connection replaces the old one
            data_port = control_port = 0
            if identity is not None:
                data_port, control_port = identity.ports
            self.data: str = _bind(self._data.socket, host, data_port)
            self.control: str = _bind(self._router, host, control_port)
            if identity is not None:
                identity.keep(_port(self.data), _port(self.control))
        except BaseException:
            self._sockets.close()
            raise

    @property
    def closed(self) -> bool:
        return self._sockets.closed

    def start(self, loop: asyncio.AbstractEventLoop, readers: RemoteReaders) -> None:
        """Begin to report subscriptions and messages."""
        self._readers = readers
        self._subscriptions = Pump(loop, self._data.socket, partial(self._data.look, readers.subscribed))
        self._messages = Pump.of_messages(loop, self._router, self._receive, whole(self._router))
        self._pumps = [self._subscriptions, self._messages]

    def publish(self, head: bytes, body: bytes | memoryview | None = None) -> None:
        """Send a data message, once started."""
        self._subscriptions.run_soon()  # sending may swallow the event of a subscription
        self._data.send(head, body)

    def cut_off(self, rank: int) -> None:
        """End a reader's data connection."""
        if not self._sockets.closed:
            self._data.cut_off(rank)

    def send(self, identity: bytes, message: wire.Control) -> bool:
        """Send a control message; return False without a connection to the reader."""
        if self._sockets.closed:
            return False
        self._messages.run_soon()  # sending may swallow the event of a received message
        try:
            send_message(self._router, [identity, message.pack()])
        except zmq.Again:
            return True  # the connection is full: the reader does not read
        except zmq.ZMQError:
            return False
        return True

    def reaches(self, identity: bytes) -> bool:
        """Return whether ZeroMQ has a connection to the reader."""
        if not self._sockets.closed:
            self._router.getsockopt(zmq.EVENTS)  # updates ZeroMQ's view; sending alone does so only now and then
        return self.send(identity, wire.Tick())

    def look(self) -> None:
        """Read everything that was received."""
        while not self._sockets.closed and any(pump.work() for pump in self._pumps):
            pass

    def close(self) -> None:
        """Close everything immediately. Idempotent."""
        for pump in self._pumps:
            pump.pause()
        self._sockets.close()

    def _receive(self, frames: list[bytes]) -> None:
        if len(frames) == 2:
            self._readers.receive(*frames)


def _control_socket(
    sockets: Sockets, kind: int, endpoint: str, *, bind: bool, curve: CurveKeys | None, silence_s: float
) -> Socket:
    """Open a DEALER or ROUTER with a bounded size of frames."""
    sock = sockets.add(
        open_socket(
            sockets.context,
            kind,
            endpoint,
            bind=bind,
            hwm=CONTROL_HWM,
            curve=curve,
            silence_s=silence_s,
            heartbeats=True,
        )
    )
    limit_frames(sock, wire.MAX_CONTROL_BYTES)
    return sock


def _keys(identity: Identity | None) -> tuple[CurveKeys, CurveKeys]:
    """Return the writer's and the readers' keys."""
    if identity is not None:
        assert identity.server is not None
        assert identity.client is not None
        return identity.server, identity.client
    server = CurveKeys.generate()
    return server, CurveKeys.generate(server.public)


def _recognise(readers_key: bytes, domain: str, key: bytes) -> str | None:
    """Admit readers, which have one key; see `ZapAuthenticator`."""
    return "" if key == readers_key else None


def _bind(sock: Socket, host: str, port: int) -> str:
    """Bind to a port, 0: any free one; return the endpoint."""
    deadline = monotonic() + PORT_PATIENCE_S
    while True:
        try:
            return connectable(attach(sock, f"tcp://{host}:{port or '*'}", bind=True))
        except OutOfDescriptors:
            raise
        except OSError as error:
            if port and error.errno == errno.EADDRINUSE:
                if monotonic() < deadline:
                    sleep(_PORT_PAUSE_S)
                    continue
                raise SharedMemoryError(
                    error.errno,
                    f"port {port} of this writer's identity is in use: end the process that has the port, such as one "
                    "that an earlier writer has forked; or take another identity, and give readers new handles",
                ) from None
            if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL):
                raise ValueError(f"connect_ip must be an address of this host, not {host}") from None
            raise SharedMemoryError(error.errno, f"no port is available for remote readers: {error.strerror}") from None


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
