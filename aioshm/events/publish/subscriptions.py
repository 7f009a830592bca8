"""The bound on the subscriptions of each connection to a publisher's port that has no keys."""

from __future__ import annotations

import logging
import os
import socket as sockets
import stat

import zmq

from aioshm.logs import LogLimiter
from aioshm.zeromq.monitor import Monitor
from aioshm.zeromq.pump import drain

logger: logging.Logger = logging.getLogger("aioshm.events")

# Consumers have one subscription or a few.
MAX_SUBSCRIPTIONS = 128

_SUBSCRIBE = b"\x01"


class Subscriptions:
    """Counts the subscriptions of each connection to an XPUB socket; disconnects a peer that has too many.

    ZeroMQ keeps all topics in a tree, also those that XPUB_MANUAL refuses, and visits the tree when a peer leaves. So
    refusing a subscription would bound nothing. SECURITY.md lists the remaining attacks.
    """

    def __init__(self, socket: zmq.Socket[bytes], monitor: Monitor) -> None:
        socket.setsockopt(zmq.XPUB_VERBOSER, 1)  # report each subscription, also to known topics, and each end
        # Small: ZeroMQ accepts all subscriptions that it has read ahead, even of a peer that is disconnected then.
        socket.setsockopt(zmq.RCVBUF, 1 << 12)
        socket.setsockopt(zmq.RCVHWM, 8)
        self.cut_off: int = 0  # disconnected peers
        self.topics: dict[int, set[bytes]] = {}  # by the descriptor of the connection
        self._socket = socket
        self._monitor = monitor
        self._limiter = LogLimiter(10.0)

    def read(self) -> bool:
        """Read some subscriptions, after the monitor was read; return whether there may be more."""
        for descriptor in self._monitor.take_gone():
            self.topics.pop(descriptor, None)
        return drain(self._socket, self._receive, self._count)

    def _receive(self) -> zmq.Frame:
        return self._socket.recv(zmq.NOBLOCK, copy=False)

    def _count(self, frame: zmq.Frame) -> None:
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:  # the end of a subscription after its peer has left
            return
        data = frame.bytes
        topics = self.topics.setdefault(descriptor, set())
        if data[:1] == _SUBSCRIBE:
            topics.add(data[1:])
        else:
            topics.discard(data[1:])
        if len(topics) > MAX_SUBSCRIPTIONS:
            del self.topics[descriptor]
            self._cut_off(descriptor)

    def _cut_off(self, descriptor: int) -> None:
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        peer = _disconnect(descriptor, int(endpoint.rpartition(":")[2]))
        if peer is not None:
            self.cut_off += 1
            text = "publisher %s: disconnected %s, which has more than %d subscriptions"
            self._limiter.warn(logger, text, endpoint, peer, MAX_SUBSCRIPTIONS)


def _disconnect(descriptor: int, port: int) -> str | None:
    """Shut down a connection of ZeroMQ; return the peer's address, or None if the descriptor is another one's now."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        with sockets.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family == sockets.AF_UNIX or connection.getsockname()[1] != port:
                return None
            host, number = connection.getpeername()[:2]
            connection.shutdown(sockets.SHUT_RDWR)
    except OSError:
        return None
    return f"{host}:{number}"
