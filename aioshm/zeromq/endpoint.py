"""ZeroMQ sockets opened, bound and connected, with errors that name the endpoint and say what to do."""

from __future__ import annotations

import errno
import os
import socket as sockets
import stat
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


RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000

SILENCE_S = 10.0
"""Silence after which a connecting socket replaces a TCP connection."""

BOUND_SILENCE_S = 900.0
"""Silence after which a bound socket closes a TCP connection, as TCP itself: other programs may not notice the loss."""

BOUND_SUBSCRIBER_SILENCE_S = 60.0
"""The same for a bound subscriber: each cut of the network costs a descriptor. Publishers reconnect."""

HANDSHAKE_MS = 10_000
"""How long the handshake of ZeroMQ and CURVE may take."""


def open_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    endpoint: str,
    *,
    bind: bool,
    hwm: int,
    curve: CurveKeys | None,
    silence_s: float | None = None,  # closes a TCP connection to a silent host; None: the default
    heartbeats: bool = False,  # closes connections to peers that do not answer
) -> zmq.Socket[bytes]:
    """Make a socket for ``endpoint``, not bound or connected yet, that drops unsent messages when it is closed."""
    check_endpoint(endpoint)
    if not (curve is None or isinstance(curve, CurveKeys)):
        raise TypeError(f"curve must be CurveKeys or None, not {shown(curve)}")
    try:
        with naming_limits(f"a ZeroMQ socket for {endpoint}"):
            socket: zmq.Socket[bytes] = context.socket(kind)
        try:
            _set_options(socket, endpoint, bind, hwm, curve)
            if endpoint.startswith("tcp://"):
                if silence_s is None:
                    silence_s = BOUND_SILENCE_S if bind else SILENCE_S
                _watch_connections(socket, silence_s, heartbeats)
        except BaseException:
            socket.close()
            raise
    except zmq.ZMQError as error:
        raise _refused(error, "make a socket for", endpoint) from error
    return socket


def check_endpoint(endpoint: object) -> str:
    """Return ``endpoint`` if it is valid text; ZeroMQ checks the meaning."""
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
    text = f"cannot {what} {endpoint}: {zmq.strerror(number)}"
    remedy = _REMEDIES.get(number)
    if number == errno.EADDRINUSE and endpoint.endswith((":*", ":0")):
        remedy = _NO_PORT
    if remedy:
        text += f": {remedy}"
    return EndpointError(number, text)


_NO_PORT = "no port is free: end programs that have ports, or on Linux widen net.ipv4.ip_local_port_range"

_REMEDIES = {
    errno.EADDRINUSE: "it is in use: use another endpoint, for tcp the port * for a free port",
    errno.EADDRNOTAVAIL: "this host has no such address: bind an address of this host, or *",
    errno.ENODEV: "this host has no such address or interface: bind an address of this host, or *",
    errno.EINVAL: "an endpoint is tcp://HOST:PORT, ipc://PATH or inproc://NAME",
    errno.EPROTONOSUPPORT: "an endpoint is tcp://HOST:PORT, ipc://PATH or inproc://NAME",
    zmq.ENOCOMPATPROTO: "an endpoint is tcp://HOST:PORT, ipc://PATH or inproc://NAME",
    errno.ENOENT: "create its directory, or use another path",
    errno.EACCES: "this user has no permission: use another path, or a port above 1023",
    errno.ENAMETOOLONG: "a socket path has at most 107 bytes: use a shorter directory",
    errno.ECONNREFUSED: "no socket of this process has bound the name",
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
    """Let TCP notice that a peer's host is gone; and ZeroMQ, for peers that do not hang up at heartbeats."""
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
    except (zmq.ZMQError, TypeError):  # the text must not show a secret key
        what = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise ValueError(f"curve.{name} must be a key of 40 bytes of Z85, see CurveKeys.generate, not {what}") from None


def attach(socket: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> str:
    """Bind or connect, and return the actual endpoint."""
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
    assert isinstance(actual, bytes)
    return actual.rstrip(b"\0").decode()


class BoundFile:
    """The file of a bound ``ipc://`` endpoint, if any: ZeroMQ does not remove the file."""

    def __init__(self, endpoint: str) -> None:
        self._path = "@"  # an abstract socket has no file
        if endpoint.startswith("ipc://"):
            self._path = endpoint.removeprefix("ipc://")
        self._found = self._stat()

    def remove(self) -> None:
        """Remove the file, unless another socket was bound to the path meanwhile. Idempotent."""
        if self._found is not None and self._stat() == self._found:
            os.unlink(self._path)
        self._found = None

    def _stat(self) -> tuple[int, int] | None:
        if self._path.startswith("@"):  # an abstract socket
            return None
        try:
            found = os.lstat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino


def disconnect(descriptor: int, port: int) -> str | None:
    """Shut down a connection of ZeroMQ; return the peer's address, or None if the descriptor is another one's now."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        with sockets.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family == sockets.AF_UNIX or connection.getsockname()[1] != port:
                return None
            host, number = connection.getpeername()[:2]
            connection.shutdown(sockets.SHUT_RDWR)
    except OSError:
        return None
    return f"{host}:{number}"
