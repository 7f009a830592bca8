"""The writer's sockets for its remote readers; see ``sockets.py``."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from functools import partial
from time import monotonic, sleep

import zmq
from zmq.utils import z85

from aioshm.config import Options
from aioshm.errors import OutOfDescriptors, SharedMemoryError
from aioshm.queue.names.identity import Identity
from aioshm.queue.remote import wire
from aioshm.queue.remote.data_sockets import DataPublisher
from aioshm.zeromq.endpoint import CurveKeys, attach, limit_frames, open_socket
from aioshm.zeromq.hosts import bracketed, connectable, own_address
from aioshm.zeromq.pump import Pump, whole
from aioshm.zeromq.sockets import CONTROL_HWM, Socket, Sockets
from aioshm.zeromq.zap import admit_only

PORT_PATIENCE_S, _PORT_PAUSE_S = 0.5, 0.02
"""For how long a writer tries to have the ports of its identity, which another process may have for a moment: a reader
that tries to connect while nobody listens, to which the system can give the very port that it connects to."""

_MAX_HWM = 2**31 - 1


class WriterSockets:
    """XPUB and ROUTER, bound to ports that the system chose, for this writer or one before it.

    Raises:
        ValueError: The address is not this host's.
        SharedMemoryError: The sockets cannot be had.
        OutOfDescriptors, OutOfThreads: This process cannot have what they need.
    """

    def __init__(
        self, ip: str | None, secret: bytes, options: Options, readers: int = 1, identity: Identity | None = None
    ) -> None:
        self._sockets = Sockets("a writer with remote readers", count=3, connections=2 + 2 * readers, threads=1)
        context = self._sockets.context
        self._pumps: list[Pump] = []
        server: CurveKeys | None = None
        # What a reader needs to be let in; None where nothing is encrypted.
        self.keys: CurveKeys | None = None
        try:
            if options.secure:
                if identity is not None:
                    server, self.keys = identity.server, identity.client
                else:
                    server = CurveKeys.generate()
                    self.keys = CurveKeys.generate(server.public)
                assert self.keys is not None
                admit_only(context, z85.decode(self.keys.public), "a writer with remote readers")
            host = bracketed(own_address() if ip is None else ip)
            # A reader may have a window's messages on their way, once more if they are sent again. More than that waits
            # only on a connection that has ended without either end having noticed yet, where it may be dropped.
            parts = max(options.remote_window_bytes, options.max_message_bytes) // wire.PART_BYTES + 1
            hwm = min(2 * (options.remote_window + parts) + CONTROL_HWM, _MAX_HWM)
            endpoint = f"tcp://{host}:*"
            self._data = DataPublisher(
                self._sockets, endpoint, secret, hwm=hwm, curve=server, silence_s=options.remote_timeout
            )
            self._router = self._sockets.add(
                open_socket(
                    context,
                    zmq.ROUTER,
                    endpoint,
                    bind=True,
                    hwm=CONTROL_HWM,
                    curve=server,
                    silence_s=options.remote_timeout,
                    heartbeats=True,
                )
            )
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # tells who cannot be reached
            self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reader's new connection replaces its old one
            limit_frames(self._router, wire.MAX_CONTROL_BYTES)
            data, control = (0, 0) if identity is None else identity.ports
            self.data: str = self._bind(self._data.socket, host, ip, data)
            self.control: str = self._bind(self._router, host, ip, control)
            if identity is not None:
                identity.keep(_port(self.data), _port(self.control))
        except BaseException:
            self._sockets.close()
            raise

    def _bind(self, sock: Socket, host: str, ip: str | None, port: int) -> str:
        patient_until = monotonic() + PORT_PATIENCE_S if port else 0.0
        try:
            bound = None
            while bound is None:
                try:
                    bound = attach(sock, f"tcp://{host}:{port or '*'}", bind=True)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE or monotonic() >= patient_until:
                        raise
                    sleep(_PORT_PAUSE_S)
        except OutOfDescriptors:
            raise
        except OSError as error:
            if port and error.errno == errno.EADDRINUSE:
                raise SharedMemoryError(
                    error.errno,
                    f"port {port} of this writer's identity is in use: end what has it, such as a process that the "
                    "writer before this one has forked; or take another identity, and give readers new handles",
                ) from None
            if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL):
                raise ValueError(f"connect_ip must be an address of this host, not {ip or host!r}") from None
            raise SharedMemoryError(error.errno, f"no port to be had for remote readers: {error.strerror}") from None
        return connectable(bound)

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        on_subscribed: Callable[[int], None],
        on_message: Callable[[bytes, bytes], None],
    ) -> None:
        """Begin to report."""
        self._on_message = on_message
        self._subscriptions = Pump(loop, self._data.socket, partial(self._data.look, on_subscribed))
        self._messages = Pump.of_messages(loop, self._router, self._take_message, whole(self._router))
        self._pumps = [self._subscriptions, self._messages]

    def publish(self, head: bytes, body: bytes | memoryview | None = None) -> zmq.MessageTracker | None:
        """Send a data message to those whom it is addressed to, once started. Never waits.

        Returns:
            What tells when the body's memory is not used any more; None where it is not used already.
        """
        self._subscriptions.run_soon()  # a call that sends may notice, and make the descriptor forget, what has come
        return self._data.send(head, body)

    def send(self, identity: bytes, message: wire.Control) -> bool:
        """Send a control message; return False if there is no connection to that peer."""
        if self._sockets.closed:
            return False
        self._messages.run_soon()  # as above
        try:
            self._router.send_multipart([identity, message.pack()], zmq.NOBLOCK)
        except zmq.Again:
            return True  # it does not read what it has been sent already
        except zmq.ZMQError:
            return False
        return True

    def reaches(self, identity: bytes) -> bool:
        """Return whether there is a connection to that peer, by the latest that ZeroMQ knows."""
        if not self._sockets.closed:
            self._router.getsockopt(zmq.EVENTS)  # sends look at what became of connections now and then only
        return self.send(identity, wire.Tick())

    @property
    def closed(self) -> bool:
        """Whether this was closed."""
        return self._sockets.closed

    def look(self) -> None:
        """Read everything that has come."""
        while not self._sockets.closed and any(pump.work() for pump in self._pumps):
            pass

    def close(self) -> None:
        """Close everything now. Idempotent."""
        for pump in self._pumps:
            pump.pause()
        self._sockets.close()  # the thread closes its own

    def _take_message(self, frames: list[bytes]) -> None:
        if len(frames) == 2:  # one of another form is some stranger's: nobody else misses it
            self._on_message(*frames)


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
