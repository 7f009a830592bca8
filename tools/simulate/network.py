"""Connections between a writer and its remote readers, as ZeroMQ has them: in order while they last, then lost.

A connection that breaks loses what is on its way. Each end notices that after a time of its own, and until then sends
into the void. Who has connected connects again; what a DEALER sends meanwhile waits, what an XPUB sends is gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from aioshm.queue.remote import wire
from tools.simulate.world import Process, World

_numbers = itertools.count()


class Network:
    """What connects the processes of one world."""

    current: Network

    def __init__(self, world: World) -> None:
        self.world = world
        self.writers: dict[str, WriterSockets] = {}
        self.readers: list[ReaderSockets] = []
        self.process: Process
        self.quick_s = world.between(0.0005, 0.02) if world.likely(0.9) else world.between(0.02, 0.1)
        self.notice_s = 0.3
        Network.current = self

    def latency(self) -> float:
        """Return how long a message takes; now and then far longer."""
        usual = self.world.between(0.0001, self.quick_s)
        return usual * 10 if self.world.likely(0.03) else usual


class Link:
    """One connection."""

    def __init__(self, network: Network, reader: ReaderSockets, writer: WriterSockets, kind: str) -> None:
        self.network, self.reader, self.writer, self.kind = network, reader, writer, kind
        self.broken = False
        self.topics: set[bytes] = set()
        self._last = {True: 0.0, False: 0.0}

    def send(self, to_writer: bool, deliver: Callable[[], object]) -> None:
        """Deliver something at the other end, after what was sent before."""
        if self.broken:
            return
        world = self.network.world
        at = self._last[to_writer] = max(self._last[to_writer] + 1e-6, world.now + self.network.latency())
        process = self.writer.process if to_writer else self.reader.process
        world.loop.call_at(at, lambda: None if self.broken else process.does(deliver))

    def cut(self) -> None:
        """Break it."""
        if self.broken:
            return
        self.broken = True
        world = self.network.world
        for noticed, process in (
            (self._writer_notices, self.writer.process),
            (self._reader_notices, self.reader.process),
        ):
            world.loop.call_later(world.between(0, self.network.notice_s), process.does, noticed)

    def _writer_notices(self) -> None:
        if self in self.writer.links:
            self.writer.links.remove(self)

    def _reader_notices(self) -> None:
        self.reader.lost(self)


class WriterSockets:
    """Stands for `aioshm.queue.remote.sockets.WriterSockets`."""

    def __init__(self, ip: Any, secret: bytes, options: Any, readers: int = 1, identity: Any = None) -> None:
        self.network = Network.current
        self.process = self.network.process
        self._secret = secret
        self.keys = None
        self.links: list[Link] = []
        self.closed = False
        number = next(_numbers)
        self.data: str
        self.control: str
        self.data, self.control = identity.addresses if identity else (f"tcp://d:{number}", f"tcp://c:{number}")
        self.network.writers[self.data] = self.network.writers[self.control] = self

    def start(self, _loop: Any, readers: Any) -> None:
        self._readers = readers
        self.listening = True

    listening = False

    def publish(self, head: bytes, body: Any = None) -> None:
        whole = bytes(head)
        body = None if body is None else bytes(body)
        for link in self.links:
            if link.kind == "data" and any(whole.startswith(topic) for topic in link.topics):
                self._publish_over(link, whole, body)

    def _publish_over(self, link: Link, head: bytes, body: bytes | None) -> None:
        link.send(False, lambda: link.reader.receive(link, head, body))

    def cut_off(self, rank: int) -> None:
        for link in list(self.links):
            if wire.address(self._secret, rank) in link.topics:
                link.cut()

    def send(self, identity: bytes, message: wire.Control) -> bool:
        if self.closed:
            return False
        for link in reversed(self.links):
            if link.kind == "control" and link.reader.identity == identity:
                self._send_over(link, message.pack())
                return True
        return False

    def _send_over(self, link: Link, packed: bytes) -> None:
        link.send(False, lambda: link.reader.hear(link, packed))

    def reaches(self, identity: bytes) -> bool:
        return self.send(identity, wire.Tick())

    def look(self) -> None:
        """Do nothing: what comes is delivered at once."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.listening = False
            for link in list(self.links):
                # What was sent before is still delivered (ZMQ_LINGER is for what was handed to the kernel).
                link.send(False, link.cut)

    # What comes

    def subscribe(self, link: Link, subscription: bytes) -> None:
        rank = wire.subscriber(subscription, self._secret)
        if rank is not None and not self.closed:
            link.topics |= {wire.address(self._secret, rank), wire.address(self._secret)}
            self._readers.subscribed(rank)

    def hear(self, identity: bytes, packed: bytes) -> None:
        if not self.closed:
            self._readers.receive(identity, packed)


class Connection:
    """Stands for `aioshm.zeromq.monitor.Monitor`."""

    def __init__(self, now: float) -> None:
        self.up, self.refused, self.handshakes = False, False, 0
        self.down_since: float | None = now
        self.link: Link | None = None


class ReaderSockets:
    """Stands for `aioshm.queue.remote.sockets.ReaderSockets`."""

    def __init__(self, source: Any, remote: Any, _options: Any) -> None:
        self.network = Network.current
        self.process: Process = source._state.loop.process
        self.identity = b"\x01%015d" % next(_numbers)
        self.closed = False
        self.apart: set[str] = set()  # connections that cannot be made for now
        self._reader = source
        self._addresses = {"data": remote.data, "control": remote.control}
        now = self.network.world.now
        self.data_connection, self.control_connection = Connection(now), Connection(now)
        self._topics: list[bytes] = []
        self._waiting: list[bytes] = []
        self.network.readers.append(self)
        for kind in self._addresses:
            self._connect_later(kind)

    def connection(self, kind: str) -> Connection:
        return self.data_connection if kind == "data" else self.control_connection

    def _connect_later(self, kind: str) -> None:
        delay = self.network.world.between(0.01, 0.15)
        self.network.world.loop.call_later(delay, self.process.does, lambda: self._connect(kind))

    def _connect(self, kind: str) -> None:
        if self.closed or self.connection(kind).up:
            return
        writer = self.network.writers.get(self._addresses[kind])
        able = writer is not None and writer.listening and writer.process.alive and not writer.process.stopped
        if writer is None or not able or kind in self.apart:
            self._connect_later(kind)
            return
        connection = self.connection(kind)
        link = connection.link = Link(self.network, self, writer, kind)
        writer.links.append(link)
        connection.up, connection.down_since = True, None
        connection.handshakes += 1
        if kind == "data":
            for topic in self._topics:
                self._send_subscription(link, topic)
        else:
            waiting, self._waiting = self._waiting, []
            for packed in waiting:
                self._send_over(link, packed)
        self._reader.check_connections()

    def lost(self, link: Link) -> None:
        """Notice that a connection has ended."""
        connection = self.connection(link.kind)
        if self.closed or connection.link is not link:
            return
        connection.up, connection.down_since, connection.link = False, self.network.world.now, None
        self._connect_later(link.kind)
        self._reader.check_connections()

    def subscribe(self, topics: Sequence[bytes]) -> None:
        self._topics += topics
        if self.data_connection.link is not None:
            for topic in topics:
                self._send_subscription(self.data_connection.link, topic)

    def _send_subscription(self, link: Link, topic: bytes) -> None:
        link.send(True, lambda: link.writer.subscribe(link, b"\x01" + topic))

    def send(self, message: wire.Control) -> bool:
        if self.closed:
            return False
        link = self.control_connection.link
        if link is None:
            self._waiting.append(message.pack())
        else:
            self._send_over(link, message.pack())
        return True

    def _send_over(self, link: Link, packed: bytes) -> None:
        link.send(True, lambda: link.writer.hear(self.identity, packed))

    def receive(self, link: Link, head: bytes, body: bytes | None) -> None:
        if not self.closed and self.data_connection.link is link:
            self._reader.receive_data(memoryview(head), None if body is None else memoryview(body))

    def hear(self, link: Link, packed: bytes) -> None:
        if not self.closed and self.control_connection.link is link:
            self._reader.receive_control(packed)

    def look(self) -> None:
        """Do nothing: what comes is delivered at once."""

    look_at_all = look

    def end_data(self) -> None:
        """Receive no more data."""
        self.apart.add("data")
        self.cut(["data"])

    def cut(self, kinds: Sequence[str] = ("data", "control")) -> None:
        """Break connections."""
        for kind in kinds:
            link = self.connection(kind).link
            if link is not None:
                link.cut()

    def close(self) -> None:
        if not self.closed:
            self.cut()
            self.closed = True
