"""The sockets that data messages pass over: a writer's XPUB, and each reader's SUB.

Remote readers get all messages this way. Local readers get bodies that do not fit a chunk, with ``overflow="zmq"``.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Self

import zmq

from aioshm.codec.buffers import OwnMemory
from aioshm.queue.remote import wire
from aioshm.zeromq.endpoint import CurveKeys, attach, open_socket
from aioshm.zeromq.monitor import Monitor
from aioshm.zeromq.pump import Inbox, drain
from aioshm.zeromq.sockets import Socket, Sockets, send_frames


class DataPublisher:
    """An XPUB socket, not bound yet, whose messages reach only subscribers that know the secret."""

    def __init__(
        self,
        sockets: Sockets,
        endpoint: str,
        secret: bytes,
        *,
        hwm: int,
        curve: CurveKeys | None = None,
        silence_s: float | None = None,
    ) -> None:
        self._secret = secret
        self.socket: Socket = sockets.add(
            open_socket(sockets.context, zmq.XPUB, endpoint, bind=True, hwm=hwm, curve=curve, silence_s=silence_s)
        )
        self.socket.setsockopt(zmq.XPUB_MANUAL, 1)  # the writer, not the subscriber, chooses the topics
        self.socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_SUBSCRIPTION_BYTES)

    def send(self, head: bytes, body: bytes | memoryview | None = None) -> zmq.MessageTracker | None:
        """Send a data message; return the tracker of the body's memory, None if ZeroMQ does not use the memory."""
        return send_frames(self.socket, head, body)

    def look(self, on_subscribed: Callable[[int], None]) -> bool:
        """Admit subscribers, and report their ranks; return whether there may be more."""

        def admit(subscription: bytes) -> None:
            rank = wire.subscriber(subscription, self._secret)
            if rank is not None:
                # Both are for the connection that this message came from.
                self.socket.setsockopt(zmq.SUBSCRIBE, wire.address(self._secret, rank))
                self.socket.setsockopt(zmq.SUBSCRIBE, wire.address(self._secret))
                on_subscribed(rank)

        return drain(self.socket, partial(self.socket.recv, zmq.NOBLOCK), admit)


class DataSubscriber:
    """A SUB socket, connected to a writer's data; made on the running loop."""

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
        # Without a high-water mark: the writer's window, or the ring, bounds the messages on their way.
        self._socket = sockets.add(
            open_socket(sockets.context, zmq.SUB, endpoint, bind=False, hwm=0, curve=curve, silence_s=silence_s)
        )
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self.connection: Connection = Connection(self._socket)
        sockets.add(self.connection.pair)
        attach(self._socket, endpoint, bind=False)
        self.inbox: Inbox = Inbox(self._socket, on_data)

    def subscribe(self, topics: Sequence[bytes]) -> None:
        """Receive messages that begin with these, too."""
        for topic in topics:
            self._socket.setsockopt(zmq.SUBSCRIBE, topic)


class Connection:
    """The state of a socket's connection, from the events of its monitor."""

    def __init__(self, sock: Socket) -> None:
        self._monitor = Monitor(sock, also=zmq.EVENT_CONNECT_RETRIED)
        self.up: bool = False
        # When the connection was lost, by the monotonic clock; None while connected.
        self.down_since: float | None = monotonic()
        self.failed: bool = False  # whether the latest attempt to connect failed, or the connection has ended
        self.refused: bool = False  # whether the latest handshake failed because this end is not let in
        self.connections: int = 0  # how many connections there were

    @property
    def pair(self) -> Socket:
        """The socket to watch."""
        return self._monitor.pair

    def changed(self) -> bool:
        """Process the monitor's events; return whether the connection changed. Failed attempts alone do not count."""
        before = self.up, self.connections, self.refused
        for event, *_ in self._monitor.events():
            self.failed = event != zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.refused = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or (self.refused and not self.up)
            if not self.failed:
                self.up = True
                self.down_since = None
                self.refused = False
                self.connections += 1
            elif self.up:
                self.up = False
                self.down_since = monotonic()
        return before != (self.up, self.connections, self.refused)


class MessageMemory(mmap.mmap, OwnMemory):
    """Anonymous memory of one message, with huge pages where the kernel has them.

    Raises:
        OSError: There is no memory.
    """

    def __new__(cls, nbytes: int) -> Self:
        """Map so many bytes."""
        memory = super().__new__(cls, -1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return memory
