"""The front end's socket of the handshake."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import zmq

from aioshm.engine.doorkeeper import Doorkeeper
from aioshm.queue.sockets import BURST, Socket, Sockets
from aioshm.zeromq import BoundFile, Watch, attach, open_socket

MAX_FRAME_BYTES = 16 << 20
"""ZeroMQ hangs up on whoever sends more, without a word; what is too much below that can be refused by name."""

_HWM = 1000
_FRAMES = 2  # of a payload, that are kept: it should be one


class HandshakeRouter:
    """A ROUTER socket whose messages are handed to a callback on the loop.

    Args:
        place: The address to bind, or a ROUTER socket that is bound; that may be one of ``zmq.asyncio``.
        on_message: Gets a message's identity, its other frames, the first two at most, and who has sent it, for people.
            Returns whether to go on.

    Attributes:
        address: Where it is bound.

    Raises:
        OSError: The address cannot be bound.
        ValueError: The socket is no ROUTER.
    """

    def __init__(self, place: str | Socket, on_message: Callable[[bytes, list[bytes], str], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._sockets: Sockets | None = None
        self._descriptor: int | None = None
        self._file: BoundFile | None = None
        self._doorkeeper: Doorkeeper | None = None
        self.address = ""
        if isinstance(place, str):
            self._sockets = Sockets()
            self._router = self._sockets.add(
                open_socket(self._sockets.context, zmq.ROUTER, place, bind=True, hwm=_HWM, curve=None)
            )
            self._router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            self._doorkeeper = Doorkeeper(self._sockets, self._router)
        else:
            if place.getsockopt(zmq.TYPE) != zmq.ROUTER:
                raise ValueError(f"the handshake needs a ROUTER socket, not {place!r}")
            self._router = zmq.Socket.shadow(place)
            # The socket's owner may watch its descriptor on this loop, too, which knows one watcher for each.
            self._descriptor = os.dup(int(self._router.getsockopt(zmq.FD)))
        # Of two engines with one rank the second shall be heard, so that it can be refused; without this the socket
        # ignores it. And an INIT that reaches nobody shall be an error.
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            if isinstance(place, str):
                self.address = attach(self._router, place, bind=True)
                self._file = BoundFile(self.address)
            else:
                self.address = bytes(self._router.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
            self._watch = Watch(self._loop, self._router, self.look, self._descriptor)
        except BaseException:
            self._release()
            raise

    def look(self) -> None:
        """Read what has come, some of it at a time."""
        for _ in range(BURST):
            if self._watch.paused:
                return
            try:
                identity = self._router.recv(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                return
            frames: list[bytes] = []
            while self._router.getsockopt(zmq.RCVMORE):
                frame = self._router.recv(zmq.NOBLOCK, copy=False)
                if len(frames) < _FRAMES:
                    frames.append(frame.bytes)
            if not self._on_message(identity.bytes, frames, sender_of(identity)):
                self._watch.pause()
        self._loop.call_soon(self.look)

    def answer(self, frames: list[bytes]) -> None:
        """Answer an engine's first message; the first frame is whom to.

        Raises:
            zmq.ZMQError: Nobody of that name is connected.
        """
        self._router.send_multipart(frames, zmq.NOBLOCK)
        if self._doorkeeper is not None:
            self._doorkeeper.heard()

    def close(self) -> None:
        """Read no more, and close the socket unless it was given. Idempotent."""
        self._watch.pause()
        self._release()

    def _release(self) -> None:
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._file is not None:
            self._file.remove()
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None


def sender_of(frame: zmq.Frame) -> str:
    """Say, for people, who has sent this."""
    try:
        address = str(frame.get("Peer-Address"))
    except (zmq.ZMQError, KeyError):
        return "an unknown address"
    # Of a local socket it is "localhost:uid:gid:pid" where the system tells that (SO_PEERCRED, unix(7)).
    pid = address.rpartition(":")[2]
    return f"pid {pid}" if address.startswith("localhost:") and pid.isdigit() else address
