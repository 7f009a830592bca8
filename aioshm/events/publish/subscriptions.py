"""A limit on the subscriptions of one peer at a publisher's open port; SECURITY.md lists the remaining attacks.

ZeroMQ keeps the topics of all subscriptions in a tree, and walks through the tree when a subscriber leaves. ZeroMQ
cannot refuse a subscription, so the publisher disconnects the peer instead.
"""

from __future__ import annotations

import logging
import os
import socket as sockets

import zmq

from aioshm.logs import LogLimiter
from aioshm.zeromq.monitor import Monitor
from aioshm.zeromq.pump import drain

logger: logging.Logger = logging.getLogger("aioshm.events")

# The most that one subscriber may have. Consumers have one or a few.
MAX_SUBSCRIPTIONS = 128
_SUBSCRIBE = 1


class Subscriptions:
    """Counts the subscriptions of each connection to an XPUB socket, and disconnects peers that have too many."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: Monitor) -> None:
        socket.setsockopt(zmq.XPUB_VERBOSER, 1)  # report every subscribe and unsubscribe, also of known topics
        # Small, because ZeroMQ accepts all subscriptions that it has read ahead, even of a peer that is cut off.
        socket.setsockopt(zmq.RCVBUF, 1 << 12)
        socket.setsockopt(zmq.RCVHWM, 8)
        self.cut_off: int = 0
        self._socket = socket
        self._monitor = monitor
        self._topics: dict[int, set[bytes]] = {}  # topics by the descriptor of the connection
        self._limiter = LogLimiter(10.0)

    def read(self) -> bool:
        """Read some subscriptions; True if there may be more."""
        for descriptor in self._monitor.take_gone():
            self._topics.pop(descriptor, None)
        return drain(self._socket, self._receive, self._take)

    def _receive(self) -> zmq.Frame:
        return self._socket.recv(zmq.NOBLOCK, copy=False)

    def _take(self, frame: zmq.Frame) -> None:
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:  # an unsubscribe of a peer that has left
            return
        data = frame.bytes
        topics = self._topics.setdefault(descriptor, set())
        if data[:1] == bytes([_SUBSCRIBE]):
            topics.add(data[1:])
        else:
            topics.discard(data[1:])
        if len(topics) > MAX_SUBSCRIPTIONS:
            del self._topics[descriptor]
            self._cut_off(descriptor)

    def _cut_off(self, descriptor: int) -> None:
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        peer = _disconnect(descriptor, int(endpoint.rpartition(":")[2]))
        if peer is not None:
            self.cut_off += 1
            text = "publisher %s: hung up on %s: it has more than %d subscriptions"
            self._limiter.warn(logger, text, endpoint, peer, MAX_SUBSCRIPTIONS)


def _disconnect(descriptor: int, port: int) -> str | None:
    """Shut down a ZeroMQ connection, unless its descriptor was reused meanwhile; return the peer's address."""
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return None
    try:
        connection = sockets.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        return None
    try:
        if connection.family == sockets.AF_UNIX or connection.getsockname()[1] != port:
            return None
        host, number = connection.getpeername()[:2]
        connection.shutdown(sockets.SHUT_RDWR)
    except OSError:
        return None
    finally:
        connection.close()
    return f"{host}:{number}"
