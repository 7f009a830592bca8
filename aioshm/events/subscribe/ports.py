"""The sockets of a subscriber: a SUB for live batches, and a DEALER for replay requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import zmq

from aioshm.errors import OutOfDescriptors
from aioshm.events.config import SubscriberSettings
from aioshm.events.protocol import wire
from aioshm.events.protocol.tracker import Connection, SourceTracker, SubscriberStats
from aioshm.logs import LogLimiter
from aioshm.process.limits import SIGNAL_DESCRIPTORS, check_descriptors
from aioshm.zeromq.endpoint import BOUND_SUBSCRIBER_SILENCE_S, BoundFile, attach, limit_frames, open_socket
from aioshm.zeromq.hosts import is_loopback
from aioshm.zeromq.monitor import ENDED, Monitor
from aioshm.zeromq.pump import Pump, receive_frames
from aioshm.zeromq.sockets import Context, Socket, send_message

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
# Python's memory for a message and for each of its frames, in addition to their bytes.
MESSAGE_OVERHEAD = 128
FRAME_OVERHEAD = 48


class Entry(NamedTuple):
    """A live message that is not decoded yet."""

    connection: Connection
    frames: list[bytes]
    number: int  # messages that came before
    size: int  # memory of the message, in bytes


class Backlog:
    """A queue of live messages, bounded by bytes: a full backlog drops its oldest messages.

    A full backlog shrinks to half of its bound: few large gaps in the publishers' numbers cost less than many small
    ones. The newest message stays, so that its number reveals the gap.
    """

    def __init__(self, max_bytes: int) -> None:
        self.entries: deque[Entry] = deque()
        self.received: int = 0  # messages that were put in
        self.dropped: int = 0  # messages that were dropped
        self.size: int = 0  # memory of all messages, in bytes
        self._max_bytes = max_bytes

    def put(self, connection: Connection, frames: list[bytes]) -> None:
        """Append a message; drop the oldest ones if the backlog is full."""
        size = MESSAGE_OVERHEAD + FRAME_OVERHEAD * len(frames) + sum(map(len, frames))
        self.entries.append(Entry(connection, frames, self.received, size))
        self.size += size
        self.received += 1
        if self.size > self._max_bytes:
            while self.size > self._max_bytes // 2 and len(self.entries) > 1:
                self.take()
                self.dropped += 1

    def take(self) -> Entry:
        """Remove and return the oldest message."""
        entry = self.entries.popleft()
        self.size -= entry.size
        return entry


class LivePort:
    """A SUB socket with its monitor and backlog.

    ZeroMQ bounds the queue of a socket by messages, not by bytes. So the port reads the socket whenever the loop runs,
    into the backlog, which is bounded by bytes.
    """

    def __init__(self, context: Context, endpoint: str, settings: SubscriberSettings, stats: SubscriberStats) -> None:
        self._bound = settings.binds(endpoint)
        is_open = settings.is_open(endpoint)
        if is_open and not is_loopback(endpoint):
            text = "events are taken from anybody who reaches %s, unencrypted: pass curve=, or bind loopback"
            logger.warning(text, endpoint)
        self._sub = open_socket(
            context,
            zmq.SUB,
            endpoint,
            bind=self._bound,
            hwm=OPEN_HWM if is_open else HWM,
            curve=settings.curve,
            silence_s=BOUND_SUBSCRIBER_SILENCE_S if self._bound else None,
        )
        with ExitStack() as on_error:
            on_error.callback(self._sub.close)
            self._sub.setsockopt(zmq.SUBSCRIBE, settings.topic.encode())
            if self._bound:  # a socket that connects would not be connected again after a message that is too large
                limit_frames(self._sub, settings.payload_limit(endpoint))
            self.monitor: Monitor = Monitor(self._sub)
            on_error.callback(self.monitor.close)
            self.endpoint: str = attach(self._sub, endpoint, bind=self._bound)
            on_error.pop_all()
        self.backlog: Backlog = Backlog(settings.max_backlog_bytes)
        self._stats = stats
        self._file = BoundFile(self.endpoint if self._bound else "")
        self._encrypted = settings.curve is not None
        self._limiter = LogLimiter(10.0)
        self._drop_limiter = LogLimiter(10.0)
        self._connections: dict[int, Connection] = {}  # by descriptor
        self._gone: set[int] = set()  # descriptors of ended connections whose last messages may wait in the socket
        self._pumps: list[Pump] = []
        self._back_at: int | None = None  # the first message that may be of a connection that came back

    @property
    def connections(self) -> int:
        """Connected publishers; 1 for inproc, because ZeroMQ reports none within a process."""
        return 1 if self.endpoint.startswith("inproc:") else self.monitor.connections

    def read_ahead(self, tracker: SourceTracker) -> bool:
        """Receive messages into the backlog, and report connections; True if there may be more."""
        received_before = self.backlog.received
        is_empty = self._receive_burst()
        if is_empty:  # no message of an ended connection waits in the socket any more
            for descriptor in self._gone:
                connection = self._connections.pop(descriptor, None)
                if connection is not None:
                    tracker.disconnected(connection)
                elif not self._bound:  # the only publisher, which may be known by replay
                    tracker.disconnected(Connection())
            self._gone.clear()
        self._read_monitor(tracker, received_before)
        if self.backlog.dropped > self._stats.dropped:
            self._stats.dropped = self.backlog.dropped
            text = (
                "subscriber %s: %d batches were dropped undecoded so far, because they come faster than this process "
                "decodes and consumes them; they are replayed, or reported as Lost. For bursts, pass a larger "
                "max_backlog_bytes"
            )
            self._drop_limiter.warn(logger, text, self.endpoint, self.backlog.dropped)
        return not is_empty or bool(self._gone)

    def _receive_burst(self) -> bool:
        """Receive for one slice of time; True if the socket is empty."""
        deadline = time.perf_counter() + _READ_AHEAD_S
        while time.perf_counter() < deadline:
            try:
                frames = receive_frames(self._sub, _MAX_FRAMES)
            except zmq.Again:
                return True
            try:
                descriptor = int(frames[0].get(zmq.SRCFD))
            except zmq.ZMQError:  # inproc has no descriptors
                descriptor = _NO_DESCRIPTOR
            connection = self._connections.setdefault(descriptor, Connection())
            self.backlog.put(connection, [frame.bytes for frame in frames])
        return False

    def take_reconnection(self) -> bool:
        """Return True once after each reconnection, when all messages received before it were taken."""
        entries = self.backlog.entries
        if self._back_at is None or (entries and entries[0].number < self._back_at):
            return False
        self._back_at = None
        return True

    def _read_monitor(self, tracker: SourceTracker, received_before: int) -> None:
        came_back, failed = self.monitor.read()
        self._gone |= self.monitor.take_gone()
        if came_back:
            self._stats.reconnects += came_back
            logger.debug("subscriber %s: connected again", self.endpoint)
            tracker.doubt_answer()
            if self._back_at is None:
                self._back_at = received_before
        self._stats.handshake_failures += len(failed)
        for failure in failed:
            reason = failure.reason
            if self._encrypted and reason == ENDED:
                reason += ", or the peer refuses these keys"
            self._limiter.warn(logger, "subscriber %s: %s", self.endpoint, reason)

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
        self.backlog.entries.clear()
        self._file.remove()


# Requests without an answer before a gap is given up; only one while the replay port is known to be silent.
REPLAY_ATTEMPTS = 3
# ZeroMQ's own queue for replies: a publisher may send so many ahead of this reader.
_REPLY_HWM = 64


class ReplayPort:
    """The client of a publisher's replay port: a socket for each request."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: Context,
        endpoint: str | None,
        settings: SubscriberSettings,
        work: Callable[[], None],
    ) -> None:
        self.endpoint = endpoint
        self.overdue_at: float = 0.0  # loop time at which the answer, or its next reply, is overdue
        self._timeout = settings.replay_timeout
        self._loop = loop
        self._context = context
        self._curve = settings.curve
        self._work = work
        self._dealer: Socket | None = None
        self._pump: Pump | None = None
        self._start = -1
        self._attempts = 0
        self._silent = False
        self._shortage = ""

    @property
    def is_asked(self) -> bool:
        """Whether a request was sent, and its answer is not complete."""
        return self._dealer is not None

    def restart_timeout(self) -> None:
        """Count the timeout of the answer from now on."""
        self.overdue_at = self._loop.time() + self._timeout

    def ask(self, start: int) -> None:
        """Request the batches from ``start`` on; without descriptors, the request is overdue after the timeout."""
        assert self.endpoint is not None
        if start != self._start:  # the last answer was of use, although it was not complete
            self._start = start
            self._attempts = 0
        try:
            check_descriptors("asking for missed batches", 1 + SIGNAL_DESCRIPTORS)  # ZeroMQ would retry for ever
            dealer = open_socket(
                self._context, zmq.DEALER, self.endpoint, bind=False, hwm=_REPLY_HWM, curve=self._curve
            )
            self._dealer = dealer
            attach(dealer, self.endpoint, bind=False)
        except OutOfDescriptors as error:
            self.close()
            if not self._shortage:
                self.restart_timeout()
            self._shortage = str(error.strerror)
            return
        self._shortage = ""
        send_message(dealer, wire.request(start))
        self._pump = Pump(self._loop, dealer, self._work)
        self.restart_timeout()

    def receive(self) -> list[bytes] | None:
        """Return the next reply, if any."""
        if self._dealer is None:
            return None
        try:
            frames = self._dealer.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self._silent = False
        self.restart_timeout()
        return frames

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
        reason = f"{self.endpoint} did not answer {self._attempts} times within {self._timeout} s"
        if self._shortage:
            reason = f"{self.endpoint} was not asked: {self._shortage}"
        if not self._silent:
            logger.warning("subscriber %s: replay: %s", subscriber, reason)
        self._attempts = 0
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
