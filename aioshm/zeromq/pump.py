"""Read loops over a ZeroMQ socket: a callback whenever there may be a message, until no message is left.

A ZeroMQ descriptor is edge-triggered: it turns readable once when the socket's state *may* have changed. So the
callback must read until no message is left, or reschedule itself (``zmq_getsockopt(3)``, ZMQ_FD); and sending may
swallow the notification of a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import zmq

from aioshm.process.limits import detach_when_forked
from aioshm.zeromq.sockets import BURST, Socket

T = TypeVar("T")


_NOTHING = memoryview(b"")
# Plain ints: the operators of an enumeration are slow.
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_RCVMORE = int(zmq.RCVMORE)


def drain(socket: Socket, receive: Callable[[], T], handle: Callable[[T], object], burst: int = BURST) -> bool:
    """Read messages until none is left, or a burst is over; return whether there may be more.

    ``receive`` does not wait, and raises `zmq.ZMQError` if there is no message.
    """
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
    return partial(socket.recv_multipart, zmq.NOBLOCK)


def receive_frames(socket: Socket, kept: int) -> list[zmq.Frame]:
    """Receive a message without waiting; drop frames beyond ``kept``, which strangers may send."""
    frames = [socket.recv(zmq.NOBLOCK, copy=False)]
    while socket.getsockopt(_RCVMORE):
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        if len(frames) < kept:
            frames.append(frame)
    return frames


class Pump:
    """Calls ``work`` on the loop whenever a ZeroMQ socket may be ready, and again while ``work`` returns True.

    ``descriptor`` is a duplicate of the socket's descriptor, for a socket that another part of the program watches.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: Socket,
        work: Callable[[], bool | None],
        *,
        descriptor: int | None = None,
    ) -> None:
        self._loop = loop
        self.work = work
        if descriptor is None:
            descriptor = int(socket.getsockopt(zmq.FD))
        self._descriptor = descriptor
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
        *,
        descriptor: int | None = None,
    ) -> Pump:
        """Return a pump that reads messages; see `drain` for ``handle`` and ``receive``."""
        return cls(loop, socket, partial(drain, socket, receive, handle), descriptor=descriptor)

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

    def run(self) -> None:
        """Call ``work`` now, unless the pump is paused."""
        if self._running and self.work():
            self.run_soon()

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


class Inbox:
    """Hands out messages of one or two frames as they come; made on the running loop.

    ``on_message`` gets the first frame and the second frame, or None; for a longer message an empty frame and None. No
    other code may receive from the socket, which the caller closes after the inbox.
    """

    def __init__(self, socket: Socket, on_message: Callable[[memoryview, memoryview | None], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._pump = Pump(asyncio.get_running_loop(), socket, self.look)

    def look(self) -> bool:
        """Hand out some messages, even without a running loop; return whether there may be more."""
        for _ in range(BURST):
            if self._pump.paused:
                return False
            try:
                frames = receive_frames(self._socket, 3)
            except zmq.ZMQError:
                return False
            if len(frames) == 1:
                self._on_message(frames[0].buffer, None)
            elif len(frames) == 2:
                self._on_message(frames[0].buffer, frames[1].buffer)
            else:
                self._on_message(_NOTHING, None)
        self._pump.run_soon()
        return True

    def close(self) -> None:
        """Hand out no more messages. Idempotent."""
        self._pump.pause()
