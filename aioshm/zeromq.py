"""ZeroMQ sockets on an event loop, without zmq.asyncio: a callback when there may be something to do.

A ZeroMQ descriptor turns readable when the socket's state *may* have changed, and only once: whoever is
called must read until there is nothing left, or come back by itself (``zmq_getsockopt(3)``, ZMQ_FD).
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from aioshm.config import shown
from aioshm.errors import EndpointError
from aioshm.limits import SIGNAL_DESCRIPTORS, abandon_when_forked, check_descriptors, check_threads, naming_limits

RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000

_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def is_ipv6(endpoint: str) -> bool:
    """Tell whether the socket needs IPv6 switched on."""
    return endpoint.startswith("tcp://") and ("[" in endpoint or "::" in endpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """Keys for an encrypted connection (ZeroMQ CURVE), each 40 characters of Z85.

    The end that binds is the server and needs only its own pair; the end that connects also needs the
    server's public key. Whoever has that public key gets in.

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


class LogLimiter:
    """Lets one message through every ``interval`` seconds and counts the others."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._next = 0.0
        self._held_back = 0

    def admit(self) -> int | None:
        """Return None to say nothing now, else how many were held back since the last one."""
        now = time.monotonic()
        if now < self._next:
            self._held_back += 1
            return None
        self._next = now + self._interval
        held, self._held_back = self._held_back, 0
        return held


def new_context(
    what: str, *, io_threads: int = 1, sockets: int, connections: int, threads: int = 0
) -> zmq.Context[zmq.Socket[bytes]]:
    """Make a context whose threads run already.

    What its sockets need as well is asked for before: where libzmq lacks something later, it ends the process, or tries
    again for ever without a word.

    Args:
        what: Needs it, for people.
        io_threads: So many threads do its I/O; there is always one more.
        sockets: How many it is going to have; a monitor takes two.
        connections: How many ports and connections, with those of the peers that are expected.
        threads: How many threads of Python's are going to be started for it.

    Raises:
        OutOfDescriptors, OutOfThreads: It cannot have what it needs.
    """
    check_threads(what, io_threads + 1 + threads)
    check_descriptors(what, SIGNAL_DESCRIPTORS * (io_threads + 2 + sockets) + io_threads + 1 + connections)
    with naming_limits(what):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads)
        _start_threads(context)
    return context


def shared_context(what: str, *, sockets: int, connections: int) -> zmq.Context[zmq.Socket[bytes]]:
    """Return the process's own context, see `new_context`, whose threads run already."""
    with naming_limits(what):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    running = context in _shared
    if not running:
        check_threads(what, 2)
    check_descriptors(what, SIGNAL_DESCRIPTORS * (2 * (not running) + sockets) + 2 * (not running) + connections)
    if not running:
        with naming_limits(what):
            context.socket(zmq.PAIR).close()
        _shared.add(context)
    return context


_shared: weakref.WeakSet[zmq.Context[zmq.Socket[bytes]]] = weakref.WeakSet()


def _start_threads(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    try:
        context.socket(zmq.PAIR).close()
    except BaseException:
        context.term()
        raise


def context_for(
    *endpoints: str | None, what: str, io_threads: int = 1, sockets: int, connections: int, threads: int = 0
) -> tuple[zmq.Context[zmq.Socket[bytes]], bool]:
    """Return a context for these endpoints, see `new_context`, and whether it is the caller's own.

    inproc endpoints meet only inside one context, so they share the process's.
    """
    if any(endpoint is not None and endpoint.startswith("inproc://") for endpoint in endpoints):
        return shared_context(what, sockets=sockets, connections=connections), False
    context = new_context(what, io_threads=io_threads, sockets=sockets, connections=connections, threads=threads)
    return context, True


def open_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    endpoint: str,
    *,
    bind: bool,
    hwm: int,
    curve: CurveKeys | None,
) -> zmq.Socket[bytes]:
    """Make a socket for ``endpoint`` that is not bound or connected yet and forgets all when closed.

    Raises:
        TypeError, ValueError: ``endpoint`` is no text that can be one, or ``curve`` has no keys; the text names it.
        EndpointError: The socket cannot be had.
        OutOfDescriptors: There is none left.
    """
    check_endpoint(endpoint)
    if not (curve is None or isinstance(curve, CurveKeys)):
        raise TypeError(f"curve must be CurveKeys or None, not {shown(curve)}")
    try:
        with naming_limits(f"a ZeroMQ socket for {endpoint}"):
            socket: zmq.Socket[bytes] = context.socket(kind)
        try:
            _set_options(socket, endpoint, bind, hwm, curve)
        except BaseException:
            socket.close()
            raise
    except zmq.ZMQError as error:
        raise _refused(error, "make a socket for", endpoint) from error
    return socket


def check_endpoint(endpoint: object) -> str:
    """Return an endpoint that is text at all; whether it makes sense is for ZeroMQ to say.

    Raises:
        TypeError, ValueError: It is none.
    """
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
    remedy = _REMEDIES.get(number)
    return EndpointError(number, f"cannot {what} {endpoint}: {zmq.strerror(number)}{f': {remedy}' if remedy else ''}")


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


def _set_key(socket: zmq.Socket[bytes], option: int, name: str, key: bytes) -> None:
    try:
        socket.setsockopt(option, key)
    except (zmq.ZMQError, TypeError):  # the key is not for everybody to see
        what = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise ValueError(f"curve.{name} must be a key of 40 bytes of Z85, see CurveKeys.generate, not {what}") from None


def attach(socket: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> str:
    """Bind or connect, and return the endpoint that it really is.

    Raises:
        EndpointError: The address is taken, forbidden or malformed; the text names it, and says what to do.
        OutOfDescriptors: There is none left.
    """
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
    """The file of an ``ipc://`` endpoint that was bound, if it has one: ZeroMQ does not remove it.

    Args:
        endpoint: As it was bound.
    """

    def __init__(self, endpoint: str) -> None:
        self._path = endpoint.removeprefix("ipc://") if endpoint.startswith("ipc://") else "@"
        self._found = self._look()

    def remove(self) -> None:
        """Remove it, unless somebody else has bound the same path meanwhile. Idempotent."""
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


class Watch:
    """Calls ``callback`` on the loop whenever the socket may have something to do.

    ``descriptor`` is a duplicate of the socket's, for one whose own is watched by somebody else on this loop.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: zmq.Socket[bytes],
        callback: Callable[[], None],
        descriptor: int | None = None,
    ) -> None:
        self._loop = loop
        self._descriptor = int(socket.getsockopt(zmq.FD)) if descriptor is None else descriptor
        self._callback = callback
        self._watching = False
        abandon_when_forked(self)
        self.resume()

    @property
    def paused(self) -> bool:
        """Whether it calls nobody at present."""
        return not self._watching

    def resume(self) -> None:
        """Watch again, beginning with one call: the descriptor tells nothing about what came meanwhile."""
        if not self._watching:
            self._watching = True
            self._loop.add_reader(self._descriptor, self._callback)
            self._loop.call_soon(self._call)

    def pause(self) -> None:
        """Stop calling; safe on a closed loop."""
        if self._watching:
            self._watching = False
            if not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)

    def abandon_in_child(self) -> None:
        """Leave the loop alone: it shares with the parent's what it waits by."""
        self._watching = False

    def _call(self) -> None:
        if self._watching:
            self._callback()


class Monitor:
    """What a socket says about its connections: read it before trusting what the socket received."""

    def __init__(self, socket: zmq.Socket[bytes], *, also: int = 0) -> None:
        self.reconnects = 0
        self.handshake_failures = 0
        self._monitored = socket
        with naming_limits("the monitor of a ZeroMQ socket"):
            self._pair: zmq.Socket[bytes] = socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILURES | also
            )
        self._lost = False
        self._over = False
        abandon_when_forked(self)

    @property
    def pair(self) -> zmq.Socket[bytes]:
        """The socket to watch."""
        return self._pair

    def read(self) -> tuple[int, list[str]]:
        """Return how many connections came back since the last call, and the peers whose handshake failed."""
        came_back = 0
        failed: list[str] = []
        for kind, endpoint in self.events():
            if kind & _HANDSHAKE_FAILURES:
                failed.append(endpoint)
            elif kind == zmq.EVENT_DISCONNECTED:
                self._lost = True
            elif self._lost:
                self._lost = False
                came_back += 1
        self.reconnects += came_back
        self.handshake_failures += len(failed)
        return came_back, failed

    def events(self) -> Iterator[tuple[int, str]]:
        """Yield what has happened since the last call: one of the kinds above, and the endpoint."""
        while (event := self._receive()) is not None:
            yield event[0], event[2]

    def _receive(self) -> tuple[int, int, str] | None:
        """Return the next event: its kind, its value (a descriptor or an error), the endpoint; None if none is left."""
        if self._over:
            return None
        try:
            frames = self._pair.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:  # nothing there, or closed
            return None
        event = parse_monitor_message(frames)
        return int(event["event"]), int(event["value"]), event["endpoint"].decode(errors="replace")

    def close(self) -> None:
        """Stop listening; call it before the monitored socket is closed. Idempotent."""
        if self._over:
            return
        self._over = True
        try:
            self._monitored.disable_monitor()
        finally:
            self._pair.close(linger=0)

    def abandon_in_child(self) -> None:
        """Touch the sockets no more: ZeroMQ waits for ever for what it believes to be interrupted."""
        self._over = True
