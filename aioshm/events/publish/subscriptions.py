"""Who has subscribed to what at a publisher's port: strangers may not make it hold more than a little.

ZeroMQ keeps each prefix that anybody subscribed to as a path of nodes of some 50 bytes for each of its bytes, and walks
all of them when any subscriber leaves. It tells subscriptions to whoever reads the XPUB socket.
"""

from __future__ import annotations

from collections import Counter

import zmq

from aioshm.zeromq.guard import GuardedMonitor

# Of one subscriber. Consumers have one or a few.
MAX_SUBSCRIPTIONS = 128
# Of all subscribers together, each prefix counted once: what ZeroMQ walks through in a millisecond.
MAX_TOTAL_BYTES = 1 << 16
# How many are read in one turn of the loop.
_TURN = 16
# What a subscription may have around its prefix on the wire: the name of a command, encryption.
_FRAMING_BYTES = 64
_SUBSCRIBE = 1


class Subscriptions:
    """Reads the subscriptions that come in at an XPUB socket; hangs up on those who want too many."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: GuardedMonitor) -> None:
        self._socket = socket
        self._monitor = monitor
        self._of_peer: dict[int, set[bytes]] = {}
        self._peers_of: Counter[bytes] = Counter()
        self._total = 0

    def read(self) -> bool:
        """Read some; True if there may be more."""
        for fd in self._monitor.take_gone():
            self._forget(fd)
        for _ in range(_TURN):
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:  # nothing there, or closed
                return False
            try:
                fd = int(frame.get(zmq.SRCFD))
            except zmq.ZMQError:  # inproc, or the end of a subscription whose peer has left
                continue
            data = frame.bytes
            self._monitor.credit(fd, len(data) + _FRAMING_BYTES)
            if data:
                self._note(fd, data[1:], data[0] == _SUBSCRIBE)
        return True

    def _note(self, fd: int, prefix: bytes, subscribes: bool) -> None:
        of_peer = self._of_peer.setdefault(fd, set())
        if not subscribes:
            if prefix in of_peer:
                of_peer.remove(prefix)
                self._drop(prefix)
            return
        if prefix in of_peer:
            return
        of_peer.add(prefix)
        self._peers_of[prefix] += 1
        if self._peers_of[prefix] == 1:
            self._total += len(prefix)
        if len(of_peer) > MAX_SUBSCRIPTIONS:
            self._refuse(fd, f"it has more than {MAX_SUBSCRIPTIONS} subscriptions")
        while self._total > MAX_TOTAL_BYTES:
            most = max(self._of_peer, key=lambda one: sum(map(len, self._of_peer[one])))
            self._refuse(most, f"of more than {MAX_TOTAL_BYTES} bytes of subscriptions it has most")

    def _refuse(self, fd: int, why: str) -> None:
        self._monitor.cut(fd, why)
        self._forget(fd)

    def _forget(self, fd: int) -> None:
        for prefix in self._of_peer.pop(fd, ()):
            self._drop(prefix)

    def _drop(self, prefix: bytes) -> None:
        self._peers_of[prefix] -= 1
        if not self._peers_of[prefix]:
            del self._peers_of[prefix]
            self._total -= len(prefix)
