"""Where a subscriber hears live batches: a SUB socket, or a port that strangers may reach."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Protocol

import zmq

from aioshm.events.protocol.zmtp import GREETING, Refused, SubPeer
from aioshm.zeromq.curve import CurveKeys, limit_frames
from aioshm.zeromq.endpoint import BOUND_SUBSCRIBER_SILENCE_S, BoundFile, attach, open_socket
from aioshm.zeromq.monitor import ENDED, Monitor
from aioshm.zeromq.pump import Pump

# Of all messages that are not whole yet, at an open port; the peer that has sent most of that is hung up on.
MAX_HELD_BYTES = 1 << 24
# Pieces of 8 KiB that ZeroMQ reads ahead from one peer.
_CHUNKS = 16
_HANDSHAKE_S = 30.0


class LivePort(Protocol):
    """Messages from publishers, and what is to be known of their connections before one trusts a message.

    Attributes:
        endpoint: What it is really bound or connected to.
        sender: Identifies the connection that the last message came over.
        connections: Publishers that it is connected with.
        reconnects: Connections that broke and came back.
        handshake_failures: Connections that ended before their handshake.
        cut_off: Connections that sent more than they may.
    """

    endpoint: str
    sender: object

    @property
    def connections(self) -> int: ...

    @property
    def reconnects(self) -> int: ...

    @property
    def handshake_failures(self) -> int: ...

    @property
    def cut_off(self) -> int: ...

    def receive(self) -> list[bytes] | None:
        """Return the next message, or None if there is none now."""

    def ended(self) -> list[object]:
        """Return the connections that have ended, and whose messages were all received, since the last call."""

    def read(self) -> tuple[int, list[str]]:
        """Return the number of connections that came back since the last call, and log texts on refused peers."""

    def watch(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> tuple[Pump, Pump | None]:
        """Have ``callback`` called when there may be a message, and when there may be news of connections only."""

    def close(self) -> None:
        """Close the port. Idempotent."""


class SubPort:
    """A SUB socket with its monitor: for one who connects, or who knows its peers by their keys."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        topic: bytes,
        *,
        bind: bool,
        hwm: int,
        curve: CurveKeys | None,
        max_bytes: int,
    ) -> None:
        silence_s = BOUND_SUBSCRIBER_SILENCE_S if bind else None
        self._sub = open_socket(context, zmq.SUB, endpoint, bind=bind, hwm=hwm, curve=curve, silence_s=silence_s)
        try:
            self._sub.setsockopt(zmq.SUBSCRIBE, topic)
            if bind:  # a socket that connects would not be connected again after a message that is too large
                limit_frames(self._sub, max_bytes)
            self._monitor = Monitor(self._sub)
            try:
                self.endpoint: str = attach(self._sub, endpoint, bind=bind)
            except BaseException:
                self._monitor.close()
                raise
        except BaseException:
            self._sub.close()
            raise
        self._file = BoundFile(self.endpoint) if bind else None
        self._encrypted = curve is not None
        self._bound = bind
        self._numbers = count()
        self._senders: dict[int, int] = {}  # by descriptor, of a port that is bound
        self._left: set[int] = set()
        self._ended: list[object] = []
        self.sender: object = next(self._numbers)
        self.cut_off = 0

    @property
    def connections(self) -> int:
        # Within a process ZeroMQ tells of no connections.
        return 1 if self.endpoint.startswith("inproc:") else self._monitor.connections

    @property
    def reconnects(self) -> int:
        return self._monitor.reconnects

    @property
    def handshake_failures(self) -> int:
        return self._monitor.handshake_failures

    def receive(self) -> list[bytes] | None:
        try:
            if not self._bound:
                return self._sub.recv_multipart(zmq.NOBLOCK)
            frames = self._sub.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._end_connections()
            return None
        try:
            descriptor = int(frames[0].get(zmq.SRCFD))
        except zmq.ZMQError:  # a transport without descriptors
            descriptor = -1
        self.sender = self._senders.get(descriptor)
        if self.sender is None:
            self.sender = self._senders[descriptor] = next(self._numbers)
        return [frame.bytes for frame in frames]

    def _end_connections(self) -> None:
        """Note the connections that ended; until the socket was empty, their last messages waited in it."""
        if not self._left:
            return
        if self._bound:
            self._ended += [self._senders.pop(each) for each in self._left if each in self._senders]
        else:
            self._ended.append(self.sender)
            self.sender = next(self._numbers)
        self._left.clear()

    def ended(self) -> list[object]:
        ended, self._ended = self._ended, []
        return ended

    def read(self) -> tuple[int, list[str]]:
        came_back, failed = self._monitor.read()
        self._left |= self._monitor.take_gone()
        hint = ", or the peer refuses these keys" if self._encrypted else ""
        return came_back, [each.reason + (hint if each.reason == ENDED else "") for each in failed]

    def watch(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> tuple[Pump, Pump | None]:
        return Pump(loop, self._sub, callback), Pump(loop, self._monitor.pair, callback)

    def close(self) -> None:
        if self._sub.closed:
            return
        self._monitor.close()
        self._sub.close(linger=0)
        if self._file is not None:
            self._file.remove()


class OpenPort:
    """A TCP port that is bound without keys: any process may connect, and is held to limits.

    A SUB socket would collect the parts of a message without an end until memory ends, and hold ``hwm`` messages of
    each peer, however large. So the peers' bytes are read as they come (a STREAM socket) and taken apart here; what is
    not read stays in the kernel, which holds the peer back.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, topic: bytes, *, max_bytes: int) -> None:
        self.reconnects: int = 0
        self.handshake_failures: int = 0
        self.cut_off: int = 0
        self._topic = topic
        self._max_bytes = max_bytes
        self._peers: dict[bytes, SubPeer] = {}
        self._since: dict[bytes, float] = {}  # of those who have not finished the handshake
        self._messages: deque[list[bytes]] = deque()
        self._ended: list[object] = []
        self.sender: object = None
        self._held = 0
        self._lost = False
        self._came_back = 0
        self._refused: list[str] = []
        silence_s = BOUND_SUBSCRIBER_SILENCE_S
        self._stream = open_socket(
            context, zmq.STREAM, endpoint, bind=True, hwm=_CHUNKS, curve=None, silence_s=silence_s
        )
        self._stream.setsockopt(zmq.SNDHWM, 1000)  # answers, which are small
        self._by_descriptor: dict[int, bytes] = {}
        self._left: set[int] = set()
        try:
            # The empty message that ends a connection is dropped where the peer's queue is full.
            self._monitor = Monitor(self._stream)
            try:
                self.endpoint: str = attach(self._stream, endpoint, bind=True)
            except BaseException:
                self._monitor.close()
                raise
        except BaseException:
            self._stream.close()
            raise

    @property
    def connections(self) -> int:
        return sum(peer.ready for peer in self._peers.values())

    def receive(self) -> list[bytes] | None:
        if not self._messages:
            try:
                identity, chunk = self._stream.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                for descriptor in self._left:
                    self._end(self._by_descriptor.pop(descriptor, b""))
                self._left.clear()
                return None
            self.sender = identity.bytes
            self._hear(identity.bytes, chunk)
        return self._messages.popleft() if self._messages else []

    def ended(self) -> list[object]:
        ended, self._ended = self._ended, []
        return ended

    def read(self) -> tuple[int, list[str]]:
        self._read_monitor()
        came_back, self._came_back = self._came_back, 0
        refused, self._refused = self._refused, []
        self.reconnects += came_back
        return came_back, refused

    def watch(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> tuple[Pump, Pump | None]:
        return Pump(loop, self._stream, callback), Pump(loop, self._monitor.pair, callback)

    def close(self) -> None:
        self._monitor.close()
        self._stream.close(linger=0)
        self._peers.clear()

    def _hear(self, identity: bytes, chunk: zmq.Frame) -> None:
        data, peer = chunk.bytes, self._peers.get(identity)
        if not data:  # it has come, or it has gone
            if peer is None:
                self._welcome(identity, int(chunk.get(zmq.SRCFD)))
            else:
                self._end(identity)
            return
        if peer is None:  # hung up on before
            return
        was_ready, held = peer.ready, peer.held
        try:
            answer = peer.feed(data)
            self._held += peer.held - held
        except Refused as reason:
            self._held += peer.held - held
            self._refuse(identity, chunk, str(reason), was_ready)
            return
        if answer and not self._say(identity, answer):
            self._forget(identity)
            return
        if peer.ready and not was_ready:
            self._since.pop(identity, None)
            self._came_back += self._lost
            self._lost = False
        self._messages += peer.messages
        peer.messages.clear()
        while self._held > MAX_HELD_BYTES:
            most = max(self._peers, key=lambda one: self._peers[one].held)
            text = f"of too many bytes of unfinished messages it has sent {self._peers[most].held}, the most of all"
            self._refuse(most, chunk if most == identity else None, text, True)

    def _read_monitor(self) -> None:
        for _ in self._monitor.events():
            pass
        self._left |= self._monitor.take_gone()

    def _end(self, identity: bytes) -> None:
        """Note the end of a connection, whose bytes were all read."""
        if identity in self._peers:
            self._forget(identity)
            self._lost = True

    def _welcome(self, identity: bytes, descriptor: int) -> None:
        self._read_monitor()  # of the connection that had this descriptor before
        self._left.discard(descriptor)
        self._end(self._by_descriptor.get(descriptor, b""))
        self._by_descriptor[descriptor] = identity
        now = time.monotonic()
        for other in [one for one, since in self._since.items() if now - since > _HANDSHAKE_S]:
            self._forget(other)
            self._say(other, b"")
        if self._say(identity, GREETING):
            self._peers[identity] = SubPeer(self._topic, self._max_bytes)
            self._since[identity] = now

    def _refuse(self, identity: bytes, chunk: zmq.Frame | None, reason: str, was_ready: bool) -> None:
        self._forget(identity)
        self._say(identity, b"")  # hangs up
        address: object = "a peer"
        with suppress(zmq.ZMQError, KeyError):
            address = address if chunk is None else chunk.get("Peer-Address")
        if was_ready:
            self.cut_off += 1
            self._lost = True
        else:
            self.handshake_failures += 1
        self._refused.append(f"hung up on {address}: {reason}")

    def _forget(self, identity: bytes) -> None:
        peer = self._peers.pop(identity, None)
        if peer is not None:
            self._held -= peer.held
            if peer.ready:
                self._ended.append(identity)
        self._since.pop(identity, None)

    def _say(self, identity: bytes, data: bytes) -> bool:
        try:
            self._stream.send_multipart([identity, data], zmq.NOBLOCK)
        except zmq.ZMQError:  # it is gone, or reads nothing
            return False
        return True
