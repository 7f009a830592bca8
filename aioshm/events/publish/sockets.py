"""The sockets of a publisher: opened, named, watched for strangers, and closed with time to deliver."""

from __future__ import annotations

import asyncio
import logging
import os
import socket as sockets
import stat
import threading
from contextlib import suppress

import zmq

from aioshm.errors import OutOfThreads
from aioshm.events.config import check_endpoint, for_rank, publisher_binds
from aioshm.events.protocol.wire import MAX_TOPIC_BYTES
from aioshm.events.publish.replay_server import CLIENT_BUFFER_BYTES, CLIENT_HWM, MAX_REQUEST_BYTES
from aioshm.logs import LogLimiter
from aioshm.process.limits import start_thread
from aioshm.zeromq.endpoint import ADDED_BYTES, BoundFile, CurveKeys, attach, open_socket
from aioshm.zeromq.hosts import host_of, is_loopback, is_own_address
from aioshm.zeromq.monitor import Monitor
from aioshm.zeromq.pump import Pump, drain
from aioshm.zeromq.sockets import context_for

logger: logging.Logger = logging.getLogger("aioshm.events")

# ZeroMQ hangs up on a peer that sends a longer subscription, or command of a handshake.
_MAX_FRAME_BYTES = MAX_TOPIC_BYTES + ADDED_BYTES

# What must stand before binding: connections take it from there.
_PUB_OPTIONS: dict[int, int] = {zmq.MAXMSGSIZE: _MAX_FRAME_BYTES}
_REPLAY_OPTIONS: dict[int, int] = {
    zmq.MAXMSGSIZE: MAX_REQUEST_BYTES,
    zmq.SNDBUF: CLIENT_BUFFER_BYTES,
    zmq.ROUTER_MANDATORY: 1,
}

# Bits of ZeroMQ's threads: live batches do not queue behind those that are replayed.
_LIVE_THREAD, _REPLAY_THREAD = 1, 2


class PublisherEnds:
    """A PUB socket, or an XPUB where strangers may subscribe, and a ROUTER if replay is asked for."""

    def __init__(
        self,
        rank: int,
        endpoint: str,
        replay_endpoint: str | None,
        *,
        bind: bool | None,
        hwm: int,
        curve: CurveKeys | None,
    ) -> None:
        endpoint = for_rank(check_endpoint(endpoint), rank)
        if replay_endpoint is not None:
            replay_endpoint = for_rank(check_endpoint(replay_endpoint, "replay_endpoint"), rank)
        binds = publisher_binds(endpoint) if bind is None else bind
        self.replay: zmq.Socket[bytes] | None = None  # where replay requests come in, or None
        self.replay_endpoint: str | None = None  # what ``replay`` is really bound to, or None
        count = 1 + bool(replay_endpoint)
        self._context, self._owns_context = context_for(
            endpoint,
            replay_endpoint,
            what=f"a publisher of events at {endpoint}",
            io_threads=count,
            sockets=3 * count,  # a monitor for each takes two more
            connections=2 * count,
        )
        self._sockets: list[zmq.Socket[bytes]] = []
        self._monitors: list[Monitor] = []
        self._pumps: list[Pump] = []
        self._files: list[BoundFile] = []
        self._limiter = LogLimiter(10.0)
        self._subscriptions: Subscriptions | None = None
        try:
            is_open = binds and curve is None and endpoint.startswith("tcp://")
            kind = zmq.XPUB if is_open else zmq.PUB
            self.pub: zmq.Socket[bytes]
            self.endpoint: str
            self.pub, self.endpoint = self._open(kind, _PUB_OPTIONS, endpoint, binds, hwm, curve)
            if replay_endpoint is not None:
                self.replay, self.replay_endpoint = self._open(
                    zmq.ROUTER, _REPLAY_OPTIONS, replay_endpoint, True, CLIENT_HWM, curve
                )
        except BaseException:
            self.close(0.0)
            raise
        if curve is None:
            self._warn_about_open_ports([endpoint if binds else None, replay_endpoint])
        if bind is None and not binds:
            self._warn_about_connecting(endpoint)

    @property
    def handshake_failures(self) -> int:
        """Connections that did not speak ZeroMQ, or not with the right keys."""
        return sum(monitor.handshake_failures for monitor in self._monitors)

    @property
    def cut_off(self) -> int:
        """Connections that had too many subscriptions."""
        return 0 if self._subscriptions is None else self._subscriptions.cut_off

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch the connections on ``loop``."""
        self._pumps = [Pump(loop, monitor.pair, self._read_monitors) for monitor in self._monitors]
        if self._subscriptions is not None:
            self._pumps.append(Pump(loop, self.pub, self.read_subscriptions))

    def read_subscriptions(self) -> bool:
        """Read subscriptions; after sending, too, which may swallow the sign that there is something to read."""
        if self._subscriptions is None:
            return False
        self._read_monitors()
        return self._subscriptions.read()

    def close(self, linger: float) -> threading.Thread | None:
        """Close the sockets; return the thread, if any, that lets go out what ZeroMQ holds, for ``linger`` seconds."""
        for pump in self._pumps:
            pump.pause()
        self._read_monitors()
        for monitor in self._monitors:
            monitor.close()
        for socket in self._sockets:
            _give_back_name(socket)
            socket.close(linger=int(linger * 1000))
        self._sockets.clear()
        for file in self._files:
            file.remove()
        if not self._owns_context or self._context.closed:
            return None
        try:
            asyncio.get_running_loop()
            return start_thread(self._context.term, name="aioshm-events-close", what="closing a publisher of events")
        except (RuntimeError, OutOfThreads):  # no loop that must not wait, or no thread for what may take its time
            self._context.term()
            return None

    def _open(
        self, kind: int, options: dict[int, int], endpoint: str, bind: bool, hwm: int, curve: CurveKeys | None
    ) -> tuple[zmq.Socket[bytes], str]:
        socket = open_socket(self._context, kind, endpoint, bind=bind, hwm=hwm, curve=curve)
        self._sockets.append(socket)
        for option, value in options.items():
            socket.setsockopt(option, value)
        if self._owns_context:
            socket.setsockopt(zmq.AFFINITY, _REPLAY_THREAD if kind == zmq.ROUTER else _LIVE_THREAD)
        monitor = Monitor(socket)
        self._monitors.append(monitor)
        if kind == zmq.XPUB:
            self._subscriptions = Subscriptions(socket, monitor)
        actual = attach(socket, endpoint, bind=bind)
        if bind:
            self._files.append(BoundFile(actual))
        return socket, actual

    def _read_monitors(self) -> None:
        for monitor in self._monitors:
            failed = monitor.read()[1]
            if failed:
                text = "publisher %s: %d connections failed their handshake, the last at %s: %s"
                self._limiter.warn(logger, text, self.endpoint, len(failed), *failed[-1])

    @staticmethod
    def _warn_about_connecting(endpoint: str) -> None:
        """Say that nothing is bound, as in vLLM, where whoever gives this host's own address may expect that."""
        if is_own_address(host_of(endpoint)):
            logger.warning(
                "a publisher of events connects to %s, which is this host, and binds nothing: that is vLLM's rule for "
                "addresses without a *; subscribers that connect there, too, get nothing. Pass bind=True to bind it, "
                "or bind=False where a subscriber has bound it",
                endpoint,
            )

    @staticmethod
    def _warn_about_open_ports(endpoints: list[str | None]) -> None:
        reached = [endpoint for endpoint in endpoints if endpoint is not None and not is_loopback(endpoint)]
        if reached:
            logger.warning(
                "events are published unencrypted to everybody who reaches %s: pass curve=, or bind a loopback address",
                ", ".join(reached),
            )


def _give_back_name(socket: zmq.Socket[bytes]) -> None:
    """Let an inproc name be bound again at once; ZeroMQ closes sockets some time later, in another thread."""
    name = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    if name.startswith("inproc://"):
        with suppress(zmq.ZMQError):  # it only connected
            socket.unbind(name)


# The most that one subscriber may have. Consumers have one or a few.
MAX_SUBSCRIPTIONS = 128
_SUBSCRIBE = 1


class Subscriptions:
    """Counts the subscriptions of each connection to an XPUB socket, and disconnects peers that have too many.

    ZeroMQ keeps the topics of all subscriptions in a tree, and walks through the tree when a subscriber leaves. ZeroMQ
    cannot refuse a subscription, so the publisher disconnects the peer instead; SECURITY.md lists what remains.
    """

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
