"""Bounds on what subscribers of a publisher's port may subscribe to: strangers can make it hold only a little.

ZeroMQ keeps the prefixes of all subscriptions as a tree, and walks through all of it when any subscriber
leaves. It tells subscriptions to the reader of the XPUB socket.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

import zmq

from aioshm.zeromq.guard import GuardedMonitor

# Of one subscriber. Consumers have one or a few.
MAX_SUBSCRIPTIONS = 128
# Of the tree of all subscribers: what ZeroMQ walks through in a millisecond.
MAX_SLOTS = 1 << 14
# The same times the subscribers: when all of them leave at once, ZeroMQ walks so far, in 140 ms, and not on the loop.
MAX_WALK = 2_000_000
# What a walk takes, and what every subscriber that comes and leaves does besides: measured, with a reserve.
_SLOT_S = 70e-9
_PEER_S = 100e-6
# For what takes no longer than this at worst, no thread is asked.
_BRIEF_S = 0.005
# How many are read in one turn of the loop.
_TURN = 64
# What a subscription may have around its prefix on the wire: the name of a command, encryption.
_FRAMING_BYTES = 64
_SUBSCRIBE = 1


class PrefixTree:
    """How large ZeroMQ's tree of prefixes is.

    Each byte of a prefix that it shares with no other one is a node. A node with several children has a table from the
    least to the greatest of them, whose empty places are walked through, too: with the prefixes in order, that is the
    sum of how far each is from its neighbour.
    """

    def __init__(self) -> None:
        self.slots: int = 0
        self._holders: Counter[bytes] = Counter()
        self._ordered: list[bytes] = []

    def __contains__(self, prefix: bytes) -> bool:
        return prefix in self._holders

    def add(self, prefix: bytes) -> int:
        """Add a prefix of one more subscriber; return by how much the tree has grown."""
        self._holders[prefix] += 1
        if self._holders[prefix] > 1:
            return 0
        at = bisect_left(self._ordered, prefix)
        self._ordered.insert(at, prefix)
        grown = self._share(at)
        self.slots += grown
        return grown

    def remove(self, prefix: bytes) -> None:
        """Remove a prefix of one subscriber."""
        self._holders[prefix] -= 1
        if not self._holders[prefix]:
            del self._holders[prefix]
            at = bisect_left(self._ordered, prefix)
            self.slots -= self._share(at)
            del self._ordered[at]

    def _share(self, at: int) -> int:
        """Return by how much the tree is larger for the prefix at this place."""
        before, one = self._ordered[at - 1] if at else b"", self._ordered[at]
        share = _distance(before, one)
        if at + 1 < len(self._ordered):
            after = self._ordered[at + 1]
            share += _distance(one, after) - _distance(before, after)
        return share


def _distance(first: bytes, second: bytes) -> int:
    """Return how many places of a tree the second prefix adds behind the first, which is before it in order."""
    length = min(len(first), len(second))
    differing = int.from_bytes(first[:length], "big") ^ int.from_bytes(second[:length], "big")
    common = length - (differing.bit_length() + 7) // 8
    between = second[common] - first[common] - 1 if common < length else 0
    return len(second) - common + between


class Subscriptions:
    """Reads the subscriptions that come in at an XPUB socket; hangs up on those who want too many."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: GuardedMonitor) -> None:
        self._socket = socket
        self._monitor = monitor
        self._of_peer: dict[int, set[bytes]] = {}
        self._refused: dict[int, int] = {}  # and by how much the tree is larger until they are gone
        self._tree = PrefixTree()
        self._cost_s = 0.0

    @property
    def slots(self) -> int:
        """How large ZeroMQ's tree is."""
        return self._tree.slots + sum(self._refused.values())

    @property
    def full(self) -> bool:
        """Whether one more subscriber would be too many, for now."""
        return bool(self._refused) or self.slots > MAX_SLOTS or (self._monitor.peers + 1) * self.slots > MAX_WALK

    @property
    def brief(self) -> bool:
        """Whether reading takes a few milliseconds at most, even if all subscribers have left, and none has come."""
        peers = self._monitor.peers
        return peers <= len(self._of_peer) and peers * (_PEER_S + self.slots * _SLOT_S) < _BRIEF_S

    def take_cost(self) -> float:
        """Return how many seconds the subscribers have taken that have left since the last call."""
        cost_s, self._cost_s = self._cost_s, 0.0
        return cost_s

    def read_gone(self) -> None:
        """Forget those that have left, and note what that takes."""
        self._cost_s += self._monitor.take_departed() * (_PEER_S + self.slots * _SLOT_S)
        for fd in self._monitor.take_gone():
            self._refused.pop(fd, None)
            self._forget(fd)

    def read(self) -> bool:
        """Read some; True if there may be more. It can take long, in ZeroMQ, which needs no GIL."""
        self.read_gone()
        for _ in range(_TURN):
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)  # unlike `drain`, which asks with the GIL held
            except zmq.ZMQError:  # nothing there, or closed
                return False
            self._take(frame)
        return True

    def _take(self, frame: zmq.Frame) -> None:
        try:
            fd = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:  # inproc, or the end of a subscription whose peer has left
            return
        data = frame.bytes
        self._monitor.credit(fd, len(data) + _FRAMING_BYTES)
        if data and fd not in self._refused:
            self._note(fd, data[1:], data[0] == _SUBSCRIBE)

    def _note(self, fd: int, prefix: bytes, subscribes: bool) -> None:
        of_peer = self._of_peer.setdefault(fd, set())
        if not subscribes:
            if prefix in of_peer:
                of_peer.remove(prefix)
                self._tree.remove(prefix)
            return
        if prefix in of_peer:
            return
        of_peer.add(prefix)
        grown = self._tree.add(prefix)
        if len(of_peer) > MAX_SUBSCRIPTIONS:
            self._refuse(fd, f"it has more than {MAX_SUBSCRIPTIONS} subscriptions")
        while grown and self._of_peer and self._too_large():
            most = max(self._of_peer, key=lambda one: sum(map(len, self._of_peer[one])) + 16 * len(self._of_peer[one]))
            self._refuse(most, "of too many subscriptions it has most")

    def _too_large(self) -> bool:
        slots, peers = self._tree.slots, self._monitor.peers - len(self._refused)
        return slots > MAX_SLOTS or peers * slots > MAX_WALK

    def _refuse(self, fd: int, why: str) -> None:
        before = self._tree.slots
        self._forget(fd)
        if self._monitor.cut(fd, why):
            self._refused[fd] = before - self._tree.slots

    def _forget(self, fd: int) -> None:
        for prefix in self._of_peer.pop(fd, ()):
            self._tree.remove(prefix)
