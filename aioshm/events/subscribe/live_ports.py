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
from aioshm.events.subscribe.backlog import CAME_BACK, Backlog
from aioshm.zeromq.curve import CurveKeys, limit_frames
from aioshm.zeromq.endpoint import BOUND_SUBSCRIBER_SILENCE_S, BoundFile, attach, open_socket
from aioshm.zeromq.monitor import ENDED, Monitor
from aioshm.zeromq.pump import Pump

# Of all messages that are not whole yet, at an open port; the peer that has sent most of that is hung up on.
MAX_HELD_BYTES = 1 << 24
# Pieces of 8 KiB that ZeroMQ reads ahead from one peer.
_CHUNKS = 16
_HANDSHAKE_S = 30.0
# How long one turn of the loop receives messages into the backlog, and how long while that is more than half full:
# decoding then needs the time more than messages that may be dropped.
_READ_AHEAD_S, _READ_AHEAD_BUSY_S = 0.002, 0.0005
_NOBLOCK, _RCVMORE = int(zmq.NOBLOCK), int(zmq.RCVMORE)


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

    def read_ahead(self) -> bool:
        """Receive messages into the backlog, where the port has one; True if there may be more."""

    def watch(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], bool]) -> None:
        """Call ``callback`` when there may be a message or news of connections, again if it returns True."""

    def pause(self) -> None:
        """Leave messages in the kernel until `resume`; a port with a backlog continues to read ahead."""

    def resume(self) -> None:
        """Call the callback again, beginning now. Idempotent, as is `pause`."""

    def close(self) -> None:
        """Close the port. Idempotent."""


class SubPort:
    """A SUB socket with its monitor: for one who connects, or who knows its peers by their keys.

    ZeroMQ bounds the queue of a socket by messages, not by bytes. So the socket is read whenever the loop runs, into
    the backlog, which is bounded by bytes.
    """

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
        backlog: Backlog,
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
        # What pyzmq's own subclass adds to them is for other kinds of sockets, and takes longer than they do.
        self._receive_frame = super(zmq.Socket, self._sub).recv
        self._option = super(zmq.Socket, self._sub).get
        self._backlog = backlog
        self._numbers = count()
        self._connection = next(self._numbers)  # of a port that connects
        self._senders: dict[int, int] = {}  # by descriptor, of a port that is bound
        self._gone: set[int] = set()  # descriptors of connections whose last messages may wait in the socket
        self._ended: list[object] = []
        self._came_back = 0
        self._refused: list[str] = []
        self._pumps: list[Pump] = []
        self.sender: object = None
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
        entry = self._backlog.take()
        if entry is None:
            return None
        connection, frames, _ = entry
        if frames is not None:
            self.sender = connection
            return frames
        if connection is CAME_BACK:
            self._came_back += 1
        else:
            self._ended.append(connection)
        return []

    def read_ahead(self) -> bool:
        self._backlog.shrink()
        if self._backlog.is_shrinking:
            return True
        gone = self._gone | self._read_monitor()
        burst, is_empty = self._receive_burst()
        # A connection that came back did so before its first message was received: its marker goes before the burst.
        self._gone = self._read_monitor() if burst else set()
        for connection, frames in burst:
            self._backlog.put(connection, frames)
        if is_empty:
            self._end_connections(gone)
        else:
            self._gone |= gone
        self._backlog.shrink()
        return not is_empty or bool(self._gone) or self._backlog.is_shrinking

    def _receive_burst(self) -> tuple[list[tuple[int, list[bytes]]], bool]:
        """Receive for one slice of time; return messages with their connections, and whether none is left."""
        burst: list[tuple[int, list[bytes]]] = []
        clock = time.perf_counter
        deadline = clock() + (_READ_AHEAD_BUSY_S if self._backlog.is_half_full else _READ_AHEAD_S)
        try:
            while True:
                burst.append(self._receive_from_any() if self._bound else (self._connection, self._receive_whole()))
                if clock() > deadline:
                    return burst, False
        except zmq.Again:
            return burst, True

    def _receive_whole(self) -> list[bytes]:
        receive, option = self._receive_frame, self._option
        frames = [receive(_NOBLOCK)]
        while option(_RCVMORE):
            frames.append(receive(_NOBLOCK))
        return frames

    def _receive_from_any(self) -> tuple[int, list[bytes]]:
        """Receive a message of a port that is bound; return its connection, too."""
        frames = self._sub.recv_multipart(zmq.NOBLOCK, copy=False)
        try:
            descriptor = int(frames[0].get(zmq.SRCFD))
        except zmq.ZMQError:  # a transport without descriptors
            descriptor = -1
        sender = self._senders.get(descriptor)
        if sender is None:
            sender = self._senders[descriptor] = next(self._numbers)
        return sender, [frame.bytes for frame in frames]

    def _end_connections(self, gone: set[int]) -> None:
        """Note the connections that ended; until the socket was empty, their last messages waited in it."""
        if not gone:
            return
        if self._bound:
            for descriptor in gone & self._senders.keys():
                self._backlog.note(self._senders.pop(descriptor))
        else:
            self._backlog.note(self._connection)
            self._connection = next(self._numbers)

    def _read_monitor(self) -> set[int]:
        """Note connections that came back and peers that were refused; return the descriptors of those that ended."""
        came_back, failed = self._monitor.read()
        if came_back:
            self._backlog.note(CAME_BACK)
        hint = ", or the peer refuses these keys" if self._encrypted else ""
        self._refused += [each.reason + (hint if each.reason == ENDED else "") for each in failed]
        return self._monitor.take_gone()

    def ended(self) -> list[object]:
        ended, self._ended = self._ended, []
        return ended

    def read(self) -> tuple[int, list[str]]:
        came_back, self._came_back = self._came_back, 0
        refused, self._refused = self._refused, []
        return came_back, refused

    def watch(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], bool]) -> None:
        self._pumps = [Pump(loop, self._sub, callback), Pump(loop, self._monitor.pair, callback)]

    def pause(self) -> None:
        pass  # what is not received waits in ZeroMQ's queue, which no number of bytes bounds

    def resume(self) -> None:
        pass

    def close(self) -> None:
        if self._sub.closed:
            return
        for pump in self._pumps:
            pump.pause()
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
        self._stream_pump: Pump | None = None
        self._monitor_pump: Pump | None = None
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

    def read_ahead(self) -> bool:
        # ZeroMQ's I/O thread blocks, and with it all sockets of the context, where 2000 events of a monitor are unread.
        self._read_monitor()
        return False

    def watch(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], bool]) -> None:
        self._stream_pump = Pump(loop, self._stream, callback)
        self._monitor_pump = Pump(loop, self._monitor.pair, callback)

    def pause(self) -> None:
        if self._stream_pump is not None:
            self._stream_pump.pause()

    def resume(self) -> None:
        if self._stream_pump is not None:
            self._stream_pump.resume()

    def close(self) -> None:
        self.pause()
        if self._monitor_pump is not None:
            self._monitor_pump.pause()
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
