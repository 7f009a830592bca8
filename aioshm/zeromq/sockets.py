"""ZeroMQ contexts with their sockets, created within the limits of the process and closed with the process."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable, Sequence
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

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[Socket]"

NOBLOCK = int(zmq.NOBLOCK)  # plain ints: the operators of an enumeration are slow
MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

BURST = 64
"""Messages that are read before other callbacks of the loop run."""

CONTROL_HWM = 1000
"""Control messages that may wait for reading, or for sending, at either end of a connection."""


def new_context(what: str, *, io_threads: int = 1, sockets: int, connections: int, threads: int = 0) -> Context:
    """Make a context with running threads, after a check that the limits of this process admit its sockets, too.

    Without a descriptor or thread, libzmq aborts the process later, or retries for ever without a report.
    """
    check_threads(what, io_threads + 1 + threads)
    check_descriptors(what, SIGNAL_DESCRIPTORS * (io_threads + 2 + sockets) + io_threads + 1 + connections)
    with naming_limits(what):
        context: Context = zmq.Context(io_threads)
        try:
            context.socket(zmq.PAIR).close()  # starts the threads
        except BaseException:
            context.term()
            raise
    return context


def shared_context(what: str, *, sockets: int, connections: int) -> Context:
    """Return the one context of this process, after the same check."""
    with naming_limits(what):
        context: Context = zmq.Context.instance()
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


_shared: weakref.WeakSet[Context] = weakref.WeakSet()


def context_for(
    *endpoints: str | None, what: str, io_threads: int = 1, sockets: int, connections: int, threads: int = 0
) -> tuple[Context, bool]:
    """Return a context for these endpoints, and whether the caller owns it; inproc needs the context of the process."""
    if any(endpoint is not None and endpoint.startswith("inproc://") for endpoint in endpoints):
        return shared_context(what, sockets=sockets, connections=connections), False
    context = new_context(what, io_threads=io_threads, sockets=sockets, connections=connections, threads=threads)
    return context, True


class Sockets:
    """A ZeroMQ context and its sockets, closed together, at the latest when Python ends.

    A module-level set holds each instance: a context that the garbage collector, or the end of Python, reaches before
    its sockets waits for the sockets for ever.
    """

    def __init__(
        self, what: str = "a process with ZeroMQ sockets", count: int = 8, connections: int = 4, threads: int = 0
    ) -> None:
        self.closed: bool = False  # also in a forked child
        self.context: Context = new_context(what, sockets=count, connections=connections, threads=threads)
        self._sockets: list[Socket] = []
        self._first: list[Callable[[], None]] = []
        _open.add(self)
        detach_when_forked(self)

    def add(self, socket: Socket) -> Socket:
        """Add a socket to close with the context, and return it."""
        self._sockets = [each for each in self._sockets if not each.closed]
        self._sockets.append(socket)
        return socket

    def close_first(self, close: Callable[[], None]) -> None:
        """Call ``close`` before the sockets are closed."""
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
_inherited: list[Sockets] = []  # in a forked child: kept, since the garbage collector would warn of them


def _close_all() -> None:
    for sockets in list(_open):
        sockets.close()


assert util  # imported first, so that its finalizers run later: they remove the files of closed sockets
atexit.register(_close_all)
os.register_at_fork(after_in_child=_open.clear)  # the parent closes them


def can_share_memory() -> bool:
    """Return whether ZeroMQ can send memory without copying it.

    pyzmq starts a context and a thread for the first such message, and aborts without a descriptor or a thread.
    """
    what = "sending without a copy"
    try:
        if zmq.utils.garbage.gc.is_alive():
            return True
        check_threads(what, 3)
        check_descriptors(what, 5 * SIGNAL_DESCRIPTORS + 2)
        zmq.Frame(bytes(1), copy=False, track=True)
    except (LimitReached, RuntimeError, zmq.ZMQError) as error:
        logging.getLogger("aioshm.queue").debug("messages are copied: %s", error)
        return False
    return True


def send_message(socket: Socket, frames: Sequence[bytes | memoryview]) -> None:
    """Send all frames of a message without waiting; ``send_multipart`` takes twice as long for its flags."""
    for frame in frames[:-1]:
        socket.send(frame, MORE)
    socket.send(frames[-1], NOBLOCK)


def send_frames(socket: Socket, head: bytes, body: bytes | memoryview | None) -> None:
    """Send a message without waiting; the body's memory must not change any more."""
    if body is None:
        socket.send(head, NOBLOCK)
        return
    copy = not can_share_memory()
    socket.send(head, MORE)
    socket.send(body, NOBLOCK, copy=copy)
