"""Which connections of a bound socket are open, and the end of each, over TCP or on this host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from aioshm.engine.security.binding import Protection, over_tcp
from aioshm.engine.security.guard import Guard
from aioshm.zeromq.pump import Pump
from aioshm.zeromq.sockets import Socket, Sockets


class Connections:
    """Knows the connections of a socket by their numbers, ``zmq.SRCFD`` of what comes over them."""

    def __init__(
        self,
        socket: Socket,
        sockets: Sockets,
        address: str,
        protection: Protection,
        on_end: Callable[[int], None],
        rate: float = 32.0,
    ) -> None:
        self._on_end = on_end
        self._guard: Guard | None = None
        self._open: set[int] = set()
        if over_tcp([address]):
            self._guard = Guard(socket, sockets, encrypted=protection.encrypts(address), on_end=on_end, rate=rate)
        else:
            self._monitor = sockets.add(socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED))
            self._pump = Pump(asyncio.get_running_loop(), self._monitor, self._read)

    def of(self, sender: zmq.Frame, frames: list[bytes]) -> int | None:
        """Return the number of the connection that a message has come over; ``sender`` is its first frame.

        None: it has none, for the peer speaks a ZMTP before 3.0 (RFC 23), which no end of this library does. What has
        become of other connections is told before: one that has ended may have had the same number.
        """
        if self._guard is not None:
            self._guard.look()
            self._guard.credit(sender, frames)
        else:
            self._pump.run()
        try:
            return int(sender.get(zmq.SRCFD))
        except zmq.ZMQError:
            return None

    def is_open(self, connection: int) -> bool:
        """Return whether a connection has not ended."""
        return connection in self._open if self._guard is None else self._guard.is_open(connection)

    def close(self) -> None:
        """Watch no longer; before the socket is closed. Idempotent."""
        if self._guard is not None:
            self._guard.close()
        else:
            self._pump.pause()

    def _read(self) -> None:
        with suppress(zmq.ZMQError):
            while True:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                connection = int(event["value"])
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._open.add(connection)
                else:
                    self._open.discard(connection)
                    self._on_end(connection)
