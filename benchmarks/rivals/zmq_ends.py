"""Bare ``zmq.asyncio``: one end publishes, the others subscribe; there is no high-water mark, so that all arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import zmq
import zmq.asyncio

from benchmarks.rivals.base import Line, ReaderEnd, Receiver, Sender, WriterEnd
from benchmarks.waiting import readable

BEACON_S = 0.01

_READY, _GO = b"ready?", b"go"


class SocketSender(Sender):
    """A sender that has a socket."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self.socket = socket

    async def aclose(self) -> None:
        self.socket.close(linger=0)


class SocketReceiver(Receiver):
    """A receiver that has a socket."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self.socket = socket

    async def aclose(self) -> None:
        self.socket.close(linger=0)


@dataclass(frozen=True)
class PublishingEnd(WriterEnd):
    """Binds, and publishes beacons until every reader has seen one: what is sent before a SUB is known is dropped.

    Attributes:
        kind: Of the socket: PUB or XPUB.
        address: Where to bind; wildcards are allowed.
        readers: Connections to all of the readers' ends.
        sender: Makes the sender of the socket.
    """

    kind: int
    address: str
    readers: list[Connection]
    sender: Callable[[zmq.asyncio.Socket], Sender]

    async def open(self) -> Sender:
        socket = zmq.asyncio.Context.instance().socket(self.kind)
        socket.sndhwm = 0
        try:
            socket.bind(self.address)
            for connection in self.readers:
                connection.send(socket.last_endpoint)
            while not all(connection.poll() for connection in self.readers):
                await socket.send(_READY)
                await asyncio.sleep(BEACON_S)
            await socket.send(_GO)
        except BaseException:
            socket.close(linger=0)
            raise
        self.leave()
        return self.sender(socket)

    def leave(self) -> None:
        for connection in self.readers:
            connection.close()


@dataclass(frozen=True)
class SubscribingEnd(ReaderEnd):
    """Connects, and says so on the first beacon.

    Attributes:
        writer: A connection to the writer's end.
        receiver: Makes the receiver of the socket.
    """

    writer: Connection
    receiver: Callable[[zmq.asyncio.Socket], Receiver]

    async def open(self) -> Receiver:
        await readable(self.writer.fileno())
        socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        socket.rcvhwm = 0
        socket.subscribe(b"")
        try:
            socket.connect(self.writer.recv())
            await socket.recv()
            self.writer.send(True)
            while await socket.recv() != _GO:
                pass
        except BaseException:
            socket.close(linger=0)
            raise
        self.leave()
        return self.receiver(socket)

    def leave(self) -> None:
        self.writer.close()


def socket_line(
    kind: int,
    address: str,
    n_reader: int,
    sender: Callable[[zmq.asyncio.Socket], Sender],
    receiver: Callable[[zmq.asyncio.Socket], Receiver],
) -> Line:
    """Make a line of these ends."""
    pipes = [Pipe() for _ in range(n_reader)]
    return Line(
        PublishingEnd(kind, address, [ours for ours, _ in pipes], sender),
        [SubscribingEnd(theirs, receiver) for _, theirs in pipes],
    )
