"""ZAP (RFC 27): decides which peers may connect. Unlike pyzmq's, it can wait for keys that may be known soon."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple, TypeAlias

import zmq

from aioshm.logs import LogLimiter
from aioshm.process.limits import naming_limits, start_thread
from aioshm.zeromq.sockets import Socket, send_message

UNKNOWN_S = 2.0
"""How long to wait for a key to become known. Afterwards the peer tries again when its handshake times out."""

logger: logging.Logger = logging.getLogger("aioshm.queue")

_ENDPOINT = "inproc://zeromq.zap.01"
_POLL_MS = 50
_LOG_INTERVAL_S = 10.0
_REQUEST_FRAMES = 8  # a peer, a delimiter, and the six of a request without credentials
_VERSION = b"1.0"
_ADMITTED = b"200"
_TRY_AGAIN = b"300"
_REFUSED = b"400"

Recognise: TypeAlias = Callable[[str, bytes], str | None]
"""Maps the domain of a socket and a public key to the user id of the peer; None refuses the peer."""


def require_zap(socket: Socket, domain: str) -> None:
    """Make a socket, before the bind, refuse all peers where no authenticator is left; by default ZeroMQ admits all."""
    socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


class _Request(NamedTuple):
    peer: bytes
    number: bytes
    domain: str
    key: bytes
    until: float  # when to refuse an unknown key


class ZapAuthenticator:
    """Answers the ZAP requests of a context in a thread, until the context ends; ``recognise`` runs in that thread.

    ``retry``: an unknown key may be known soon; without it a refused peer never tries again.
    """

    def __init__(self, context: zmq.Context[Socket], recognise: Recognise, what: str, *, retry: bool = False) -> None:
        self._recognise = recognise
        self._patience_s = UNKNOWN_S if retry else 0.0
        self._refused = _TRY_AGAIN if retry else _REFUSED
        self._closed = False
        self._limiter = LogLimiter(_LOG_INTERVAL_S)
        with naming_limits(what):
            self._socket: Socket = context.socket(zmq.ROUTER)
            try:
                self._socket.setsockopt(zmq.LINGER, 0)
                self._socket.bind(_ENDPOINT)
                start_thread(self._serve, name="aioshm-zap", what=what)
            except BaseException:
                self._socket.close()  # no thread owns the socket
                raise

    def close(self) -> None:
        """Admit no more peers. Idempotent."""
        self._closed = True

    def _serve(self) -> None:
        waiting: list[_Request] = []
        try:
            while True:
                if self._socket.poll(_POLL_MS if waiting else None):
                    frames = self._socket.recv_multipart()
                    if len(frames) >= _REQUEST_FRAMES:
                        peer, _, _, number, domain, _, _, mechanism, *keys = frames
                        key = keys[0] if mechanism == b"CURVE" and keys else b""
                        until = monotonic() + self._patience_s
                        waiting.append(_Request(peer, number, domain.decode(errors="replace"), key, until))
                waiting = [request for request in waiting if not self._answer(request)]
        except zmq.ZMQError:
            pass  # the context ends
        finally:
            self._socket.close(linger=0)  # the end of the context waits for it

    def _answer(self, request: _Request) -> bool:
        """Answer a request; return False, without an answer, while an unknown key may still become known."""
        if self._closed:
            return True
        status = _ADMITTED
        user: str | None = None
        try:
            user = self._recognise(request.domain, request.key)
        except Exception as error:  # such as MemoryError; the thread must go on
            self._limiter.warn(logger, "a peer is refused: its key could not be checked: %r", error)
        if user is None:
            if monotonic() < request.until:
                return False
            status = self._refused
        answer = [_VERSION, request.number, status, b"", (user or "").encode(), b""]
        send_message(self._socket, [request.peer, b"", *answer])
        return True
