"""Lets engines in one after the other, so that two of one rank are both heard."""

from __future__ import annotations

import asyncio
from collections import deque

import zmq

from aioshm.queue.sockets import Socket, Sockets
from aioshm.zeromq import Watch

PATIENCE_S = 0.1
"""How long a connection may take to say something before the next one is let in."""

_DOMAIN = "aioshm-engines"
_REQUEST_FRAMES = 8  # a peer, a delimiter, and the six of a request without credentials (ZeroMQ RFC 27)


class Doorkeeper:
    """Admits the connections of a ROUTER socket.

    When a second peer of the same identity comes, the socket forgets what the first one has sent and was not read yet.
    If that was its HELLO, nobody would ever know that there were two. So the next connection is made only when the
    previous one's HELLO has been read. ZeroMQ asks for that: each connection waits for an answer over ZAP.

    Args:
        sockets: Where the ROUTER socket belongs.
        router: That socket, not bound yet.
    """

    def __init__(self, sockets: Sockets, router: Socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked: deque[list[bytes]] = deque()
        self._inside: asyncio.TimerHandle | None = None  # until one that was let in has said something
        self._zap = sockets.add(sockets.context.socket(zmq.ROUTER))
        self._zap.bind("inproc://zeromq.zap.01")
        router.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)  # without one nobody is asked
        self._watch = Watch(self._loop, self._zap, self._look)

    def heard(self) -> None:
        """Note that the one that was let in has said something."""
        if self._inside is not None:
            self._inside.cancel()
            self._inside = None
            self._look()

    def close(self) -> None:
        """Let nobody in any more. Idempotent."""
        self._watch.pause()
        if self._inside is not None:
            self._inside.cancel()

    def _look(self) -> None:
        while not self._watch.paused:
            self._read()  # also after each answer: sending may swallow the sign that there is something to read
            if self._inside is not None or not self._asked:
                return
            peer, empty, version, request = self._asked.popleft()[:4]
            self._zap.send_multipart([peer, empty, version, request, b"200", b"", b"", b""], zmq.NOBLOCK)
            self._inside = self._loop.call_later(PATIENCE_S, self.heard)

    def _read(self) -> None:
        while True:
            try:
                request = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            if len(request) >= _REQUEST_FRAMES:
                self._asked.append(request)
