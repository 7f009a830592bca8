"""Reads multipart messages: frames beyond those that are expected, a stranger's, are dropped a slice at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import zmq

from aioshm.zeromq.sockets import Socket

TURN_FRAMES = 1024
"""Frames that are read before the loop's other callbacks have their turn."""

_DECODED_SHIFT = 8  # so many bytes that are to be decoded take as long as a frame

Head = TypeVar("Head")
First = Callable[[Socket], tuple[Head, "bytes | memoryview"]]
"""Reads the first frame of a message: returns what is to be known of its sender, and its bytes."""


class MessageReader(Generic[Head]):
    """Reads the messages of a socket, a bounded number of frames in each turn of the loop."""

    def __init__(self, socket: Socket, kept: int, first: First[Head], *, views: bool = False) -> None:
        self._socket, self._kept, self._first, self._views = socket, kept, first, views
        self._room = TURN_FRAMES
        self._partial: tuple[Head, list[Any]] | None = None

    def read(self) -> tuple[Head, list[Any]] | None:
        """Return what is known of a message's sender, and its frames; None if this turn of the loop is over."""
        socket = self._socket
        if self._room <= 0:
            self._room = TURN_FRAMES
            return None
        if self._partial is None:
            head, frame = self._first(socket)
            message = head, [frame]
        else:
            message, self._partial = self._partial, None
        frames = message[1]
        while socket.getsockopt(zmq.RCVMORE):
            if self._room <= 0:
                self._partial, self._room = message, TURN_FRAMES
                return None
            self._room -= 1
            more = socket.recv(zmq.NOBLOCK, copy=False)
            if len(frames) < self._kept:
                frames.append(more.buffer if self._views else more.bytes)
        self._room -= len(frames[0]) >> _DECODED_SHIFT
        return message


def with_sender(socket: Socket) -> tuple[zmq.Frame, bytes]:
    """Read a first frame, of which `user_of`, `sender_of` and ``zmq.SRCFD`` say who has sent it."""
    frame = socket.recv(zmq.NOBLOCK, copy=False)
    return frame, frame.bytes


def with_property(name: str) -> First[str]:
    """Return what reads a first frame and a property of its sender, such as ``"User-Id"``."""

    def first(socket: Socket) -> tuple[str, memoryview]:
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        try:
            value = str(frame.get(name))
        except (
            zmq.ZMQError,
            KeyError,
        ):  # of a ZMTP before 3.0; to `drain` it would be the end
            value = ""
        return value, frame.buffer

    return first


def plain(socket: Socket) -> tuple[str, bytes]:
    """Read a first frame, of which the sender does not matter."""
    return "", socket.recv(zmq.NOBLOCK)


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
