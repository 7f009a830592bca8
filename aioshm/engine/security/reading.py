"""Reads messages that have few frames where they are honest, and may have millions where they are not."""

from __future__ import annotations

import zmq

from aioshm.zeromq.sockets import Socket

TURN_FRAMES = 1024
"""Frames that are read before the loop's other callbacks have their turn."""


class MessageReader:
    """Reads the messages of a socket, a bounded number of frames in each turn of the loop.

    Args:
        socket: Which nobody else reads.
        kept: How many frames of a message are kept; the others are read and forgotten.

    Attributes:
        unfinished: Whether the turn was over in the middle of a message: come back in the next one.
    """

    def __init__(self, socket: Socket, kept: int) -> None:
        self.unfinished = False
        self._socket = socket
        self._kept = kept
        self._room = 0
        self._partial: tuple[zmq.Frame, list[bytes]] | None = None

    def begin_turn(self) -> None:
        """Note that a new turn of the loop has begun."""
        self._room = TURN_FRAMES

    def read(self) -> tuple[zmq.Frame, list[bytes]] | None:
        """Return a message's first frame, and its first frames as bytes; None if there is none now, or not all of it.

        Raises:
            zmq.ZMQError: The socket was closed.
        """
        socket, self.unfinished = self._socket, False
        if self._partial is None:
            try:
                head = socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            self._partial = head, [head.bytes]
        frames = self._partial[1]
        while socket.getsockopt(zmq.RCVMORE):
            if not self._room:
                self.unfinished = True
                return None
            self._room -= 1
            frame = socket.recv(zmq.NOBLOCK, copy=False)
            if len(frames) < self._kept:
                frames.append(frame.bytes)
        message, self._partial = self._partial, None
        return message


def user_of(frame: zmq.Frame) -> str:
    """Return who has sent this, by their keys."""
    return str(frame.get("User-Id"))


def sender_of(frame: zmq.Frame) -> str:
    """Say, for people, who has sent this."""
    try:
        address = str(frame.get("Peer-Address"))
    except (zmq.ZMQError, KeyError):
        return "an unknown address"
    # Of a local socket it is "localhost:uid:gid:pid" where the system tells that (SO_PEERCRED, unix(7)).
    pid = address.rpartition(":")[2]
    return f"pid {pid}" if address.startswith("localhost:") and pid.isdigit() else address
