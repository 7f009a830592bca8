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
    """Make a context whose threads run already.

    What its sockets need as well is asked for before: where libzmq lacks something later, it ends the process, or tries
    again for ever without a word.
    """
    check_threads(what, io_threads + 1 + threads)
    check_descriptors(what, SIGNAL_DESCRIPTORS * (io_threads + 2 + sockets) + io_threads + 1 + connections)
    with naming_limits(what):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads)
        _start_threads(context)
    return context


def shared_context(what: str, *, sockets: int, connections: int) -> zmq.Context[zmq.Socket[bytes]]:
    """Return the process's own context, see `new_context`, whose threads run already."""
    with naming_limits(what):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    running = context in _shared
    if not running:
        check_threads(what, 2)
    check_descriptors(what, SIGNAL_DESCRIPTORS * (2 * (not running) + sockets) + 2 * (not running) + connections)
    if not running:
        with naming_limits(what):
            context.socket(zmq.PAIR).close()
        _shared.add(context)
    return context


_shared: weakref.WeakSet[zmq.Context[zmq.Socket[bytes]]] = weakref.WeakSet()


def _start_threads(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    try:
        context.socket(zmq.PAIR).close()
    except BaseException:
        context.term()
        raise


def context_for(
    *endpoints: str | None, what: str, io_threads: int = 1, sockets: int, connections: int, threads: int = 0
) -> tuple[zmq.Context[zmq.Socket[bytes]], bool]:
    """Return a context for these endpoints, see `new_context`, and whether it is the caller's own.

    inproc endpoints meet only inside one context, so they share the process's.
    """
    if any(endpoint is not None and endpoint.startswith("inproc://") for endpoint in endpoints):
        return shared_context(what, sockets=sockets, connections=connections), False
    context = new_context(what, io_threads=io_threads, sockets=sockets, connections=connections, threads=threads)
    return context, True


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
