"""Messages that do not fit a chunk, over ZeroMQ: the second way, beside overflow segments.

The writer's XPUB is bound to a socket file, in a directory that only this user can enter; each local reader's SUB is
connected to it. A slot's marker has the number of its message's body, and is released when that has arrived. So the
ring bounds what is on its way, and no high-water mark may: what ZeroMQ drops would be lost.

The writer keeps each body until every reader has finished with its slot. Who subscribes, for the first time or after a
lost connection, is sent all that is kept. That takes a thread: a loop may be busy, and that of a writer whose calls
block runs only during its calls.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
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
from aioshm.errors import CorruptSlot, SharedMemoryError
from aioshm.lifeline.address import new_address
from aioshm.lifeline.peer import Peer
from aioshm.process.limits import Reserve, naming_limits
from aioshm.process.threads import start_thread
from aioshm.queue.local.overflow import BY_ZEROMQ, pack_marker
from aioshm.queue.remote import wire
from aioshm.queue.remote.outgoing import Outbox, Outgoing
from aioshm.ring import RingWriter
from aioshm.ring.segment import check_memory
from aioshm.zeromq.endpoint import BoundFile, attach, open_socket
from aioshm.zeromq.monitor import Monitor
from aioshm.zeromq.pump import Inbox, Pump
from aioshm.zeromq.sockets import Sockets, can_share_memory, send_frames

if TYPE_CHECKING:
    from aioshm.queue.local.readers import LocalReaders

logger: logging.Logger = logging.getLogger("aioshm.queue")

BACKLOG = 100
"""Connections that may wait to be accepted, at least: it is ZeroMQ's default."""

ZEROMQ_TICK_S = 0.002  # its timers may be early by this

_NUMBERS = BY_ZEROMQ - 1  # what of a number is in a marker


class OverflowPublisher:
    """The writer's XPUB socket, and the thread that serves those who subscribe.

    Raises:
        SharedMemoryError, EndpointError: The socket file cannot be had.
        OutOfDescriptors, OutOfThreads: This process cannot have what this needs.
    """

    def __init__(
        self,
        queue_id: bytes,
        options: Options,
        ring: RingWriter,
        secret: bytes,
        readers: LocalReaders,
    ) -> None:
        self._name = queue_id.hex()[:8]
        self._ring = ring
        self._secret = secret
        self._readers = readers
        n_reader = len(readers.ranks)
        self._patience_s = options.remote_timeout
        self._outbox = Outbox()
        self._kept: deque[tuple[int, Outgoing]] = deque()  # with the sequence numbers
        self._sent = 0
        self._subscribed: set[int] = set()
        self._awaited: set[int] = set()  # when this closes: who has yet to subscribe
        self._closing = False
        self._lock = threading.Lock()  # of the socket and of what is above
        what = "a writer that sends over ZeroMQ what does not fit a chunk"
        directory = msgspec.structs.replace(options, lifeline="directory")
        endpoint = f"ipc://{new_address(directory, queue_id, 'overflow')}"
        self._sockets = sockets = Sockets(what, count=1, connections=1 + n_reader + 2, threads=1)
        with ExitStack() as undo, naming_limits(what):
            undo.callback(sockets.close)
            self._xpub = sockets.add(open_socket(sockets.context, zmq.XPUB, endpoint, bind=True, hwm=0, curve=None))
            self._xpub.setsockopt(zmq.XPUB_MANUAL, 1)  # only who knows the secret gets anything
            self._xpub.setsockopt(zmq.MAXMSGSIZE, wire.MAX_SUBSCRIPTION_BYTES)
            self._xpub.setsockopt(zmq.BACKLOG, max(BACKLOG, n_reader))
            # Kept until each is told to connect: where libzmq has no descriptor to accept a connection to a socket file
            # with, it ends the process (ipc_listener.cpp; that of TCP leaves the peer waiting).
            self._reserve = Reserve(what, n_reader)
            undo.callback(self._reserve.close)
            self._shares_memory = can_share_memory()  # asked now, for what is in use later
            attach(self._xpub, endpoint, bind=True)
            self._file = BoundFile(endpoint)
            undo.callback(self._file.remove)
            self._woken, self._wake = os.pipe()
            undo.callback(os.close, self._woken)
            undo.callback(os.close, self._wake)
            self._thread = start_thread(self._serve, name="aioshm-overflow", what=what)
            undo.pop_all()
        sockets.close_first(self._stop)

    # Sending, in the writer's thread

    def put(
        self, header: memoryview, parts: Sequence[bytes | memoryview], buffers: Sequence[memoryview], size: int
    ) -> None:
        """Send the body of a message, as `Overflow.put`."""
        seq = self._ring.seq
        self._forget_finished()
        check_memory(size)
        number = self._sent
        try:
            message = self._outbox.pack(INLINE, 0, number, parts, buffers, size)
        except (OSError, MemoryError):
            raise SharedMemoryError(
                errno.ENOMEM,
                f"message {seq} of {size} bytes is copied to be sent over ZeroMQ, and there is no memory for that: "
                "raise the limits of this process (ulimit -v) or of its container (memory)",
            ) from None
        self._sent += 1  # the number is never another body's: a signal's handler may interrupt this
        with self._lock:
            self._kept.append((seq, message))
            self._send(wire.address(self._secret), message)
            self._take_subscriptions()  # of which sending may have swallowed the sign
        pack_marker(header, self._secret, seq, BY_ZEROMQ | number & _NUMBERS, size)

    def _forget_finished(self) -> None:
        free = []
        with self._lock:
            while self._kept and self._kept[-1][0] >= self._ring.seq:  # its slot was never published
                free.append(self._kept.pop()[1])
            while self._kept and self._ring.finished(self._kept[0][0]):
                free.append(self._kept.popleft()[1])
        self._outbox.tidy()
        self._outbox.let_go(free)

    def expect_reader(self, peer: Peer) -> None:
        """Let go of the descriptor that was kept for a reader's connection: it is about to come."""
        self._reserve.spend()
        with self._lock:
            self._subscribed.discard(peer.rank)  # that was the reader before it

    def is_gone(self, seq: int) -> bool:
        """Return whether a body is not kept any more."""
        with self._lock:
            return all(kept != seq for kept, _ in self._kept)

    # Closing

    def close(self) -> None:
        """Begin to close: what was sent is delivered first, if that takes no longer than ``options.remote_timeout``."""
        if self._closing or self._sockets.closed:
            return
        self._forget_finished()
        with self._lock:
            if self._kept:
                self._awaited = {peer.rank for peer in self._readers.peers()} - self._subscribed
            self._closing = True
        os.write(self._wake, b"x")

    def finished(self) -> bool:
        """Return whether nothing is left to be delivered."""
        return not self._closing or not self._thread.is_alive()

    def _stop(self) -> None:
        """Let the thread end before the sockets are closed, if that is not the thread's doing."""
        if threading.current_thread() is self._thread:
            return
        with self._lock:
            self._kept.clear()
            self._awaited.clear()
            self._closing = True
        os.write(self._wake, b"x")
        self._thread.join()

    # Serving

    def _serve(self) -> None:
        poll = select.poll()
        for fd in (self._woken, int(self._xpub.getsockopt(zmq.FD))):
            poll.register(fd, select.POLLIN)
        while not self._closing:
            poll.poll()
            with self._lock:
                self._take_subscriptions()
        os.read(self._woken, 1)
        deadline = monotonic() + self._patience_s
        while self._awaited and (left_s := deadline - monotonic()) > 0:
            with self._lock:  # before waiting, too: a `put` that a signal has interrupted took the sign away
                self._take_subscriptions()
            if self._awaited:
                poll.poll(left_s * 1000)
        self._file.remove()
        self._reserve.close()
        self._sockets.close(max(0, ceil((deadline - monotonic()) * 1000)) if self._kept else 0)
        if monotonic() >= deadline - ZEROMQ_TICK_S:
            logger.warning(
                "queue %s: closed though readers have not received all that was sent to them within %g s",
                self._name,
                self._patience_s,
            )
        for fd in (self._woken, self._wake):
            os.close(fd)

    def _take_subscriptions(self) -> None:
        while True:
            try:
                subscription = self._xpub.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            rank = wire.subscriber(subscription, self._secret)
            if rank is not None:
                # Both are for the connection that this message came from.
                self._xpub.setsockopt(zmq.SUBSCRIBE, wire.address(self._secret, rank))
                self._xpub.setsockopt(zmq.SUBSCRIBE, wire.address(self._secret))
                self._subscribed.add(rank)
                self._awaited.discard(rank)
                for _seq, message in self._kept:
                    self._send(wire.address(self._secret, rank), message)

    def _send(self, whom: bytes, message: Outgoing) -> None:
        tracker = send_frames(self._xpub, whom + message.head, message.body, lambda: self._shares_memory)
        if tracker is not None:
            message.trackers.append(tracker)


class OverflowSubscriber:
    """A local reader's SUB socket, and the bodies that have arrived; made on the running loop.

    Raises:
        EndpointError: The socket cannot be had.
        OutOfDescriptors, OutOfThreads: This process cannot have what it needs.
    """

    def __init__(self, endpoint: str, secret: bytes, rank: int, patience_s: float, changed: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._rank = rank
        self._patience_s = patience_s
        self._changed = changed
        self._missed = False  # whether `body` did not find one
        self._arrived: dict[int, wire.Data] = {}  # by what of its number is in a marker
        self._next = 0  # the first number that has not been finished with
        self._asked_for = -1  # the number that `body` returned last
        self._damage: wire.WireError | None = None
        self._over = False  # whether the connection has ended, or was refused
        self._at_end: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        # With a monitor, which is two more.
        self._sockets = sockets = Sockets(
            "a reader that receives over ZeroMQ what does not fit a chunk", count=3, connections=1
        )
        try:
            sub = sockets.add(open_socket(sockets.context, zmq.SUB, endpoint, bind=False, hwm=0, curve=None))
            self._monitor = Monitor(sub, also=zmq.EVENT_CONNECT_RETRIED)
            sockets.add(self._monitor.pair)
            for topic in (wire.address(secret), wire.address(secret, rank)):
                sub.setsockopt(zmq.SUBSCRIBE, topic)
            attach(sub, endpoint, bind=False)
            self._inbox = Inbox(sub, self._on_body)
        except BaseException:
            sockets.close()
            raise
        self._pump = Pump(self._loop, self._monitor.pair, self._look_at_connection)

    def body(self, number: int, size: int, seq: int) -> memoryview | None:
        """Return the body with a marker's number, as `PassedSegments.body`."""
        number &= _NUMBERS
        while number not in self._arrived and self._inbox.look():
            pass
        data = self._arrived.get(number)
        if data is None:
            damage, self._damage = self._damage, None
            if damage is not None:
                raise CorruptSlot(
                    seq, seq, f"what rank {self._rank} was sent in the place of its body {number}: {damage}"
                )
            self._missed = True
            return None
        self._asked_for = data.seq
        if len(data.body) != size:
            raise CorruptSlot(
                seq, seq, f"rank {self._rank} was sent {len(data.body)} bytes as its body {number}, instead of {size}"
            )
        return data.body.toreadonly()

    def finished(self) -> None:
        """Let go of the body that was asked for last, and of those before it, whose slots were never published."""
        self._next = max(self._next, self._asked_for + 1)
        for number in [number for number, data in self._arrived.items() if data.seq < self._next]:
            del self._arrived[number]

    def after_last(self, callback: Callable[[], None]) -> None:
        """Call back when nothing more will come: the writer is gone, but not what it sent last."""
        self._at_end = callback
        if self._timer is None:
            # A connection may outlast its writer: a process that was forked from it holds it open.
            self._timer = self._loop.call_later(self._patience_s, self._end)
        self._look_at_connection()

    def close(self) -> None:
        """Give everything back. Idempotent."""
        if self._sockets.closed:
            return
        self._at_end = None
        if self._timer is not None:
            self._timer.cancel()
        self._pump.pause()
        self._inbox.close()
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
        if self._missed:
            self._missed = False
            self._changed()

    def _look_at_connection(self) -> None:
        for event, *_ in self._monitor.events():
            self._over = event != zmq.EVENT_HANDSHAKE_SUCCEEDED
        while not self._sockets.closed and self._inbox.look():  # what came before the connection's end is there now
            pass
        if self._over:
            self._end()

    def _end(self) -> None:
        callback, self._at_end = self._at_end, None
        if callback is not None:
            if self._timer is not None:
                self._timer.cancel()
            callback()
