"""The sockets of a publisher: opened, monitored, bounded, and closed with time for delivery."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from contextlib import suppress

import zmq

from aioshm.errors import OutOfThreads
from aioshm.events.config import PublisherSettings, check_endpoint, for_rank, publisher_binds
from aioshm.events.protocol.outbox import PublisherStats
from aioshm.events.protocol.wire import MAX_TOPIC_BYTES
from aioshm.logs import LogLimiter
from aioshm.process.limits import start_thread
from aioshm.zeromq.endpoint import ADDED_BYTES, BoundFile, attach, disconnect, open_socket
from aioshm.zeromq.hosts import host_of, is_loopback, is_own_address
from aioshm.zeromq.monitor import Monitor
from aioshm.zeromq.pump import Pump, drain
from aioshm.zeromq.sockets import context_for

logger: logging.Logger = logging.getLogger("aioshm.events")

# Bits of ZeroMQ's I/O threads: live batches do not queue behind replayed ones.
_LIVE_THREAD = 1
_REPLAY_THREAD = 2

# ZeroMQ disconnects a peer that subscribes to a longer topic.
_LIVE_OPTIONS: Mapping[int, int] = {zmq.AFFINITY: _LIVE_THREAD, zmq.MAXMSGSIZE: MAX_TOPIC_BYTES + ADDED_BYTES}
_OPEN_OPTIONS: Mapping[int, int] = {
    **_LIVE_OPTIONS,
    zmq.XPUB_VERBOSER: 1,  # report each subscription, also to known topics, and each end
    # Small: ZeroMQ accepts all subscriptions that it has read ahead, even of a peer that is disconnected then.
    zmq.RCVBUF: 1 << 12,
    zmq.RCVHWM: 8,
}

# Batches that ZeroMQ queues for one replay client; bounds the memory of a slow client.
REPLAY_HWM = 64
_REPLAY_OPTIONS: Mapping[int, int] = {
    zmq.AFFINITY: _REPLAY_THREAD,
    zmq.MAXMSGSIZE: 1024,  # a request has a few bytes
    # The kernel would enlarge the send buffer to megabytes, and filling such buffers for a few slow clients would delay
    # live batches for tens of milliseconds.
    zmq.SNDBUF: 1 << 17,
    zmq.ROUTER_MANDATORY: 1,
}


class PublisherSockets:
    """The sockets of a publisher: one for batches, and a ROUTER if there is a replay endpoint.

    Batches leave through PUB; at a port that strangers can reach, through XPUB, which lets the publisher count
    subscriptions.
    """

    def __init__(self, settings: PublisherSettings, stats: PublisherStats) -> None:
        rank = settings.data_parallel_rank
        endpoint = for_rank(check_endpoint(settings.endpoint), rank)
        replay_endpoint = settings.replay_endpoint
        count = 1
        if replay_endpoint is not None:
            replay_endpoint = for_rank(check_endpoint(replay_endpoint, "replay_endpoint"), rank)
            count = 2
        binds = settings.bind
        if binds is None:
            binds = publisher_binds(endpoint)
        self.replay: zmq.Socket[bytes] | None = None  # receives replay requests
        self.replay_endpoint: str | None = None  # the bound endpoint of ``replay``
        self._context, self._owns_context = context_for(
            endpoint,
            replay_endpoint,
            what=f"a publisher of events at {endpoint}",
            io_threads=count,
            sockets=3 * count,  # a monitor takes two more
            connections=2 * count,
        )
        self._curve = settings.curve
        self._stats = stats
        self._sockets: list[zmq.Socket[bytes]] = []
        self._monitors: list[Monitor] = []
        self._pumps: list[Pump] = []
        self._files: list[BoundFile] = []
        self._limiter = LogLimiter(10.0)
        self._subscriptions: Subscriptions | None = None
        is_open = binds and settings.curve is None and endpoint.startswith("tcp://")
        kind, options = (zmq.XPUB, _OPEN_OPTIONS) if is_open else (zmq.PUB, _LIVE_OPTIONS)
        try:
            self.pub, self.endpoint = self._open(kind, endpoint, binds, settings.hwm, options)
            if is_open:
                self._subscriptions = Subscriptions(self.pub, self._monitors[0], stats)
            if replay_endpoint is not None:
                self.replay, self.replay_endpoint = self._open(
                    zmq.ROUTER, replay_endpoint, True, REPLAY_HWM, _REPLAY_OPTIONS
                )
        except BaseException:
            self.close(0.0)
            raise
        if settings.curve is None:
            _warn_about_open_ports(self.endpoint if binds else None, self.replay_endpoint)
        if settings.bind is None and not binds:
            _warn_about_connecting(endpoint)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Monitor the connections on ``loop``."""
        self._pumps = [Pump(loop, monitor.pair, self._read_monitors) for monitor in self._monitors]
        if self._subscriptions is not None:
            self._pumps.append(Pump(loop, self.pub, self.read_subscriptions))

    def read_subscriptions(self) -> bool:
        """Read subscriptions; call it after sending, too, which may swallow ZeroMQ's notification."""
        if self._subscriptions is None:
            return False
        self._read_monitors()
        return self._subscriptions.read()

    def close(self, linger: float) -> threading.Thread | None:
        """Close the sockets; return the thread, if any, in which ZeroMQ delivers queued messages for ``linger`` s."""
        for pump in self._pumps:
            pump.pause()
        self._read_monitors()
        for monitor in self._monitors:
            monitor.close()
        for socket in self._sockets:
            _release_name(socket)
            socket.close(linger=int(linger * 1000))
        self._sockets.clear()
        for file in self._files:
            file.remove()
        if not self._owns_context or self._context.closed:
            return None
        try:
            asyncio.get_running_loop()
            return start_thread(self._context.term, name="aioshm-events-close", what="closing a publisher of events")
        except (RuntimeError, OutOfThreads):  # no loop that would be blocked, or no thread to be had
            self._context.term()
            return None

    def _open(
        self, kind: int, endpoint: str, binds: bool, hwm: int, options: Mapping[int, int]
    ) -> tuple[zmq.Socket[bytes], str]:
        """Open a socket, and bind or connect it with all options set: connections copy the options then."""
        socket = open_socket(self._context, kind, endpoint, bind=binds, hwm=hwm, curve=self._curve)
        self._sockets.append(socket)
        for option, value in options.items():
            if option != zmq.AFFINITY or self._owns_context:
                socket.setsockopt(option, value)
        self._monitors.append(Monitor(socket))
        actual = attach(socket, endpoint, bind=binds)
        if binds:
            self._files.append(BoundFile(actual))
        return socket, actual

    def _read_monitors(self) -> None:
        for monitor in self._monitors:
            failed = monitor.read()[1]
            if failed:
                self._stats.handshake_failures += len(failed)
                text = "publisher %s: %d connections failed their handshake, the last at %s: %s"
                self._limiter.warn(logger, text, self.endpoint, len(failed), *failed[-1])


def _warn_about_open_ports(*bound: str | None) -> None:
    open_ports = [endpoint for endpoint in bound if endpoint is not None and not is_loopback(endpoint)]
    if open_ports:
        logger.warning(
            "events are published unencrypted to everybody who reaches %s: pass curve=, or bind a loopback address",
            ", ".join(open_ports),
        )


def _warn_about_connecting(endpoint: str) -> None:
    """Warn that no port is bound, if the endpoint is this host's own address."""
    if is_own_address(host_of(endpoint)):
        logger.warning(
            "a publisher of events connects to %s, which is this host, and binds nothing: that is vLLM's rule for "
            "addresses without a *; subscribers that connect there, too, get nothing. Pass bind=True to bind it, "
            "or bind=False where a subscriber has bound it",
            endpoint,
        )


def _release_name(socket: zmq.Socket[bytes]) -> None:
    """Unbind an inproc name now; ZeroMQ closes sockets later, in another thread."""
    name = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    if name.startswith("inproc://"):
        with suppress(zmq.ZMQError):  # it only connected
            socket.unbind(name)


# Subscriptions

# Consumers have one subscription or a few.
MAX_SUBSCRIPTIONS = 128

_SUBSCRIBE = b"\x01"


class Subscriptions:
    """Counts the subscriptions of each connection to an XPUB socket; disconnects a peer that has too many.

    ZeroMQ keeps all topics in a tree, also those that XPUB_MANUAL refuses, and visits the tree when a peer leaves. So
    refusing a subscription would bound nothing. SECURITY.md lists the remaining attacks.
    """

    def __init__(self, socket: zmq.Socket[bytes], monitor: Monitor, stats: PublisherStats) -> None:
        self.topics: dict[int, set[bytes]] = {}  # by the descriptor of the connection
        self._socket = socket
        self._monitor = monitor
        self._stats = stats
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
        peer = disconnect(descriptor, int(endpoint.rpartition(":")[2]))
        if peer is not None:
            self._stats.cut_off += 1
            text = "publisher %s: disconnected %s, which has more than %d subscriptions"
            self._limiter.warn(logger, text, endpoint, peer, MAX_SUBSCRIPTIONS)
