"""The sockets that front ends and the coordinator bind: opened, read, and closed together."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import zmq

from aioshm.arguments import check_int
from aioshm.config import Options
from aioshm.engine.security.binding import ENGINES, Protection
from aioshm.logs import LogLimiter
from aioshm.zeromq.endpoint import BoundFile, attach, limit_frames, open_socket
from aioshm.zeromq.hosts import bracketed
from aioshm.zeromq.monitor import Monitor
from aioshm.zeromq.pump import Pump, receive_frames
from aioshm.zeromq.sockets import Socket, Sockets
from aioshm.zeromq.zap import ZapAuthenticator, require_zap

MAX_STRANGE_BYTES = 1 << 16
"""The largest frame at a socket that strangers can reach, and where legitimate peers send only small frames."""

_LOG_INTERVAL_S = 10.0

T = TypeVar("T")

logger: logging.Logger = logging.getLogger("aioshm.engine")


class Connections(Monitor):
    """The open connections of a socket, by number: the ``zmq.SRCFD`` of each message that a connection brings.

    Failed handshakes are logged. Create this before the socket is bound, to see the end of every connection.
    """

    def __init__(self, socket: Socket, on_end: Callable[[int], None] | None = None) -> None:
        super().__init__(socket, also=zmq.EVENT_ACCEPTED)
        self._on_end = on_end
        self._open: set[int] = set()
        self._limiter = LogLimiter(_LOG_INTERVAL_S)
        self._pump = Pump(asyncio.get_running_loop(), self.pair, self._look)

    def of(self, sender: zmq.Frame) -> int | None:
        """Return the number of the connection of a message's first frame; None for a ZMTP before 3.0 (RFC 23)."""
        self._pump.run()  # first: an ended connection may have had the same number
        try:
            return int(sender.get(zmq.SRCFD))
        except zmq.ZMQError:
            return None

    def is_open(self, connection: int) -> bool:
        return connection in self._open

    def close(self) -> None:
        """Stop watching. Call this before the socket is closed. Idempotent."""
        self._pump.pause()
        super().close()

    def events(self) -> Iterator[tuple[int, int, str]]:
        """Yield the events since the last call, without new connections, which are only recorded."""
        for event in super().events():
            if event[0] == zmq.EVENT_ACCEPTED:
                self._open.add(event[1])
                continue
            if event[0] == zmq.EVENT_DISCONNECTED:
                self._open.discard(event[1])
            yield event

    def _look(self) -> None:
        _, failed = self.read()
        held_back = self._limiter.admit() if failed else None
        if held_back is not None:
            more = held_back + len(failed) - 1
            logger.warning("a connection to %s failed (and %d more): %s", failed[-1].endpoint, more, failed[-1].reason)
        for connection in self.take_gone():
            if self._on_end is not None:
                self._on_end(connection)


class BoundSockets:
    """The bound sockets of one front end, or of the coordinator, on the running loop.

    With ``retry`` a peer with an unknown key may try again, since the key may be known soon.
    """

    def __init__(self, protection: Protection, *, retry: bool = False) -> None:
        self._protection = protection
        self._pumps: list[Pump] = []
        self._files: list[BoundFile] = []
        self._connections: list[Connections] = []
        self._authenticator: ZapAuthenticator | None = None
        self.sockets: Sockets = Sockets(threads=int(protection.recognises))
        try:
            if protection.recognises:
                self._authenticator = ZapAuthenticator(
                    self.sockets.context, protection.recognise, "a process with ZeroMQ sockets", retry=retry
                )
        except BaseException:
            self.sockets.close()
            raise

    def open(
        self,
        kind: int,
        address: str,
        *,
        hwm: int,
        max_bytes: int,
        domain: str = ENGINES,
        silence_s: float | None = None,
    ) -> Socket:
        """Create a socket, to be bound later; ``silence_s`` turns heartbeats on, see `open_socket`."""
        curve = None
        if self._protection.encrypts(address):
            curve = self._protection.own
        socket = self.sockets.add(
            open_socket(
                self.sockets.context,
                kind,
                address,
                bind=True,
                hwm=hwm,
                curve=curve,
                silence_s=silence_s,
                heartbeats=silence_s is not None,
            )
        )
        limit_frames(socket, max_bytes)
        if curve is not None:
            require_zap(socket, domain)
        elif self._protection.secure and address.startswith("ipc://"):
            try:
                socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
            except zmq.ZMQError:  # no peer credentials on this system: only the directory's mode protects
                pass
        return socket

    def watch(self, socket: Socket, on_end: Callable[[int], None] | None = None) -> Connections:
        """Watch the connections of a socket that is not bound yet; ``on_end`` gets the number of each ended one."""
        connections = Connections(socket, on_end)
        self.sockets.add(connections.pair)
        self._connections.append(connections)
        return connections

    def bind(self, socket: Socket, address: str) -> str:
        """Bind a socket, and return its real address."""
        bound = attach(socket, address, bind=True)
        self._files.append(BoundFile(bound))
        return bound

    def read(self, socket: Socket, handle: Callable[[T], object], receive: Callable[[], T]) -> Pump:
        """Hand each message of a socket to a callback."""
        pump = Pump.of_messages(asyncio.get_running_loop(), socket, handle, receive)
        self._pumps.append(pump)
        return pump

    def stop(self) -> None:
        """Stop reading, and admit no more peers. Idempotent."""
        for pump in self._pumps:
            pump.pause()
        for file in self._files:
            file.remove()
        for connections in self._connections:
            connections.close()
        if self._authenticator is not None:
            self._authenticator.close()

    def close(self) -> None:
        """Close all sockets, and drop messages that were not delivered yet. Idempotent."""
        self.stop()
        self.sockets.close()


def with_sender(socket: Socket) -> tuple[zmq.Frame, list[bytes]]:
    """Read a message, and its first frame as a `zmq.Frame`, for `property_of` and `sender_of`."""
    frames = receive_frames(socket)
    return frames[0], [frame.bytes for frame in frames]


def with_views(socket: Socket) -> list[Any]:
    """Read a message: the first frame as bytes, further frames as views of ZeroMQ's memory."""
    frames = receive_frames(socket)
    return [frames[0].bytes, *[frame.buffer for frame in frames[1:]]]


def with_property(socket: Socket, name: str) -> tuple[str, list[Any]]:
    """Read a message as views, and a property of the sender, such as ``"User-Id"``."""
    frames = receive_frames(socket)
    return property_of(frames[0], name), [frame.buffer for frame in frames]


def property_of(frame: zmq.Frame, name: str) -> str:
    """Return a property of a frame's sender; an empty string for a peer that speaks a ZMTP before 3.0."""
    try:
        return str(frame.get(name))
    except (zmq.ZMQError, KeyError):
        return ""


def user_of(frame: zmq.Frame) -> str:
    """Return the name that belongs to the keys of a frame's sender."""
    return property_of(frame, "User-Id")


def sender_of(frame: zmq.Frame) -> str:
    """Describe a frame's sender for log lines: its process id or address."""
    address = property_of(frame, "Peer-Address") or "an unknown address"
    # For a local socket the address is "localhost:uid:gid:pid" where the system has SO_PEERCRED, see unix(7).
    pid = address.rpartition(":")[2]
    if address.startswith("localhost:") and pid.isdigit():
        return f"pid {pid}"
    return address


# Addresses to bind

_LAST_PORT = 65535


def get_engine_client_zmq_addr(local_only: bool, host: str, port: int = 0) -> str:
    """Return an address for a socket between the front end and its engines.

    With port 0 the kernel chooses a port when the socket is bound, and the end that binds publishes the port
    (`EngineStartupCoordinator.handshake_address`, ``zmq.LAST_ENDPOINT``).

    Args:
        local_only: Whether both ends are on this host. Then the address is a new ``ipc://`` path in the runtime
            directory, which only this user can reach.
        host: The address to bind if not ``local_only``; IPv6 may stand in brackets.
        port: The port to bind if not ``local_only``.

    Raises:
        SharedMemoryError: The runtime directory is unusable.
        TypeError, ValueError: ``host`` or ``port`` is invalid.
    """
    if local_only:
        from aioshm.lifeline.sockets import new_address  # here, because engines import this module, and need no ring

        options = msgspec.structs.replace(Options.from_env(), lifeline="directory")
        return f"ipc://{new_address(options, secrets.token_bytes(8), 'engine')}"
    check_int("port", port, minimum=0, maximum=_LAST_PORT)
    if not isinstance(host, str) or not host:
        raise ValueError(f"host must be an address, not {host!r}")
    return f"tcp://{bracketed(host)}:{port}"


def check_handshake_address(address: object) -> str:
    """Return ``address`` if a front end can bind it."""
    if not isinstance(address, str):
        raise TypeError(f"handshake_address must be a string, not {address!r}")
    transport, _, rest = address.partition("://")
    if transport not in ("ipc", "tcp") or not rest:
        raise ValueError(f"handshake_address must be ipc://PATH or tcp://HOST:PORT, not {address!r}")
    return address
