"""ZAP (RFC 27): decides which peers may connect to the sockets of a context.

pyzmq's `zmq.auth` answers each question immediately, and only with 200 or 400. This authenticator can wait for keys
that may be known soon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from aioshm.process.limits import naming_limits, start_thread
from aioshm.zeromq.pump import Pump, whole
from aioshm.zeromq.sockets import Socket, Sockets

UNKNOWN_S = 2.0
"""How long to wait for a key to become known. Afterwards the peer tries again when its handshake times out."""

_ENDPOINT = "inproc://zeromq.zap.01"
_POLL_S = 0.05
_REQUEST_FRAMES = 8  # a peer, a delimiter, and the six of a request without credentials
_VERSION, _ADMITTED, _TRY_AGAIN, _REFUSED = b"1.0", b"200", b"300", b"400"

Recognise = Callable[[str, bytes], str | None]
"""Maps the domain of a socket and a public key to the peer's user id; None refuses the peer."""


class ZapAuthenticator:
    """Answers the ZAP requests of a context, on the running loop.

    Messages of a peer that was recognised by its key have the user id as their ``User-Id``.

    Args:
        sockets: The context, which closes the authenticator's socket, too.
        recognise: Recognises peers by their keys.
        retry: Whether an unknown key may be known soon; a peer that is refused never tries again.
    """

    def __init__(self, sockets: Sockets, recognise: Recognise, *, retry: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._recognise = recognise
        self._retry = retry
        self._socket = sockets.add(sockets.context.socket(zmq.ROUTER))
        self._socket.bind(_ENDPOINT)
        self._pump = Pump.of_messages(self._loop, self._socket, self._take, whole(self._socket))

    def close(self) -> None:
        """Admit no more peers. Idempotent."""
        self._pump.pause()

    def _take(self, request: list[bytes]) -> None:
        if len(request) >= _REQUEST_FRAMES:
            peer, _, _, number, domain, _, _, mechanism, *keys = request
            key = keys[0] if mechanism == b"CURVE" and keys else b""
            self._answer(peer, number, domain.decode(errors="replace"), key)

    def _answer(self, peer: bytes, request: bytes, domain: str, key: bytes, until: float = 0.0) -> None:
        if self._pump.paused:
            return
        user = self._recognise(domain, key)
        now = self._loop.time()
        until = until or now + UNKNOWN_S
        if user is None and self._retry and now < until:
            self._loop.call_later(_POLL_S, self._answer, peer, request, domain, key, until)
            return
        status = _ADMITTED
        if user is None:
            status = _TRY_AGAIN if self._retry else _REFUSED
        self._socket.send_multipart(
            [peer, b"", _VERSION, request, status, b"", (user or "").encode(), b""], zmq.NOBLOCK
        )
        self._pump.run_soon()  # sending may clear the sign that there is something to read


def admit_only(context: zmq.Context[Socket], key: bytes, what: str) -> None:
    """Admit peers with one public key, in a thread until the context ends: a busy loop keeps no peer waiting.

    Args:
        context: The context.
        key: The key, as 32 bytes.
        what: Names the sockets in the error of a missing descriptor or thread.
    """
    with naming_limits(what):
        socket: Socket = context.socket(zmq.REP)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(_ENDPOINT)
            start_thread(_admit, socket, key, name="aioshm-zap", what=what)
        except BaseException:
            socket.close()  # no thread owns the socket
            raise


def _admit(socket: Socket, key: bytes) -> None:
    try:
        while True:
            version, request, _domain, _address, _identity, mechanism, *keys = socket.recv_multipart()
            status = _ADMITTED if mechanism == b"CURVE" and keys == [key] else _REFUSED
            socket.send_multipart([version, request, status, b"", b"", b""])
    except zmq.ZMQError:  # the context ends
        socket.close(linger=0)
