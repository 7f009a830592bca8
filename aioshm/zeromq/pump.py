"""Read loops over a ZeroMQ socket: a callback whenever it may have something to read, until nothing is left.

A ZeroMQ descriptor is edge-triggered: it turns readable when the socket's state *may* have changed, and only once. So
the callback must read until there is nothing left, or come back by itself (``zmq_getsockopt(3)``, ZMQ_FD); and sending
may swallow the sign that there is something to read.
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
# As plain ints: an enumeration's operators take longer than what they are for.
_EVENTS, _POLLIN, _RCVMORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE)


def drain(socket: Socket, receive: Callable[[], T], handle: Callable[[T], object], burst: int = BURST) -> bool:
    """Read messages until nothing is left, or a burst is over; return whether there may be more.

    ``receive`` does not wait, and raises `zmq.ZMQError` where there is no message.
    """
    for count in range(burst):
        try:
            # An `Again` that is raised takes four times as long as this: mostly there is no message, or one.
            if count < 2 and not int(socket.getsockopt(_EVENTS)) & _POLLIN:
                return False
            message = receive()
        except zmq.ZMQError:
            return False
        handle(message)
    return True


def whole(socket: Socket) -> Callable[[], list[bytes]]:
    """Return what receives the messages of a socket for `drain`, all frames at once: from peers that are trusted."""
    return partial(socket.recv_multipart, zmq.NOBLOCK)


def receive_frames(socket: Socket, kept: int) -> list[zmq.Frame]:
    """Receive a message without waiting; of one with more frames than ``kept``, as strangers send, drop the others."""
    frames = [socket.recv(zmq.NOBLOCK, copy=False)]
    while socket.getsockopt(_RCVMORE):
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        if len(frames) < kept:
            frames.append(frame)
    return frames


class Pump:
    """Calls ``work`` on the loop whenever a ZeroMQ socket may have something to do, again while that returns True.

    ``descriptor`` is a duplicate of the socket's, for a socket that another part of the program watches.
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
        self._descriptor = int(socket.getsockopt(zmq.FD)) if descriptor is None else descriptor
        self._running = False
        self._is_coming_back = False
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
        """Return one that reads messages; see `drain` for ``handle`` and ``receive``."""
        return cls(loop, socket, partial(drain, socket, receive, handle), descriptor=descriptor)

    @property
    def paused(self) -> bool:
        """Whether it calls nobody at present."""
        return not self._running

    def resume(self) -> None:
        """Watch again, beginning with one call: the descriptor tells nothing about what came meanwhile."""
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
        """Call back now, unless it is paused."""
        if self._running and self.work():
            self.run_soon()

    def run_soon(self) -> None:
        """Call back on the next turn of the loop, once; never on a closed loop."""
        if not self._is_coming_back and not self._loop.is_closed():
            self._is_coming_back = True
            self._loop.call_soon(self._come_back)

    def detach_after_fork(self) -> None:
        """Leave the loop alone: it shares with the parent's what it waits by."""
        self._running = False

    def _come_back(self) -> None:
        self._is_coming_back = False
        self.run()


class Inbox:
    """Hands out messages of one or two frames as they come; made on the running loop.

    ``on_message`` gets the first frame and the second, or None; of a longer message an empty frame and None. Nobody
    else may receive from the socket, which the caller closes after the inbox.
    """

    def __init__(self, socket: Socket, on_message: Callable[[memoryview, memoryview | None], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._pump = Pump(asyncio.get_running_loop(), socket, self.look)

    def look(self) -> bool:
        """Hand out some of what has come, also where no loop runs; return whether there may be more."""
        for _ in range(BURST):
            if self._pump.paused:
                return False
            try:
                frames = receive_frames(self._socket, 3)
            except zmq.ZMQError:
                return False
            if len(frames) > 2:
                self._on_message(_NOTHING, None)
            else:
                self._on_message(frames[0].buffer, frames[1].buffer if len(frames) == 2 else None)
        self._pump.run_soon()
        return True

    def close(self) -> None:
        """Hand out nothing any more. Idempotent."""
        self._pump.pause()
