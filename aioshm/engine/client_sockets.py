"""The front end's sockets to its engines, and to the coordinator's counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from aioshm.engine.payloads import Frame
from aioshm.engine.router import sender_of
from aioshm.queue.sockets import BURST, Socket, Sockets, watched_by_heartbeats
from aioshm.wait.background import in_thread
from aioshm.zeromq import BoundFile, Watch, attach, open_socket

LINGER_MS = 500
"""How long the last aborts may take to leave; it takes no time unless an engine is stuck."""

_UNBOUNDED = 0  # what is in flight is bounded by the requests that are open, not by ZeroMQ


class Listener(Protocol):
    """Who is told what comes; on the loop."""

    def registered(self, identity: bytes, frames: list[bytes], connection: int, sender: str) -> None:
        """An engine has connected: its identity, what it says, its connection's number, and who it is, for people."""

    def disconnected(self, connection: int) -> None:
        """A connection has ended."""

    def output(self, frames: list[Frame]) -> None:
        """An engine has sent something."""

    def counts(self, payload: bytes) -> None:
        """The coordinator has published something."""


class ClientSockets:
    """ROUTER for what engines are sent, PULL for what they send, SUB for counts.

    Args:
        input_address: Where to bind the ROUTER.
        output_address: Where to bind the PULL.
        listener: Is told what comes.
        max_bytes: Of a frame: whoever sends a larger one is disconnected.
        silence_s: Seconds after which a connection over TCP that says nothing is given up.

    Attributes:
        input_address: Where the ROUTER is bound.
        output_address: Where the PULL is bound.

    Raises:
        OSError: An address cannot be bound.
    """

    def __init__(
        self, input_address: str, output_address: str, listener: Listener, *, max_bytes: int, silence_s: float
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._sockets = Sockets()
        self._watches: list[Watch] = []
        self._files: list[BoundFile] = []
        self._closed = False
        try:
            self._router = self._open(zmq.ROUTER, input_address, max_bytes)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what reaches nobody shall be an error
            if input_address.startswith("tcp://"):
                watched_by_heartbeats(self._router, int(silence_s * 1000))
            # Before anybody can connect, so that no end of a connection is missed.
            self._monitor = self._sockets.add(self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED))
            self.input_address = self._bind(self._router, input_address)
            self._pull = self._open(zmq.PULL, output_address, max_bytes)
            self.output_address = self._bind(self._pull, output_address)
            self._watch(self._router, self._read_registrations)
            self._watch(self._pull, self.read_outputs)
            self._watch(self._monitor, self._read_monitor)
        except BaseException:
            self._release()
            self._sockets.close()
            raise

    def send(self, identity: bytes, kind: bytes, frames: list[Frame]) -> None:
        """Send a message to an engine.

        Raises:
            zmq.ZMQError: It is not connected.
        """
        self._router.send_multipart([identity, kind, *frames], zmq.NOBLOCK)

    def subscribe(self, address: str) -> None:
        """Receive what the coordinator publishes there.

        Raises:
            OSError: The address is malformed.
        """
        self._sub = self._sockets.add(
            open_socket(self._sockets.context, zmq.SUB, address, bind=False, hwm=_UNBOUNDED, curve=None)
        )
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        attach(self._sub, address, bind=False)
        self._watch(self._sub, self._read_counts)

    def read_outputs(self) -> None:
        """Read what engines have sent, some of it at a time."""
        pull, noblock, listener = self._pull, zmq.NOBLOCK, self._listener
        for _ in range(BURST):
            if self._closed:
                return
            try:
                frames: list[Frame] = [pull.recv(noblock)]
            except zmq.ZMQError:
                return
            while pull.getsockopt(zmq.RCVMORE):
                frames.append(pull.recv(noblock, copy=False).buffer)
            listener.output(frames)
        self._loop.call_soon(self.read_outputs)

    async def aclose(self) -> None:
        """Close them once what was sent has left. Idempotent."""
        if not self._closed:
            self._release()
            await in_thread(lambda: self._sockets.close(LINGER_MS))

    def close(self) -> None:
        """Close them at once, and forget what was sent. Idempotent."""
        self._release()
        self._sockets.close()

    def _release(self) -> None:
        self._closed = True
        for watch in self._watches:
            watch.pause()
        for file in self._files:
            file.remove()

    def _open(self, kind: int, address: str, max_bytes: int) -> Socket:
        socket = self._sockets.add(
            open_socket(self._sockets.context, kind, address, bind=True, hwm=_UNBOUNDED, curve=None)
        )
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        return socket

    def _bind(self, socket: Socket, address: str) -> str:
        actual = attach(socket, address, bind=True)
        self._files.append(BoundFile(actual))
        return actual

    def _watch(self, socket: Socket, callback: Callable[[], None]) -> None:
        self._watches.append(Watch(self._loop, socket, callback))

    def _read_registrations(self) -> None:
        while not self._closed:
            try:
                identity = self._router.recv(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                return
            frames: list[bytes] = []
            while self._router.getsockopt(zmq.RCVMORE):
                frames.append(self._router.recv(zmq.NOBLOCK))
            self._read_monitor()  # the number of a connection that has ended may be this one's now
            self._listener.registered(identity.bytes, frames, int(identity.get(zmq.SRCFD)), sender_of(identity))

    def _read_monitor(self) -> None:
        while not self._closed:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.ZMQError:
                return
            self._listener.disconnected(event["value"])

    def _read_counts(self) -> None:
        while not self._closed:
            try:
                payload = self._sub.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            self._listener.counts(payload)
