"""Lets in who may connect to a socket, and engines that shake hands one after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import zmq

from aioshm.zeromq.pump import Pump, drain, whole
from aioshm.zeromq.sockets import Socket, Sockets

PATIENCE_S = 0.1
"""How long a connection may take to say something before the next one is let in."""

UNKNOWN_S = 2.0
"""How long a key may be unknown that may be known soon; after that ZeroMQ tries again when its handshake times out."""

_LOOK_S = 0.05
_DOMAIN = "aioshm-engines"
_REQUEST_FRAMES = 8  # a peer, a delimiter, and the six of a request without credentials
_VERSION, _ADMITTED, _TRY_AGAIN, _REFUSED = b"1.0", b"200", b"300", b"400"

Recognise = Callable[[str, bytes], str | None]
"""Gets the domain of a socket and a public key; returns who that is, or None if nobody who may connect there."""


class Doorkeeper:
    """Answers ZeroMQ's questions about who may connect to the sockets of a context (ZAP, RFC 27).

    Peers that have proven to own a key are recognised by it: messages of theirs have the name as their ``User-Id``.
    """

    def __init__(self, sockets: Sockets, recognise: Recognise | None = None, *, retry: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._recognise = recognise
        self._retry = retry  # an unknown key may be known soon; a peer that is refused never tries again
        self._one_by_one = False
        self._asked: deque[list[bytes]] = deque()
        self._inside: asyncio.TimerHandle | None = None  # until one that was let in has said something
        self._zap = sockets.add(sockets.context.socket(zmq.ROUTER))
        self._zap.bind("inproc://zeromq.zap.01")
        self._pump = Pump(self._loop, self._zap, self._work)

    def admit_one_by_one(self, router: Socket) -> None:
        """Admit the next connection only when `heard` was called for the previous one.

        When a second peer of the same identity comes, a ROUTER that hands over forgets what the first one has sent and
        was not read yet. If that was its HELLO, nobody would ever know that there were two.
        """
        self._one_by_one = True
        if not router.getsockopt(zmq.ZAP_DOMAIN):  # nobody is asked about peers without keys then
            router.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)

    def heard(self) -> None:
        """Note that the one that was let in has said something."""
        if self._inside is not None:
            self._inside.cancel()
            self._inside = None
            self._pump.run()

    def close(self) -> None:
        """Let nobody in any more. Idempotent."""
        self._pump.pause()
        if self._inside is not None:
            self._inside.cancel()

    def _work(self) -> bool:
        more = drain(self._zap, whole(self._zap), self._asked.append)
        if self._inside is not None or not self._asked:
            return more
        request = self._asked.popleft()
        if len(request) >= _REQUEST_FRAMES:
            peer, _, _, number, domain, _, _, mechanism, *key = request
            self._answer(
                peer, number, domain.decode(errors="replace"), key[0] if mechanism == b"CURVE" and key else b""
            )
        return True

    def _answer(self, peer: bytes, request: bytes, domain: str, key: bytes, until: float = 0.0) -> None:
        if self._pump.paused:
            return
        user = "" if self._recognise is None else self._recognise(domain, key)
        now = self._loop.time()
        until = until or now + UNKNOWN_S
        if user is None and self._retry and now < until:
            self._loop.call_later(_LOOK_S, self._answer, peer, request, domain, key, until)
            return
        refused = _TRY_AGAIN if self._retry else _REFUSED
        status = refused if user is None else _ADMITTED
        self._zap.send_multipart([peer, b"", _VERSION, request, status, b"", (user or "").encode(), b""], zmq.NOBLOCK)
        self._pump.run_soon()  # sending may swallow the sign that there is something to read
        if self._one_by_one and user is not None:
            self._inside = self._loop.call_later(PATIENCE_S, self.heard)
