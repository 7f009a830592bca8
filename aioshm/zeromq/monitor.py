"""The monitor of a ZeroMQ socket: handshakes of its connections, their failures, and disconnections."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from time import monotonic
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from aioshm.process.limits import detach_when_forked, naming_limits

_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

ENDED = "the connection ended during the handshake"
TIMED_OUT = "the handshake timed out"
MISMATCH = "only one of the two ends encrypts"
_OTHER_KEYS = "the peer has other keys"
_REASONS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: _OTHER_KEYS,
    zmq.PROTOCOL_ERROR_ZMTP_KEY_EXCHANGE: _OTHER_KEYS,
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: MISMATCH,
}


class HandshakeFailure(NamedTuple):
    """The endpoint as ZeroMQ names it, and the reason: `ENDED`, `TIMED_OUT`, `MISMATCH`, or another text."""

    endpoint: str
    reason: str


class Monitor:
    """Reads a socket's reports of its connections; read them before trusting a received message."""

    def __init__(self, socket: zmq.Socket[bytes], *, also: int = 0) -> None:
        self.connections: int = 0  # connections as of the last `read`
        self.handshakes: int = 0  # connections that finished their handshake so far
        # Since when there is no connection, by the monotonic clock; None while there is one.
        self.down_since: float | None = monotonic()
        self.failed: bool = False  # the latest connection, or attempt, has failed
        self.refused: bool = False  # authentication has failed since the last connection
        self._gone: set[int] = set()
        self._unfinished = 0  # handshakes that failed, and whose connections have yet to end
        self._monitored = socket
        with naming_limits("the monitor of a ZeroMQ socket"):
            self.pair: zmq.Socket[bytes] = socket.get_monitor_socket(  # the socket to watch
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILURES | also
            )
        self._lost = False
        self._over = False
        detach_when_forked(self)

    def read(self) -> tuple[int, list[HandshakeFailure]]:
        """Return how many connections came back since the last call, and the handshakes that failed."""
        came_back = 0
        failed: list[HandshakeFailure] = []
        for kind, value, endpoint in self.events():
            self.failed = kind != zmq.EVENT_HANDSHAKE_SUCCEEDED
            if kind & _HANDSHAKE_FAILURES:
                failed.append(HandshakeFailure(endpoint, _reason(kind, value)))
                self.refused = self.refused or kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH
                self._unfinished += 1
            elif kind == zmq.EVENT_DISCONNECTED and self._unfinished:
                self._unfinished -= 1
            elif kind == zmq.EVENT_DISCONNECTED:
                self.connections = max(0, self.connections - 1)
                self._lost = True
                if not self.connections and self.down_since is None:
                    self.down_since = monotonic()
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connections += 1
                self.handshakes += 1
                self.down_since = None
                self.refused = False
                came_back += self._lost
                self._lost = False
        return came_back, failed

    def changed(self) -> bool:
        """Read; return whether a connection came, ended, or was refused. Other failed attempts do not count."""
        before = self.connections, self.handshakes, self.refused
        self.read()
        return before != (self.connections, self.handshakes, self.refused)

    def take_gone(self) -> set[int]:
        """Return the descriptors of connections that ended since the last call; the numbers may be in use again."""
        gone = self._gone
        self._gone = set()
        return gone

    def events(self) -> Iterator[tuple[int, int, str]]:
        """Yield each event since the last call: its kind, its value (a descriptor or an error), the endpoint."""
        while not self._over:
            try:
                frames = self.pair.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:  # no event, or the socket is closed
                return
            event = parse_monitor_message(frames)
            kind = int(event["event"])
            value = int(event["value"])
            if kind == zmq.EVENT_DISCONNECTED:
                self._gone.add(value)
            yield kind, value, event["endpoint"].decode(errors="replace")

    def close(self) -> None:
        """Stop listening; call it before the monitored socket is closed. Idempotent."""
        if self._over:
            return
        self._over = True
        try:
            self._monitored.disable_monitor()
        finally:
            self.pair.close(linger=0)

    def detach_after_fork(self) -> None:
        """Leave the sockets to the parent: any call of ZeroMQ in the child retries for ever."""
        self._over = True


def _reason(kind: int, value: int) -> str:
    if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "the keys were refused"
    if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return _REASONS.get(value, "the peer does not speak ZeroMQ")
    if value in (errno.EAGAIN, errno.ETIMEDOUT):  # the last read found no bytes
        return TIMED_OUT
    return ENDED  # the last read found the end of the connection
