"""Who may come to a publisher's port, and when: strangers that come and go may not keep its loop busy.

Whenever a subscriber leaves, ZeroMQ walks through all subscriptions of all peers, in the thread that publishes, and
goes on for as long as there are others that leave meanwhile. No limit on what a peer sends bounds that. So subscribers
are let in one after the other: ZeroMQ asks about each connection (ZAP, RFC 27), and an answer may take its time. Who
waits has no part in the socket yet, and costs nothing when it leaves.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import zmq

from aioshm.events.publish.subscriptions import Subscriptions
from aioshm.zeromq.pump import Pump, drain, whole

DOMAIN = b"aioshm-events"
# Of the loop's time, what those that leave may take of it on average; and how much of it at once, after a calm.
_SHARE = 0.1
_AT_ONCE_S = 0.03
# So many come in, then what they subscribe to is read before the next ones do.
_TOGETHER = 4
_PAUSE_S = 0.001
# Of those that wait; the others are told to come back.
_MAX_WAITING = 1024
_REQUEST_FRAMES = 8  # a peer, a delimiter, and the six of a request without credentials
_ADMITTED, _LATER = b"200", b"300"


class Admission:
    """Answers ZeroMQ's questions about connections to an XPUB socket, which is not bound yet.

    Args:
        context: The socket's, in which nobody else answers.
        socket: The XPUB socket.
        subscriptions: Reads what its peers subscribe to.
        ready: Tells whether nothing of theirs waits to be read; if something does, it will be read.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        subscriptions: Subscriptions,
        ready: Callable[[], bool],
    ) -> None:
        self.zap: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.zap.bind("inproc://zeromq.zap.01")
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        self._subscriptions = subscriptions
        self._ready = ready
        self._waiting: deque[list[bytes]] = deque()
        self._pump: Pump | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._spent_s = 0.0
        self._at = time.monotonic()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let them in from now on, on ``loop``."""
        self._loop = loop
        self._pump = Pump(loop, self.zap, self._work)

    def close(self) -> None:
        """Let nobody in any more. Idempotent."""
        if self._pump is not None:
            self._pump.pause()
        if self._timer is not None:
            self._timer.cancel()
        self.zap.close(linger=0)

    def _work(self) -> bool:
        more = drain(self.zap, whole(self.zap), self._take)
        if self._timer is not None or not self._waiting:
            return more
        self._admit()
        return True  # sending may swallow the sign that there is something to read

    def _come_back(self) -> None:
        self._timer = None
        if self._pump is not None:
            self._pump.run()

    def _admit(self) -> None:
        """Let some in, or wait until there is time for them."""
        pause_s = self._busy_s()
        if not pause_s:
            for _ in range(min(_TOGETHER, len(self._waiting))):
                self._answer(self._waiting.popleft(), _ADMITTED)
            pause_s = _PAUSE_S
        self._timer = self._loop.call_later(pause_s, self._come_back)

    def _busy_s(self) -> float:
        """Return in how many seconds the next one may be let in."""
        if not self._ready():
            return _PAUSE_S
        self._subscriptions.read_gone()
        now = time.monotonic()
        self._spent_s = max(0.0, self._spent_s - _SHARE * (now - self._at)) + self._subscriptions.take_cost()
        self._at = now
        if self._spent_s > _AT_ONCE_S:
            return (self._spent_s - _AT_ONCE_S) / _SHARE + _PAUSE_S
        return _PAUSE_S if self._subscriptions.full else 0.0

    def _take(self, request: list[bytes]) -> None:
        if len(request) < _REQUEST_FRAMES:
            return
        if request[4] != DOMAIN:  # another socket's peer
            self._answer(request, _ADMITTED)
        elif len(self._waiting) >= _MAX_WAITING:
            self._answer(request, _LATER)
        else:
            self._waiting.append(request)

    def _answer(self, request: list[bytes], status: bytes) -> None:
        self.zap.send_multipart([*request[:4], status, b"", b"", b""], zmq.NOBLOCK)
