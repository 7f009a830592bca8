"""``zmq.asyncio`` PUB/SUB over ipc with pickle, no high-water mark, large messages without copies.

From `OUT_OF_BAND_BYTES` on, pickle's buffers travel as frames of their own and are sent and received with
``copy=False``: the quickest way there is, although what arrives is then read-only, and the sender must not touch its
buffers again.
"""

from __future__ import annotations

import asyncio
import pickle
import secrets
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from benchmarks.payloads import KIB, Payload
from benchmarks.rivals.base import Line, ReaderEnd, Receiver, Rival, Sender, WriterEnd

OUT_OF_BAND_BYTES = 64 * KIB
BEACON_S = 0.01

_READY, _GO = b"ready?", b"go"


class PubSender(Sender):
    """Publishes what ``pickle.dumps`` returns."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket

    async def send(self, message: Any) -> None:
        await self._socket.send(pickle.dumps(message, 5))

    async def aclose(self) -> None:
        self._socket.close(linger=0)


class FramesPubSender(PubSender):
    """Publishes the pickle and, beside it, the buffers."""

    async def send(self, message: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        main = pickle.dumps(message, 5, buffer_callback=buffers.append)
        await self._socket.send_multipart([main, *buffers], copy=False)


class SubReceiver(Receiver):
    """Receives a pickle."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket

    async def receive(self) -> Any:
        return pickle.loads(await self._socket.recv())

    async def aclose(self) -> None:
        self._socket.close(linger=0)


class FramesSubReceiver(SubReceiver):
    """Receives a pickle and its buffers."""

    async def receive(self) -> Any:
        main, *buffers = await self._socket.recv_multipart(copy=False)
        return pickle.loads(main.buffer, buffers=[frame.buffer for frame in buffers])


@dataclass(frozen=True)
class PubEnd(WriterEnd):
    """Binds, and publishes beacons until every reader has seen one: PUB drops what it sends before a SUB is known."""

    address: str
    seen: list[Connection]
    frames: bool

    async def open(self) -> PubSender:
        socket = zmq.asyncio.Context.instance().socket(zmq.PUB)
        socket.sndhwm = 0
        try:
            socket.bind(self.address)
            while not all(connection.poll() for connection in self.seen):
                await socket.send(_READY)
                await asyncio.sleep(BEACON_S)
            await socket.send(_GO)
        except BaseException:
            socket.close(linger=0)
            raise
        self.leave()
        return FramesPubSender(socket) if self.frames else PubSender(socket)

    def leave(self) -> None:
        for connection in self.seen:
            connection.close()


@dataclass(frozen=True)
class SubEnd(ReaderEnd):
    """Connects, and says so on the first beacon."""

    address: str
    seen: Connection
    frames: bool

    async def open(self) -> SubReceiver:
        socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        socket.rcvhwm = 0
        socket.subscribe(b"")
        try:
            socket.connect(self.address)
            await socket.recv()
            self.seen.send(True)
            while await socket.recv() != _GO:
                pass
        except BaseException:
            socket.close(linger=0)
            raise
        self.leave()
        return FramesSubReceiver(socket) if self.frames else SubReceiver(socket)

    def leave(self) -> None:
        self.seen.close()


def _line(payload: Payload, n_reader: int) -> Line:
    name = f"aioshm-benchmark-{secrets.token_hex(8)}"
    # A Linux abstract socket leaves no file behind, however the processes end.
    address = f"ipc://@{name}" if sys.platform == "linux" else f"ipc://{Path(tempfile.gettempdir()) / name}"
    frames = payload.nbytes >= OUT_OF_BAND_BYTES
    pipes = [Pipe(duplex=False) for _ in range(n_reader)]
    return Line(
        PubEnd(address, [receiver for receiver, _ in pipes], frames),
        [SubEnd(address, sender, frames) for _, sender in pipes],
    )


RIVAL = Rival("zmq.asyncio", _line, blocks=False)
