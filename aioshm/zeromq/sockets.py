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
import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import TypeAlias

import zmq
import zmq.utils.garbage

from aioshm.errors import LimitReached
from aioshm.process.limits import (
    SIGNAL_DESCRIPTORS,
    check_descriptors,
    check_threads,
    detach_when_forked,
    naming_limits,
)


def new_context(
    what: str, *, io_threads: int = 1, sockets: int, connections: int, threads: int = 0
) -> zmq.Context[zmq.Socket[bytes]]:
    """Make a context with running threads.

    The check covers its sockets, too: without a descriptor or thread, libzmq aborts the process later, or retries for
    ever without a report.
    """
    check_threads(what, io_threads + 1 + threads)
    check_descriptors(what, SIGNAL_DESCRIPTORS * (io_threads + 2 + sockets) + io_threads + 1 + connections)
    with naming_limits(what):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads)
        try:
            context.socket(zmq.PAIR).close()  # starts the threads
        except BaseException:
            context.term()
            raise
    return context


def shared_context(what: str, *, sockets: int, connections: int) -> zmq.Context[zmq.Socket[bytes]]:
    """Return the one context of this process, after a check that its limits admit the new sockets.

    Args:
        what: Needs the sockets; for the error.
        sockets: How many sockets will be opened.
        connections: How many connections they will have.
    """
    with naming_limits(what):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    needed = SIGNAL_DESCRIPTORS * sockets + connections
    if context in _shared:
        check_descriptors(what, needed)
        return context
    check_threads(what, 2)
    check_descriptors(what, needed + 2 * SIGNAL_DESCRIPTORS + 2)
    with naming_limits(what):
        context.socket(zmq.PAIR).close()
    _shared.add(context)
    return context


_shared: weakref.WeakSet[zmq.Context[zmq.Socket[bytes]]] = weakref.WeakSet()


def context_for(
    *endpoints: str | None, what: str, io_threads: int = 1, sockets: int, connections: int, threads: int = 0
) -> tuple[zmq.Context[zmq.Socket[bytes]], bool]:
    """Return a context for these endpoints, see `new_context`, and whether the caller owns it.

    inproc endpoints meet only inside one context, so they share the context of the process.
    """
    if any(endpoint is not None and endpoint.startswith("inproc://") for endpoint in endpoints):
        return shared_context(what, sockets=sockets, connections=connections), False
    context = new_context(what, io_threads=io_threads, sockets=sockets, connections=connections, threads=threads)
    return context, True


logger: logging.Logger = logging.getLogger("aioshm.queue")

Socket: TypeAlias = "zmq.Socket[bytes]"

BURST = 64
"""Messages that are read before other callbacks of the loop run."""

CONTROL_HWM = 1000
"""Control messages that may wait for reading, or for sending, at either end of a connection."""


class Sockets:
    """A ZeroMQ context and its sockets, which are closed together, at the latest when Python ends.

    A module-level set holds each instance until then. If the garbage collector came to a context before its sockets,
    the context would wait for the sockets for ever; and so would a context that Python leaves behind at its end.
    """

    def __init__(
        self, what: str = "a process with ZeroMQ sockets", count: int = 8, connections: int = 4, threads: int = 0
    ) -> None:
        # Whether `close` was called, or this is a forked child's copy, which must not be used.
        self.closed: bool = False
        self.context: zmq.Context[Socket] = new_context(what, sockets=count, connections=connections, threads=threads)
        self._sockets: list[Socket] = []
        self._first: list[Callable[[], None]] = []
        _open.add(self)
        detach_when_forked(self)

    def add(self, socket: Socket) -> Socket:
        """Add a socket to close with the context, and return it."""
        self._sockets.append(socket)
        return socket

    def close_first(self, close: Callable[[], None]) -> None:
        """Call ``close`` before the sockets are closed, for example to end a thread that uses them."""
        self._first.append(close)

    def close(self, linger_ms: int = 0) -> None:
        """Close everything, and drop unsent messages, immediately or, blocking, after ``linger_ms``. Idempotent."""
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
        """Leave everything to the parent: any call of ZeroMQ in the child retries for ever."""
        self.closed = True
        _inherited.append(self)


_open: set[Sockets] = set()
_inherited: list[Sockets] = []
"""In a forked child, the sockets of the parent: kept, since the garbage collector would warn of them."""


def _close_all() -> None:
    for sockets in list(_open):
        sockets.close()


assert util  # imported first, so that its finalizers run later: they remove the files of closed sockets
atexit.register(_close_all)
os.register_at_fork(after_in_child=_open.clear)  # the parent closes them


def can_share_memory() -> bool:
    """Return whether ZeroMQ can send memory without copying it.

    pyzmq has a context and a thread that report when the memory is free again. It starts both for the first message,
    after the sender has counted the message, and aborts the process without a descriptor or a thread.
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
    """Send a message without waiting; return a tracker of the body's memory, or None if the memory is free already."""
    if body is None:
        socket.send(head, zmq.NOBLOCK)
        return None
    shared = can_share_memory()
    socket.send(head, zmq.NOBLOCK | zmq.SNDMORE)
    if shared:
        return socket.send(body, zmq.NOBLOCK, copy=False, track=True)
    socket.send(body, zmq.NOBLOCK)
    return None
