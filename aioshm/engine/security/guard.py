"""Watches who connects to the sockets of front ends and of the coordinator over TCP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import zmq

from aioshm.logs import LogLimiter
from aioshm.zeromq.guard import GuardedMonitor, PeerLimits
from aioshm.zeromq.pump import Pump
from aioshm.zeromq.sockets import Socket, Sockets

STRANGE_BYTES = 1 << 17
"""What a peer without keys may send, at a socket whose true peers send little, that makes no message."""

# What a peer says before it has shown its keys: a greeting and a HELLO, 266 bytes. Afterwards it is not counted.
_BEFORE_KEYS = PeerLimits(burst_bytes=1 << 12, admitted_after=250)
_WIRE_BYTES = 64  # of a message besides its frames
_LOG_INTERVAL_S = 10.0
_HEARTBEAT_BYTES = 18  # ZMTP 3.1: a PING and the PONG for ours

logger: logging.Logger = logging.getLogger("aioshm.engine")


class Guard:
    """Hangs up on strangers who send too much, logs those whose handshake fails, and tells of connections that end."""

    def __init__(
        self,
        socket: Socket,
        sockets: Sockets,
        *,
        encrypted: bool,
        on_end: Callable[[int], None] | None = None,
        rate: float = 32.0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._on_end = on_end
        self._encrypted = encrypted
        self._limiter = LogLimiter(_LOG_INTERVAL_S)
        limits = _BEFORE_KEYS if encrypted else PeerLimits(burst_bytes=STRANGE_BYTES, rate=rate)
        self._monitor = GuardedMonitor(socket, limits, name="engines", nudge=self._nudge)
        self._pump = Pump(self._loop, self._monitor.pair, self.look)
        sockets.close_first(self.close)

    def credit(self, frame: zmq.Frame, frames: list[bytes]) -> None:
        """Note that a message was delivered: what it took does not count; ``frame`` is its first one."""
        if self._encrypted:
            return
        with suppress(zmq.ZMQError):  # a peer whose ZMTP is before 3.0: what it sends counts against it
            self._monitor.credit(int(frame.get(zmq.SRCFD)), sum(map(len, frames)) + _WIRE_BYTES)

    def look(self) -> None:
        """Find out what has become of connections."""
        if self._pump.paused:
            return
        _, failed = self._monitor.read()
        if failed:
            held_back = self._limiter.admit()
            if held_back is not None:
                logger.warning(
                    "a connection to %s failed (and %d more): %s",
                    self._place(),
                    held_back + len(failed) - 1,
                    failed[-1].reason,
                )
        for descriptor in self._monitor.take_gone():
            if self._on_end is not None:
                self._on_end(descriptor)

    def is_open(self, descriptor: int) -> bool:
        """Return whether this is the descriptor of a connection that has not ended."""
        return self._monitor.is_open(descriptor)

    def close(self) -> None:
        """Watch no longer; before the socket is closed. Idempotent."""
        if not self._pump.paused:
            self._pump.pause()
            self._monitor.close()

    def _place(self) -> str:
        return bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def _nudge(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self.look)
        except RuntimeError:  # the loop is closed
            return


def heartbeat_rate(silence_s: float) -> float:
    """Return how many bytes a second heartbeats take, where connections are given up after so much silence."""
    return max(32.0, 2 * _HEARTBEAT_BYTES * 5 / silence_s)
