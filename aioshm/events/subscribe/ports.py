"""The sockets of a subscriber: a SUB for live batches, and a DEALER while it asks for batches that it has missed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import count

import zmq

from aioshm.errors import OutOfDescriptors
from aioshm.events.protocol import wire
from aioshm.events.subscribe.backlog import CAME_BACK, Backlog
from aioshm.process.limits import SIGNAL_DESCRIPTORS, check_descriptors
from aioshm.zeromq.endpoint import BOUND_SUBSCRIBER_SILENCE_S, BoundFile, CurveKeys, attach, limit_frames, open_socket
from aioshm.zeromq.monitor import ENDED, Monitor
from aioshm.zeromq.pump import Pump, receive_frames

# How long one turn of the loop receives messages into the backlog, and how long while that is more than half full:
# decoding then needs the time more than messages that may be dropped.
_READ_AHEAD_S, _READ_AHEAD_BUSY_S = 0.002, 0.0005
# Messages that ZeroMQ holds for each connection to an open port: strangers may send large ones.
OPEN_HWM = 16
# A live message has three; of longer ones, which are garbage, so many are kept.
_MAX_FRAMES = 4
_NOBLOCK, _RCVMORE = int(zmq.NOBLOCK), int(zmq.RCVMORE)


class LivePort:
    """A SUB socket with its monitor.

    ZeroMQ bounds the queue of a socket by messages, not by bytes. So the socket is read whenever the loop runs, into
    the backlog, which is bounded by bytes.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        topic: bytes,
        *,
        bind: bool,
        hwm: int,
        curve: CurveKeys | None,
        max_bytes: int,
        backlog: Backlog,
    ) -> None:
        silence_s = BOUND_SUBSCRIBER_SILENCE_S if bind else None
        if bind and curve is None and endpoint.startswith("tcp://"):
            hwm = min(hwm, OPEN_HWM)
        self._sub = open_socket(context, zmq.SUB, endpoint, bind=bind, hwm=hwm, curve=curve, silence_s=silence_s)
        try:
            self._sub.setsockopt(zmq.SUBSCRIBE, topic)
            if bind:  # a socket that connects would not be connected again after a message that is too large
                limit_frames(self._sub, max_bytes)
            self._monitor = Monitor(self._sub)
            try:
                self.endpoint: str = attach(self._sub, endpoint, bind=bind)
            except BaseException:
                self._monitor.close()
                raise
        except BaseException:
            self._sub.close()
            raise
        self._file = BoundFile(self.endpoint) if bind else None
        self._encrypted = curve is not None
        self._bound = bind
        self._backlog = backlog
        self._numbers = count()
        self._connection = next(self._numbers)  # of a port that connects
        self._senders: dict[int, int] = {}  # by descriptor, of a port that is bound
        self._gone: set[int] = set()  # descriptors of connections whose last messages may wait in the socket
        self._refused: list[str] = []
        self._pumps: list[Pump] = []

    @property
    def connections(self) -> int:
        """Publishers that are connected; ZeroMQ reports none within a process."""
        return 1 if self.endpoint.startswith("inproc:") else self._monitor.connections

    @property
    def reconnects(self) -> int:
        """Connections that broke and came back."""
        return self._monitor.reconnects

    @property
    def handshake_failures(self) -> int:
        """Connections that ended before their handshake."""
        return self._monitor.handshake_failures

    def read_ahead(self) -> bool:
        """Receive messages into the backlog; True if there may be more."""
        self._backlog.shrink()
        if self._backlog.is_shrinking:
            return True
        gone = self._gone | self._read_monitor()
        burst, is_empty = self._receive_burst()
        # A connection that came back did so before its first message was received: its marker goes before the burst.
        self._gone = self._read_monitor() if burst else set()
        for connection, frames in burst:
            self._backlog.put(connection, frames)
        if is_empty:
            self._end_connections(gone)
        else:
            self._gone |= gone
        self._backlog.shrink()
        return not is_empty or bool(self._gone) or self._backlog.is_shrinking

    def _receive_burst(self) -> tuple[list[tuple[int, list[bytes]]], bool]:
        """Receive for one slice of time; return messages with their connections, and whether none is left."""
        burst: list[tuple[int, list[bytes]]] = []
        clock = time.perf_counter
        deadline = clock() + (_READ_AHEAD_BUSY_S if self._backlog.is_half_full else _READ_AHEAD_S)
        try:
            while True:
                burst.append(self._receive_one())
                if clock() > deadline:
                    return burst, False
        except zmq.Again:
            return burst, True

    def _receive_one(self) -> tuple[int, list[bytes]]:
        """Receive a message; return its connection, too."""
        if not self._bound:
            frames = [self._sub.recv(_NOBLOCK)]
            while self._sub.getsockopt(_RCVMORE):
                frames.append(self._sub.recv(_NOBLOCK))
            return self._connection, frames
        received = receive_frames(self._sub, _MAX_FRAMES)
        try:
            descriptor = int(received[0].get(zmq.SRCFD))
        except zmq.ZMQError:  # a transport without descriptors
            descriptor = -1
        if descriptor not in self._senders:
            self._senders[descriptor] = next(self._numbers)
        return self._senders[descriptor], [frame.bytes for frame in received]

    def _end_connections(self, gone: set[int]) -> None:
        """Note the connections that ended; until the socket was empty, their last messages waited in it."""
        if not gone:
            return
        if self._bound:
            for descriptor in gone & self._senders.keys():
                self._backlog.note(self._senders.pop(descriptor))
        else:
            self._backlog.note(self._connection)
            self._connection = next(self._numbers)

    def _read_monitor(self) -> set[int]:
        """Note connections that came back and peers that were refused; return the descriptors of those that ended."""
        came_back, failed = self._monitor.read()
        if came_back:
            self._backlog.note(CAME_BACK)
        hint = ", or the peer refuses these keys" if self._encrypted else ""
        self._refused += [each.reason + (hint if each.reason == ENDED else "") for each in failed]
        return self._monitor.take_gone()

    def take_refused(self) -> list[str]:
        """Return why peers were refused since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def watch(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], bool]) -> None:
        """Call ``callback`` when there may be a message or news of connections, again if it returns True."""
        self._pumps = [Pump(loop, self._sub, callback), Pump(loop, self._monitor.pair, callback)]

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._sub.closed:
            return
        for pump in self._pumps:
            pump.pause()
        self._monitor.close()
        self._sub.close(linger=0)
        if self._file is not None:
            self._file.remove()


logger: logging.Logger = logging.getLogger("aioshm.events")

# Requests that get no answer before a gap is given up; one only, while the replay port is known to be silent.
REPLAY_ATTEMPTS = 3
# ZeroMQ's own queue for replies: what a publisher may send ahead of this reader.
_REPLY_HWM = 64


class ReplayPort:
    """A publisher's replay port, as one subscriber asks there."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str | None,
        curve: CurveKeys | None,
        timeout: float,
        work: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._context = context
        self._curve = curve
        self._timeout = timeout
        self._work = work
        self._dealer: zmq.Socket[bytes] | None = None
        self._pump: Pump | None = None
        self._attempts = 0
        self._silent = False
        self._lacking: OutOfDescriptors | None = None
        self.endpoint = endpoint
        self.asked_at: float = 0.0  # when it was asked last, or has sent something, by the loop's clock
        self.failures: int = 0  # requests that got no answer in time

    @property
    def overdue_at(self) -> float:
        """When an answer is overdue; if nothing was asked yet, that time from now on."""
        asked = self._dealer is not None or self._lacking is not None
        return (self.asked_at if asked else self._loop.time()) + self._timeout

    @property
    def is_asked(self) -> bool:
        """Whether a request was sent whose answer has not ended."""
        return self._dealer is not None

    @property
    def has_answer(self) -> bool:
        """Whether something of an answer is there to be received."""
        return self._dealer is not None and bool(self._dealer.poll(0))

    def heard(self) -> None:
        """Note that the publisher is at it, or could not be: its time for an answer begins anew."""
        self.asked_at = self._loop.time()

    def receive(self, start: int) -> list[bytes] | None:
        """Return the next message of the answer to "all from ``start`` on", asked first; None: none is there."""
        if self._dealer is None:
            self._ask(start)
        if self._dealer is None:
            return None
        try:
            frames = self._dealer.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self.asked_at = self._loop.time()
        return frames

    def _ask(self, start: int) -> None:
        assert self.endpoint is not None
        try:
            check_descriptors("asking for what was missed", 1 + SIGNAL_DESCRIPTORS)  # ZeroMQ would try again for ever
            self._dealer = dealer = open_socket(
                self._context, zmq.DEALER, self.endpoint, bind=False, hwm=_REPLY_HWM, curve=self._curve
            )
            attach(dealer, self.endpoint, bind=False)
        except OutOfDescriptors as error:
            if self._lacking is None:
                self._lacking = error
                self.heard()
            return
        self._lacking = None
        dealer.send_multipart(wire.request(start), zmq.NOBLOCK)
        self._pump = Pump(self._loop, dealer, self._work)
        self.heard()

    def ended(self) -> None:
        """Note that the answer is complete."""
        self.close()
        self._attempts = 0
        self._silent = False

    def give_up(self, asker: str) -> str | None:
        """Forget a request that is overdue; return why there will be no answer, once it was asked often enough."""
        self.close()
        self._attempts += 1
        self.failures += 1
        if self._attempts < (1 if self._silent else REPLAY_ATTEMPTS):
            return None
        reason = f"{self.endpoint} did not answer {self._attempts} times within {self._timeout} s"
        if self._lacking is not None:
            reason = f"{self.endpoint} was not asked: {self._lacking.strerror}"
        self._attempts = 0
        if not self._silent:
            logger.warning("subscriber %s: replay: %s", asker, reason)
        self._silent = True
        return reason

    def pause(self) -> None:
        """Leave the socket alone until `resume`."""
        if self._pump is not None:
            self._pump.pause()

    def resume(self) -> None:
        """Go on: the publisher could not have sent while nobody read."""
        self.heard()
        if self._pump is not None:
            self._pump.resume()

    def close(self) -> None:
        """Forget the request, if there is one."""
        self.pause()
        self._pump = None
        if self._dealer is not None:
            self._dealer.close(linger=0)
            self._dealer = None
