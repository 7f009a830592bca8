"""The sockets of a subscriber: a SUB for live batches, and a DEALER for replay requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import zmq

from aioshm.errors import OutOfDescriptors
from aioshm.events.config import SubscriberSettings
from aioshm.events.protocol import wire
from aioshm.events.protocol.tracker import SubscriberStats
from aioshm.events.subscribe.backlog import RECONNECTED, Backlog
from aioshm.logs import LogLimiter
from aioshm.process.limits import SIGNAL_DESCRIPTORS, check_descriptors
from aioshm.zeromq.endpoint import BOUND_SUBSCRIBER_SILENCE_S, BoundFile, attach, limit_frames, open_socket
from aioshm.zeromq.hosts import is_loopback
from aioshm.zeromq.monitor import ENDED, Monitor
from aioshm.zeromq.pump import Pump, receive_frames

logger: logging.Logger = logging.getLogger("aioshm.events")

# How long one callback receives messages into the backlog; decoding has four times as long.
_READ_AHEAD_S = 0.0005
# Messages that ZeroMQ holds for each connection while the loop is blocked; further messages wait in the kernel and at
# the publisher. Fewer at an open port: strangers may send large ones.
HWM = 1000
OPEN_HWM = 16
# A live message has three frames. Longer messages are garbage, of which four frames are kept.
_MAX_FRAMES = 4
# Stands for the descriptor of a connection within this process.
_NO_DESCRIPTOR = -1
_TOO_SLOW = (
    "subscriber %s: %d batches so far were dropped undecoded, because batches come faster than this process decodes "
    "and consumes them: give its loop more processor time, spread the endpoints or topics over several processes, or, "
    "for bursts, pass a larger max_backlog_bytes (dropped batches are replayed, or reported as Lost)"
)


class LivePort:
    """A SUB socket with its monitor and backlog.

    ZeroMQ bounds the queue of a socket by messages, not by bytes. So the port reads the socket whenever the loop runs,
    into the backlog, which is bounded by bytes.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        settings: SubscriberSettings,
        stats: SubscriberStats,
    ) -> None:
        bind = settings.binds(endpoint)
        hwm = HWM
        silence_s = BOUND_SUBSCRIBER_SILENCE_S if bind else None
        if settings.is_open(endpoint):
            hwm = OPEN_HWM
            if not is_loopback(endpoint):
                text = "events are taken from anybody who reaches %s, unencrypted: pass curve=, or bind loopback"
                logger.warning(text, endpoint)
        curve = settings.curve
        self._sub = open_socket(context, zmq.SUB, endpoint, bind=bind, hwm=hwm, curve=curve, silence_s=silence_s)
        try:
            self._sub.setsockopt(zmq.SUBSCRIBE, settings.topic.encode())
            if bind:  # a socket that connects would not be connected again after a message that is too large
                limit_frames(self._sub, settings.payload_limit(endpoint))
            self.monitor: Monitor = Monitor(self._sub)
            try:
                self.endpoint: str = attach(self._sub, endpoint, bind=bind)
            except BaseException:
                self.monitor.close()
                raise
        except BaseException:
            self._sub.close()
            raise
        self.backlog: Backlog = Backlog(settings.max_backlog_bytes)
        self._stats = stats
        self._bound = bind
        self._file = BoundFile(self.endpoint if bind else "")
        self._encrypted = curve is not None
        self._limiter = LogLimiter(10.0)
        self._drop_limiter = LogLimiter(10.0)
        self._connections: dict[int, object] = {}  # identities by descriptor
        self._gone: set[int] = set()  # descriptors of ended connections whose last messages may wait in the socket
        self._pumps: list[Pump] = []

    @property
    def connections(self) -> int:
        """Connected publishers; 1 for inproc, because ZeroMQ reports none within a process."""
        return 1 if self.endpoint.startswith("inproc:") else self.monitor.connections

    def read_ahead(self) -> bool:
        """Receive messages into the backlog; True if there may be more."""
        more = self._read_ahead()
        if self.backlog.dropped > self._stats.dropped:
            self._stats.dropped = self.backlog.dropped
            if self._drop_limiter.admit() is not None:
                logger.warning(_TOO_SLOW, self.endpoint, self.backlog.dropped)
        return more

    def _read_ahead(self) -> bool:
        gone = self._gone | self._read_monitor()
        burst, is_empty = self._receive_burst()
        # A connection came back before its first message was received, so its marker goes before the burst.
        self._gone = set()
        if burst:
            self._gone = self._read_monitor()
        for connection, frames in burst:
            self.backlog.put(connection, frames)
        if is_empty:
            self._end_connections(gone)
        else:
            self._gone |= gone
        return not is_empty or bool(self._gone)

    def _receive_burst(self) -> tuple[list[tuple[object, list[bytes]]], bool]:
        """Receive for one slice of time; return messages with their connections, and whether the socket is empty."""
        burst: list[tuple[object, list[bytes]]] = []
        clock = time.perf_counter
        deadline = clock() + _READ_AHEAD_S
        try:
            while True:
                burst.append(self._receive_one())
                if clock() > deadline:
                    return burst, False
        except zmq.Again:
            return burst, True

    def _receive_one(self) -> tuple[object, list[bytes]]:
        """Receive a message; return its connection, too."""
        received = receive_frames(self._sub, _MAX_FRAMES)
        try:
            descriptor = int(received[0].get(zmq.SRCFD))
        except zmq.ZMQError:  # inproc has no descriptors
            descriptor = _NO_DESCRIPTOR
        connection = self._connections.get(descriptor)
        if connection is None:
            connection = self._connections[descriptor] = object()
        return connection, [frame.bytes for frame in received]

    def _end_connections(self, gone: set[int]) -> None:
        """Append markers for ended connections, now that no message of theirs waits in the socket."""
        for descriptor in gone:
            connection = self._connections.pop(descriptor, None)
            if connection is not None:
                self.backlog.note(connection)
            elif not self._bound:  # the only publisher, which may be known by replay
                self.backlog.note(object())

    def _read_monitor(self) -> set[int]:
        """Handle events of connections; return the descriptors of connections that ended."""
        came_back, failed = self.monitor.read()
        if came_back:
            self._stats.reconnects += came_back
            self.backlog.note(RECONNECTED)
        self._stats.handshake_failures += len(failed)
        for failure in failed:
            reason = failure.reason
            if self._encrypted and reason == ENDED:
                reason += ", or the peer refuses these keys"
            self._limiter.warn(logger, "subscriber %s: %s", self.endpoint, reason)
        return self.monitor.take_gone()

    def watch(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], bool]) -> None:
        """Call ``callback`` if there may be a message or a connection event, again if it returns True."""
        self._pumps = [Pump(loop, self._sub, callback), Pump(loop, self.monitor.pair, callback)]

    def run_soon(self) -> None:
        """Call the callback in the next iteration of the loop."""
        self._pumps[0].run_soon()

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._sub.closed:
            return
        for pump in self._pumps:
            pump.pause()
        self.monitor.close()
        self._sub.close(linger=0)
        self.backlog.clear()
        self._file.remove()


# Requests without an answer before a gap is given up; only one while the replay port is known to be silent.
REPLAY_ATTEMPTS = 3
# ZeroMQ's own queue for replies: a publisher may send so many ahead of this reader.
_REPLY_HWM = 64


class ReplayPort:
    """The client of a publisher's replay port."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str | None,
        settings: SubscriberSettings,
        work: Callable[[], None],
    ) -> None:
        self.endpoint = endpoint
        self.timeout: float = settings.replay_timeout
        self.active_at: float = 0.0  # loop time of the last request, or of the last reply
        self._loop = loop
        self._context = context
        self._curve = settings.curve
        self._work = work
        self._dealer: zmq.Socket[bytes] | None = None
        self._pump: Pump | None = None
        self._attempts = 0
        self._silent = False
        self._shortage: OutOfDescriptors | None = None

    @property
    def overdue_at(self) -> float:
        """When an answer is overdue; without a request, the timeout from now on."""
        if self._dealer is None and self._shortage is None:
            return self._loop.time() + self.timeout
        return self.active_at + self.timeout

    @property
    def is_asked(self) -> bool:
        """Whether an answer is in progress."""
        return self._dealer is not None

    @property
    def has_answer(self) -> bool:
        """Whether a part of the answer can be received now."""
        return self._dealer is not None and bool(self._dealer.poll(0))

    def restart_timeout(self) -> None:
        """Count the timeout of the answer from now on."""
        self.active_at = self._loop.time()

    def receive(self, start: int) -> list[bytes] | None:
        """Send the request for batches from ``start`` on, unless it is sent; return the next reply, if any."""
        if self._dealer is None:
            self._ask(start)
        if self._dealer is None:
            return None
        try:
            frames = self._dealer.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self.restart_timeout()
        return frames

    def _ask(self, start: int) -> None:
        assert self.endpoint is not None
        try:
            check_descriptors("asking for missed batches", 1 + SIGNAL_DESCRIPTORS)  # ZeroMQ would retry for ever
            dealer = open_socket(
                self._context, zmq.DEALER, self.endpoint, bind=False, hwm=_REPLY_HWM, curve=self._curve
            )
            self._dealer = dealer
            attach(dealer, self.endpoint, bind=False)
        except OutOfDescriptors as error:
            if self._shortage is None:
                self._shortage = error
                self.restart_timeout()
            return
        self._shortage = None
        dealer.send_multipart(wire.request(start), zmq.NOBLOCK)
        self._pump = Pump(self._loop, dealer, self._work)
        self.restart_timeout()

    def ended(self) -> None:
        """Close the socket after a complete answer."""
        self.close()
        self._attempts = 0
        self._silent = False

    def give_up(self, subscriber: str) -> str | None:
        """Close an overdue request; after enough attempts return why there will be no answer."""
        self.close()
        self._attempts += 1
        if self._attempts < REPLAY_ATTEMPTS and not self._silent:
            return None
        reason = f"{self.endpoint} did not answer {self._attempts} times within {self.timeout} s"
        if self._shortage is not None:
            reason = f"{self.endpoint} was not asked: {self._shortage.strerror}"
        self._attempts = 0
        if not self._silent:
            logger.warning("subscriber %s: replay: %s", subscriber, reason)
        self._silent = True
        return reason

    def pause(self) -> None:
        """Stop watching the socket until `resume`."""
        if self._pump is not None:
            self._pump.pause()

    def resume(self) -> None:
        """Watch the socket again, with a new timeout: the publisher could not send while nobody read."""
        self.restart_timeout()
        if self._pump is not None:
            self._pump.resume()

    def close(self) -> None:
        """Close the socket of the request, if any."""
        self.pause()
        self._pump = None
        if self._dealer is not None:
            self._dealer.close(linger=0)
            self._dealer = None
