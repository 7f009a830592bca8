"""Messages that do not fit a chunk, over ZeroMQ: as to remote readers, on a socket file.

The writer keeps each body until every reader has finished with its slot, and sends kept bodies to a
reader that subscribes. The ring bounds the bodies in flight; a high-water mark would lose bodies.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import ceil
from time import monotonic
from typing import TYPE_CHECKING

import msgspec
import zmq

from aioshm.codec.frames import INLINE
from aioshm.config import Options
from aioshm.errors import CorruptSlot, OutOfThreads, SharedMemoryError
from aioshm.lifeline.listener import Peer
from aioshm.lifeline.sockets import new_address
from aioshm.process.limits import Reserve, naming_limits, start_thread
from aioshm.queue.local.overflow import OverflowReader, pack_marker
from aioshm.queue.remote import wire
from aioshm.queue.remote.messages import pack
from aioshm.queue.remote.sockets import DataPublisher, DataSubscriber
from aioshm.queue.remote.window import Outgoing
from aioshm.ring.segment import check_memory
from aioshm.zeromq.endpoint import BoundFile, attach
from aioshm.zeromq.pump import Pump
from aioshm.zeromq.sockets import Sockets

if TYPE_CHECKING:
    from aioshm.queue.local.readers import LocalReaders

logger: logging.Logger = logging.getLogger("aioshm.queue")

BACKLOG = 100
"""Connections that may wait to be accepted, at least: ZeroMQ's default."""

ZEROMQ_TICK_S = 0.002  # timers of ZeroMQ may be early by this
DELIVERY_POLL_MS = 50

_NUMBERS = (1 << 32) - 1  # a marker has these bits of a body's number


class OverflowPublisher:
    """The writer's side: the bodies that some reader may still need."""

    def __init__(self, readers: LocalReaders, options: Options) -> None:
        self._readers = readers
        self._ring = readers.ring
        self._secret = readers.secret
        self._patience_s = options.remote_timeout
        self._kept: deque[tuple[int, Outgoing]] = deque()  # with their sequence numbers
        self._sent = 0
        self._subscribed: set[int] = set()
        self._awaited: set[int] = set()  # ranks that have yet to subscribe before the sockets close
        self._pump: Pump | None = None
        self._delivering: threading.Thread | None = None
        user = "a writer that sends messages that do not fit a chunk over ZeroMQ"
        n_reader = len(readers.ranks)
        directory = msgspec.structs.replace(options, lifeline="directory")
        endpoint = f"ipc://{new_address(directory, readers.queue_id, 'overflow')}"
        sockets = Sockets(user, count=1, connections=1 + n_reader + 2)
        self._sockets = sockets
        with ExitStack() as undo, naming_limits(user):
            undo.callback(sockets.close)
            self._publisher = DataPublisher(sockets, endpoint, readers.secret, hwm=0)
            self._publisher.socket.setsockopt(zmq.BACKLOG, max(BACKLOG, n_reader))
            # One descriptor for each reader's connection: without a descriptor to accept a connection to a socket file,
            # libzmq ends the process (ipc_listener.cpp; over TCP, the peer waits).
            self._reserve = Reserve(user, n_reader)
            undo.callback(self._reserve.close)
            attach(self._publisher.socket, endpoint, bind=True)
            self._file = BoundFile(endpoint)
            undo.pop_all()
        sockets.close_first(self._stop)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to serve subscribers, on the loop."""
        if not self._sockets.closed and self._delivering is None:
            self._pump = Pump(loop, self._publisher.socket, self.look)

    def look(self) -> bool:
        """Send kept bodies to readers that have subscribed; return whether there may be more."""
        return self._publisher.look(self._on_subscribed)

    def _on_subscribed(self, rank: int) -> None:
        self._subscribed.add(rank)
        self._awaited.discard(rank)
        for _seq, message in self._kept:
            self._send(wire.address(self._secret, rank), message)

    def _send(self, whom: bytes, message: Outgoing) -> None:
        self._publisher.send(whom + message.head, message.body)

    def put(
        self, header: memoryview, parts: Sequence[bytes | memoryview], buffers: Sequence[memoryview], size: int
    ) -> None:
        """Send the body of the claimed slot's message, and mark the slot."""
        seq = self._ring.seq
        self._forget_finished()
        check_memory(size)
        number = self._sent
        try:
            message = pack(INLINE, 0, number, parts, buffers, size)
        except (OSError, MemoryError):
            raise SharedMemoryError(
                errno.ENOMEM,
                f"message {seq} of {size} bytes is copied to be sent over ZeroMQ, and there is no memory for that: "
                "raise the limits of this process (ulimit -v) or of its container (memory)",
            ) from None
        self._sent += 1  # no other body gets this number, even if a codec's error or a signal handler ends this call
        self._kept.append((seq, message))
        self._send(wire.address(self._secret), message)
        self.look()  # sending may have consumed the notification of a subscription
        pack_marker(header, self._secret, seq, number & _NUMBERS, size)

    def _forget_finished(self) -> None:
        while self._kept and self._kept[-1][0] >= self._ring.seq:  # its slot was never published
            self._kept.pop()
        while self._kept and self._ring.finished(self._kept[0][0]):
            self._kept.popleft()

    def expect_reader(self, peer: Peer) -> None:
        """Release the descriptor that was reserved for a reader's connection, which is about to come."""
        self._reserve.spend()
        self._subscribed.discard(peer.rank)  # the rank's previous reader

    def is_gone(self, seq: int) -> bool:
        """Return whether a body was discarded."""
        return all(kept != seq for kept, _ in self._kept)

    # Closing

    def close(self) -> None:
        """Begin to close: sent bodies are delivered first, if that takes no longer than ``options.remote_timeout``."""
        if self._delivering is not None or self._sockets.closed:
            return
        if self._pump is not None:
            self._pump.pause()
        self._forget_finished()
        if not self._kept:
            self._release(0)
            return
        self._awaited = {peer.rank for peer in self._readers.peers()} - self._subscribed
        try:
            self._delivering = start_thread(
                self._deliver, name="aioshm-overflow", what="delivering messages that were sent"
            )
        except OutOfThreads:
            self._deliver()

    def finished(self) -> bool:
        """Return whether nothing is left to be delivered."""
        return self._delivering is None or not self._delivering.is_alive()

    def _deliver(self) -> None:
        """Wait until all readers have subscribed and ZeroMQ has delivered all bodies; close the socket."""
        deadline = monotonic() + self._patience_s
        self.look()
        while self._awaited and monotonic() < deadline:
            self._publisher.socket.poll(DELIVERY_POLL_MS)
            self.look()
        self._release(max(0, ceil((deadline - monotonic()) * 1000)))
        if monotonic() >= deadline - ZEROMQ_TICK_S:
            logger.warning(
                "queue %s: closed although readers have not received every message within %g s",
                self._readers.registry.name,
                self._patience_s,
            )

    def _release(self, linger_ms: int) -> None:
        self._file.remove()
        self._reserve.close()
        self._sockets.close(linger_ms)

    def _stop(self) -> None:
        """End the delivery before Python ends."""
        if self._delivering is not None and threading.current_thread() is not self._delivering:
            self._awaited.clear()
            self._delivering.join()


class OverflowSubscriber(OverflowReader):
    """A local reader's side: the bodies that have arrived; made on the running loop."""

    def __init__(self, endpoint: str, secret: bytes, rank: int, patience_s: float, changed: Callable[[], None]) -> None:
        super().__init__(secret)
        self._loop = asyncio.get_running_loop()
        self._rank = rank
        self._patience_s = patience_s
        self._changed = changed
        self._arrived: dict[int, wire.Data] = {}  # by the number in a marker
        self._next = 0  # the first unfinished number
        self._asked_for = -1  # the number that `body` returned last
        self._damage: wire.WireError | None = None
        self._at_end: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Three: the SUB socket, and the pair of its monitor.
        sockets = Sockets("a reader that receives messages that do not fit a chunk over ZeroMQ", count=3, connections=1)
        self._sockets = sockets
        try:
            self._subscriber = DataSubscriber(sockets, endpoint, self._on_body)
        except BaseException:
            sockets.close()
            raise
        self._subscriber.subscribe([wire.address(secret), wire.address(secret, rank)])
        self._pump = Pump(self._loop, self._subscriber.connection.pair, self._look_at_connection)

    def body(self, header: memoryview, seq: int) -> memoryview | None:
        number, size = self.marker(header, seq)
        while number not in self._arrived and self._subscriber.pump.work():
            pass
        data = self._arrived.get(number)
        if data is None:
            damage = self._damage
            self._damage = None
            if damage is not None:
                raise CorruptSlot(seq, seq, f"rank {self._rank} was sent a damaged body {number}: {damage}")
            return None
        self._asked_for = data.seq
        if len(data.body) != size:
            raise CorruptSlot(
                seq, seq, f"rank {self._rank} was sent {len(data.body)} bytes as its body {number}, instead of {size}"
            )
        return data.body.toreadonly()

    def arrived(self, fd: int | None) -> None:
        if fd is not None:
            os.close(fd)

    def finished(self) -> None:
        """Discard the latest body, and earlier ones, whose slots were never published."""
        self._next = max(self._next, self._asked_for + 1)
        for number in [number for number, data in self._arrived.items() if data.seq < self._next]:
            del self._arrived[number]

    def after_last(self, callback: Callable[[], None]) -> None:
        """Call back once the writer is gone, and every body that it had sent has arrived."""
        self._at_end = callback
        if self._timer is None:
            # A connection may outlast its writer: a process that was forked from it holds it open.
            self._timer = self._loop.call_later(self._patience_s, self._end)
        self._look_at_connection()

    def close(self) -> None:
        """Release all resources. Idempotent."""
        if self._sockets.closed:
            return
        self._at_end = None
        if self._timer is not None:
            self._timer.cancel()
        self._pump.pause()
        self._subscriber.pump.pause()
        self._sockets.close()
        self._arrived.clear()

    def _on_body(self, head: memoryview, body: memoryview | None) -> None:
        try:
            data = wire.parse_data(head, body)
        except wire.WireError as error:
            self._damage = error
        else:
            if data.seq >= self._next:
                self._arrived.setdefault(data.seq & _NUMBERS, data)
        self._changed()

    def _look_at_connection(self) -> None:
        connection = self._subscriber.connection
        connection.changed()
        # Messages from before the connection's end are there now.
        while not self._sockets.closed and self._subscriber.pump.work():
            pass
        if connection.failed:
            self._end()

    def _end(self) -> None:
        callback = self._at_end
        self._at_end = None
        if callback is not None:
            if self._timer is not None:
                self._timer.cancel()
            callback()
