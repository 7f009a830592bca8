"""The ZeroMQ sockets between a writer and its remote readers; what passes over them is known elsewhere.

Data: the writer's XPUB to each reader's SUB. Control: each reader's DEALER to the writer's ROUTER. Each end has a
ZeroMQ context, and so an I/O thread, of its own. Callbacks of the loop read them, see ``pump.py``; they can be read
where no loop runs, too.

**Sockets may not wait.** TCP alone watches data connections (keepalive, ``TCP_USER_TIMEOUT``). ZeroMQ's heartbeats
watch control connections, too: the I/O threads answer them however busy the program is.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from multiprocessing import util
from typing import TypeAlias

import zmq
import zmq.utils.garbage

from aioshm.errors import LimitReached
from aioshm.process.limits import SIGNAL_DESCRIPTORS, check_descriptors, check_threads, detach_when_forked
from aioshm.zeromq.context import new_context

logger: logging.Logger = logging.getLogger("aioshm.queue")

Socket: TypeAlias = "zmq.Socket[bytes]"

BURST = 64
"""Messages that are read before the loop's other callbacks have their turn."""

CONTROL_HWM = 1000
"""Control messages that may wait to be read, or to be sent, at either end of a connection."""


class Sockets:
    """A ZeroMQ context and its sockets, which are closed together, at the latest when Python ends.

    They are held on to until then. If an end were forgotten and its context came under the garbage collector before
    its sockets, that would wait for them for ever; and so would a context that Python leaves behind when it ends.
    """

    def __init__(
        self, what: str = "a process with ZeroMQ sockets", count: int = 8, connections: int = 4, threads: int = 0
    ) -> None:
        # Whether `close` was called, or this is a forked child's copy, which nobody may touch.
        self.closed: bool = False
        self.context: zmq.Context[Socket] = new_context(what, sockets=count, connections=connections, threads=threads)
        self._sockets: list[Socket] = []
        self._first: list[Callable[[], None]] = []
        _open.add(self)
        detach_when_forked(self)

    def add(self, socket: Socket) -> Socket:
        """Close this socket, too, and return it."""
        self._sockets.append(socket)
        return socket

    def close_first(self, close: Callable[[], None]) -> None:
        """Call this before the sockets are closed: for what a thread besides looks at, such as a guard's monitor."""
        self._first.append(close)

    def close(self, linger_ms: int = 0) -> None:
        """Close everything and forget what was not sent, at once or, blocking, after a while. Idempotent."""
        if self.closed:
            return
        self.closed = True
        _open.discard(self)
        for close in self._first:
            close()
        for socket in self._sockets:
            socket.close(linger=linger_ms)
        self.context.term()

    def detach_after_fork(self) -> None:
        """Leave everything to the parent: ZeroMQ takes any call in the child for one that was interrupted, for ever."""
        self.closed = True
        _inherited.append(self)


_open: set[Sockets] = set()
_inherited: list[Sockets] = []
"""In a forked child, what must not come under the garbage collector, which would warn of it."""


def _close_all() -> None:
    for sockets in list(_open):
        sockets.close()


assert util  # imported first, so that its finalizers run later: they remove the files of sockets that are closed
atexit.register(_close_all)
os.register_at_fork(after_in_child=_open.clear)  # they are the parent's to close


def can_share_memory() -> bool:
    """Return whether ZeroMQ can be given memory to send without copying it.

    For that pyzmq has a context and a thread, which tell when the memory is not used any more. It starts them for the
    first message, after the sender has counted it, and ends the process where a descriptor or a thread is lacking.
    """
    what = "sending without a copy"
    try:
        if zmq.utils.garbage.gc.is_alive():
            return True
        check_threads(what, 3)
        check_descriptors(what, 5 * SIGNAL_DESCRIPTORS + 2)
        zmq.Frame(bytes(1), copy=False, track=True)
    except (LimitReached, RuntimeError, zmq.ZMQError) as error:
        logger.debug("messages are copied: %s", error)
        return False
    return True


def send_frames(socket: Socket, head: bytes, body: bytes | memoryview | None) -> zmq.MessageTracker | None:
    """Send a message without waiting; return what tells when the body's memory is free, None where it is already."""
    if body is None:
        socket.send(head, zmq.NOBLOCK)
        return None
    shared = can_share_memory()
    socket.send(head, zmq.NOBLOCK | zmq.SNDMORE)
    if shared:
        return socket.send(body, zmq.NOBLOCK, copy=False, track=True)
    socket.send(body, zmq.NOBLOCK)
    return None
