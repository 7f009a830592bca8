"""Payloads from a `zmq.asyncio` socket: one future for each wake-up, and none for what else has come by then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
import zmq.asyncio

from aioshm.process.limits import abandon_when_forked
from aioshm.zeromq.sockets import BURST, Socket

_NOTHING = memoryview(b"")


class Inbox:
    """Hands out messages of one or two frames as they come; made on the running loop.

    The next message is received by `zmq.asyncio`; those that lie behind it when it has come, or when `look` is called,
    are received without waiting: a future costs more than a message.

    Args:
        socket: The socket, which nobody else may receive from, and which the caller closes after the inbox.
        on_message: Gets the first frame and the second, or None; of a longer message an empty frame and None.
    """

    def __init__(self, socket: Socket, on_message: Callable[[memoryview, memoryview | None], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._on_message = on_message
        self._closed = False
        self._looking = False  # whether `look` is going to be called by the loop
        self._awaited = _Awaited.from_socket(socket)
        self._awaited._Future = self._new_arrival  # type: ignore[assignment]
        self._loop.call_soon(self._await_next)
        abandon_when_forked(self)

    def look(self) -> bool:
        """Hand out some of what has come, also where no loop runs; return whether there may be more."""
        receive, on_message = self._socket.recv, self._on_message
        for _ in range(BURST):
            if self._closed:
                return False
            try:
                head = receive(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                return False
            if not head.more:
                on_message(head.buffer, None)
                continue
            body = receive(zmq.NOBLOCK, copy=False)
            if not body.more:
                on_message(head.buffer, body.buffer)
                continue
            while self._socket.getsockopt(zmq.RCVMORE):
                receive(zmq.NOBLOCK, copy=False)
            on_message(_NOTHING, None)
        # The socket's descriptor is edge-triggered: of these it has told already.
        if not self._looking and not self._loop.is_closed():
            self._looking = True
            self._loop.call_soon(self._look_again)
        return True

    def close(self) -> None:
        """Hand out nothing any more. Idempotent."""
        if not self._closed:
            self._closed = True
            self._awaited.close(linger=0)

    def abandon_in_child(self) -> None:
        """Leave the socket to the parent of this process."""
        self._closed = self._awaited.abandoned = True

    def _await_next(self) -> None:
        if not self._closed:
            self._awaited.recv_multipart(copy=False)

    def _new_arrival(self) -> _Arrival:
        return _Arrival(self._arrived, self._loop)

    def _arrived(self, frames: list[zmq.Frame]) -> None:
        if self._closed:
            return
        if len(frames) > 2:
            self._on_message(_NOTHING, None)
        else:
            self._on_message(frames[0].buffer, frames[1].buffer if len(frames) == 2 else None)
        self.look()
        self._loop.call_soon(self._await_next)  # after the tasks that the messages have woken

    def _look_again(self) -> None:
        self._looking = False
        self.look()


class _Arrival(asyncio.Future[list[zmq.Frame]]):
    """A message that is handed out in the turn of the loop in which it was received: the next turn is 20 us away."""

    def __init__(self, on_arrival: Callable[[list[zmq.Frame]], None], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._on_arrival = on_arrival

    def set_result(self, result: list[zmq.Frame]) -> None:
        super().set_result(result)
        self._on_arrival(result)


class _Awaited(zmq.asyncio.Socket):
    """A socket that is left alone in a forked child: a call there could take away what wakes the parent's.

    Attributes:
        abandoned: Whether this is the child's copy.
    """

    abandoned = False

    def _handle_events(self, fd: int = 0, events: int = 0) -> None:
        if not self.abandoned:
            super()._handle_events(fd, events)  # type: ignore[misc]
