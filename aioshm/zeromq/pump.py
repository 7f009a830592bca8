"""Read loops over a ZeroMQ socket.

A ZeroMQ descriptor is edge-triggered (``zmq_getsockopt(3)``, ZMQ_FD): read until no message is left, or call
`Pump.run_soon`; also after sending, which may swallow the notification of a message.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import zmq

from aioshm.process.limits import detach_when_forked
from aioshm.zeromq.sockets import BURST, NOBLOCK, Socket

T = TypeVar("T")


# Plain ints: the operators of an enumeration are slow.
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)


def drain(socket: Socket, receive: Callable[[], T], handle: Callable[[T], object], burst: int = BURST) -> bool:
    """Read messages until ``receive`` raises `zmq.ZMQError`, or a burst is over; return whether there may be more."""
    for count in range(burst):
        try:
            # Raising `Again` takes four times as long as this check, and mostly there are fewer than two messages.
            if count < 2 and not int(socket.getsockopt(_EVENTS)) & _POLLIN:
                return False
            message = receive()
        except zmq.ZMQError:
            return False
        handle(message)
    return True


def whole(socket: Socket) -> Callable[[], list[bytes]]:
    """Return a ``receive`` for `drain` that returns all frames of a message; for trusted peers."""
    return partial(socket.recv_multipart, NOBLOCK)


def receive_frames(socket: Socket, kept: int = sys.maxsize) -> list[zmq.Frame]:
    """Receive a message without waiting; drop frames beyond ``kept``, which strangers may send."""
    frame = socket.recv(NOBLOCK, copy=False)
    frames = [frame]
    while frame.more:  # ``recv_multipart`` asks the socket after each frame, which takes twice as long
        frame = socket.recv(NOBLOCK, copy=False)
        if len(frames) < kept:
            frames.append(frame)
    return frames


class Pump:
    """Calls ``work`` on the loop whenever a ZeroMQ socket may be ready, and again while ``work`` returns True."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: Socket, work: Callable[[], bool | None]) -> None:
        self._loop = loop
        self.work = work
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._running = False
        self._scheduled = False
        detach_when_forked(self)
        self.resume()

    @classmethod
    def of_messages(
        cls,
        loop: asyncio.AbstractEventLoop,
        socket: Socket,
        handle: Callable[[T], object],
        receive: Callable[[], T],
    ) -> Pump:
        """Return a pump that reads messages; see `drain` for ``handle`` and ``receive``."""
        return cls(loop, socket, partial(drain, socket, receive, handle))

    @property
    def paused(self) -> bool:
        """Whether the pump is paused."""
        return not self._running

    def resume(self) -> None:
        """Watch again, beginning with one call: the descriptor does not report messages that came meanwhile."""
        if not self._running:
            self._running = True
            self._loop.add_reader(self._descriptor, self.run)
            self.run_soon()

    def pause(self) -> None:
        """Stop calling; safe on a closed loop."""
        if self._running:
            self._running = False
            if not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)

    def run(self) -> bool:
        """Call ``work`` now, unless the pump is paused; return whether there may be more to do."""
        more = self._running
        try:
            more = more and bool(self.work())
        finally:
            if more:  # also after an error, which must leave no later message unread
                self.run_soon()
        return more

    def run_soon(self) -> None:
        """Call ``work`` once in the next iteration of the loop; never on a closed loop."""
        if not self._scheduled and not self._loop.is_closed():
            self._scheduled = True
            self._loop.call_soon(self._run_scheduled)

    def detach_after_fork(self) -> None:
        """Stop without unwatching: the parent's loop shares the epoll instance."""
        self._running = False

    def _run_scheduled(self) -> None:
        self._scheduled = False
        self.run()
