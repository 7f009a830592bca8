"""ZeroMQ sockets opened, bound and connected, with errors that name the endpoint and say what to do."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass

import zmq

from aioshm.arguments import shown
from aioshm.errors import EndpointError
from aioshm.process.limits import naming_limits
from aioshm.zeromq.hosts import is_ipv6

ADDED_BYTES = 64
"""More than ZeroMQ adds to a frame: 33 bytes with CURVE (https://rfc.zeromq.org/spec/26/), 10 to a subscription."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """Keys for an encrypted connection (ZeroMQ CURVE), each 40 characters of Z85.

    The end that binds is the server and needs only its own pair; the end that connects also needs the
    server's public key. Every peer that has that public key gets in.

    Attributes:
        public: This end's public key.
        secret: This end's secret key.
        server: The public key of the end that binds; None at that end.
    """

    public: bytes
    secret: bytes
    server: bytes | None = None

    @classmethod
    def generate(cls, server: bytes | None = None) -> CurveKeys:
        """Make a new pair, for an end that connects to ``server`` or, without it, for one that binds."""
        public, secret = zmq.curve_keypair()
        return cls(public=public, secret=secret, server=server)

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r}, secret=<hidden>, server={self.server!r})"


def limit_frames(socket: zmq.Socket[bytes], nbytes: int) -> None:
    """Let ZeroMQ hang up on peers that send a larger frame; it counts frames as they are encrypted."""
    socket.setsockopt(zmq.MAXMSGSIZE, nbytes + ADDED_BYTES)


RECONNECT_MS, RECONNECT_MAX_MS = 50, 1000

SILENCE_S = 10.0
"""After so much silence a socket that connects gives a TCP connection up, and makes a new one."""

BOUND_SILENCE_S = 900.0
"""The same for a socket that binds: its peers, which may be programs of others, may have no way to
notice that it gave up. TCP itself waits that long for an acknowledgement."""

BOUND_SUBSCRIBER_SILENCE_S = 60.0
"""The same for a subscriber that binds. A publisher whose connection it gave up gets a reset at its
next message, and connects again. Until then each cut of the network costs a descriptor."""

HANDSHAKE_MS = 10_000
"""How long ZeroMQ's handshake may take, with the proof of the keys."""


def open_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    endpoint: str,
    *,
    bind: bool,
    hwm: int,
    curve: CurveKeys | None,
    silence_s: float | None = None,  # after which a TCP connection to a silent host is given up; None: the default
    heartbeats: bool = False,  # whether peers that do not answer them are given up
) -> zmq.Socket[bytes]:
    """Make a socket for ``endpoint`` that is not bound or connected yet and forgets all when closed."""
    check_endpoint(endpoint)
    if not (curve is None or isinstance(curve, CurveKeys)):
        raise TypeError(f"curve must be CurveKeys or None, not {shown(curve)}")
    try:
        with naming_limits(f"a ZeroMQ socket for {endpoint}"):
            socket: zmq.Socket[bytes] = context.socket(kind)
        try:
            _set_options(socket, endpoint, bind, hwm, curve)
            if endpoint.startswith("tcp://"):
                default_s = BOUND_SILENCE_S if bind else SILENCE_S
                _watch_connections(socket, default_s if silence_s is None else silence_s, heartbeats)
        except BaseException:
            socket.close()
            raise
    except zmq.ZMQError as error:
        raise _refused(error, "make a socket for", endpoint) from error
    return socket


def check_endpoint(endpoint: object) -> str:
    """Return an endpoint that is text at all; whether it makes sense is for ZeroMQ to say."""
    if not isinstance(endpoint, str):
        raise TypeError(f"an endpoint must be a str such as tcp://HOST:PORT or ipc://PATH, not {shown(endpoint)}")
    try:
        endpoint.encode()
    except UnicodeEncodeError:
        raise ValueError(f"an endpoint must be text that UTF-8 can carry, not {shown(endpoint)}") from None
    if "\0" in endpoint:
        raise ValueError(f"an endpoint must have no zero byte, not {shown(endpoint)}")
    return endpoint


def _refused(error: zmq.ZMQError, what: str, endpoint: str) -> EndpointError:
    number = error.errno or 0
    no_port = number == errno.EADDRINUSE and endpoint.endswith((":*", ":0"))
    remedy = _NO_PORT if no_port else _REMEDIES.get(number)
    return EndpointError(number, f"cannot {what} {endpoint}: {zmq.strerror(number)}{f': {remedy}' if remedy else ''}")


_NO_PORT = "no port is free: end programs that have ports, or on Linux widen net.ipv4.ip_local_port_range"

_REMEDIES = {
    errno.EADDRINUSE: "it is in use already: take another one, for tcp the port * for a free one",
    errno.EADDRNOTAVAIL: "this host has no such address: bind one that it has, or *",
    errno.ENODEV: "this host has no such address or interface: bind one that it has, or *",
    errno.EINVAL: "an endpoint is tcp://HOST:PORT, ipc://PATH or inproc://NAME",
    errno.EPROTONOSUPPORT: "an endpoint is tcp://HOST:PORT, ipc://PATH or inproc://NAME",
    zmq.ENOCOMPATPROTO: "an endpoint is tcp://HOST:PORT, ipc://PATH or inproc://NAME",
    errno.ENOENT: "make its directory, or take another one",
    errno.EACCES: "this user may not do that: take another path, or a port above 1023",
    errno.ENAMETOOLONG: "the path of a socket may have 107 bytes: take a shorter directory",
    errno.ECONNREFUSED: "nobody has bound that name in this process",
}


def _set_options(socket: zmq.Socket[bytes], endpoint: str, bind: bool, hwm: int, curve: CurveKeys | None) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.RCVHWM, hwm)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    if is_ipv6(endpoint):
        socket.setsockopt(zmq.IPV6, 1)
    if curve is not None:
        _set_key(socket, zmq.CURVE_PUBLICKEY, "public", curve.public)
        _set_key(socket, zmq.CURVE_SECRETKEY, "secret", curve.secret)
        if bind:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
        elif curve.server is None:
            raise ValueError(f"curve.server must name the public key of the end that binds {endpoint!r}")
        else:
            _set_key(socket, zmq.CURVE_SERVERKEY, "server", curve.server)


def _watch_connections(socket: zmq.Socket[bytes], silence_s: float, heartbeats: bool) -> None:
    """Have TCP, or ZeroMQ, notice that a peer's host is gone: nothing else ends such a connection.

    TCP probes idle connections, which every host answers, and bounds for how long sent data may be unacknowledged.
    ZeroMQ's heartbeats are for peers that answer them: some programs that read events hang up instead.
    """
    socket.setsockopt(zmq.CONNECT_TIMEOUT, max(1, int(silence_s * 500)))  # else lost SYNs take minutes
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.TCP_MAXRT, int(silence_s * 1000))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    if sys.platform == "linux":  # elsewhere some of these options are missing
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(1, int(silence_s / 3)))
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, int(silence_s / 6)))
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    if heartbeats:
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(silence_s * 200)))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(silence_s * 500)))


def _set_key(socket: zmq.Socket[bytes], option: int, name: str, key: bytes) -> None:
    try:
        socket.setsockopt(option, key)
    except (zmq.ZMQError, TypeError):  # the key is not for everybody to see
        what = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise ValueError(f"curve.{name} must be a key of 40 bytes of Z85, see CurveKeys.generate, not {what}") from None


def attach(socket: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> str:
    """Bind or connect, and return the endpoint that it really is."""
    verb = "bind" if bind else "connect to"
    try:
        with naming_limits(f"a socket that is to {verb} {endpoint}"):
            if not bind:
                socket.connect(endpoint)
                return endpoint
            socket.bind(endpoint)
            actual = socket.getsockopt(zmq.LAST_ENDPOINT)
    except zmq.ZMQError as error:
        raise _refused(error, verb, endpoint) from error
    return actual.rstrip(b"\0").decode() if isinstance(actual, bytes) else endpoint


class BoundFile:
    """The file of an ``ipc://`` endpoint that was bound, if it has one: ZeroMQ does not remove it."""

    def __init__(self, endpoint: str) -> None:
        self._path = endpoint.removeprefix("ipc://") if endpoint.startswith("ipc://") else "@"
        self._found = self._look()

    def remove(self) -> None:
        """Remove it, unless another socket was bound to the same path meanwhile. Idempotent."""
        if self._found is not None and self._look() == self._found:
            os.unlink(self._path)
        self._found = None

    def _look(self) -> tuple[int, int] | None:
        if self._path.startswith("@"):  # an abstract socket
            return None
        try:
            found = os.lstat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino
