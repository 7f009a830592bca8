"""The contestants over TCP on the loopback interface: aioshm's remote readers, and a bare ``zmq.asyncio`` XPUB/SUB.

The bare one promises nothing: it forgets what a reader misses while its connection is down, holds nobody back, and lets
anybody in. It has no high-water mark here, so that every message of the measurement arrives; with one, it would drop
them silently. It takes part twice: as it comes, with one copy at either end, and with ``copy=False``, where what is
received is a view of ZeroMQ's memory, as aioshm's leases are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import zmq
import zmq.asyncio

from aioshm import MessageQueue, Options
from benchmarks.payloads import Payload
from benchmarks.rivals.aioshm_queue import READY_TIMEOUT_S, QueueReaderEnd, QueueSender
from benchmarks.rivals.base import Line, ReaderEnd, Receiver, Rival, Sender, WriterEnd
from benchmarks.waiting import readable

ADDRESS = "127.0.0.1"
BEACON_S = 0.01

_READY, _GO = b"ready?", b"go"


@dataclass(frozen=True)
class RemoteWriterEnd(WriterEnd):
    """Creates a queue without local readers, and gives its handle to the readers."""

    handles: list[Connection]
    payload: Payload
    secure: bool

    async def open(self) -> QueueSender:
        queue = MessageQueue(
            len(self.handles),
            0,
            max_chunk_bytes=self.payload.chunk_bytes,
            max_chunks=self.payload.slots,
            connect_ip=ADDRESS,
            codec="raw",
            options=Options(secure=self.secure),
        )
        try:
            for connection in self.handles:
                connection.send(queue.export_handle())
            await queue.wait_until_ready(READY_TIMEOUT_S)
        except BaseException:
            await queue.aclose()
            raise
        self.leave()
        return QueueSender(queue)

    def leave(self) -> None:
        for connection in self.handles:
            connection.close()


class LeasingReceiver(Receiver):
    """A reader's end that leases each message instead of dequeuing it."""

    def __init__(self, queue: MessageQueue) -> None:
        self._queue = queue

    async def receive(self) -> Any:
        async with self._queue.lease() as message:
            return message  # of a remote reader's, it stays valid

    async def aclose(self) -> None:
        await self._queue.aclose()


@dataclass(frozen=True)
class LeasingReaderEnd(QueueReaderEnd):
    """Attaches to the queue, to lease its messages."""

    async def open(self) -> Receiver:  # type: ignore[override]
        return LeasingReceiver((await super().open()).queue)


class XpubSender(Sender):
    """Publishes bytes."""

    def __init__(self, socket: zmq.asyncio.Socket, copy: bool) -> None:
        self._socket = socket
        self._copy = copy

    async def send(self, message: bytes) -> None:
        await self._socket.send(message, copy=self._copy)

    async def aclose(self) -> None:
        self._socket.close(linger=0)


class SubReceiver(Receiver):
    """Receives bytes, or a view of them."""

    def __init__(self, socket: zmq.asyncio.Socket, copy: bool) -> None:
        self._socket = socket
        self._copy = copy

    async def receive(self) -> Any:
        if self._copy:
            return await self._socket.recv()
        return (await self._socket.recv(copy=False)).buffer

    async def aclose(self) -> None:
        self._socket.close(linger=0)


@dataclass(frozen=True)
class XpubEnd(WriterEnd):
    """Binds, and publishes beacons until every reader has seen one."""

    readers: list[Connection]
    copy: bool

    async def open(self) -> XpubSender:
        socket = zmq.asyncio.Context.instance().socket(zmq.XPUB)
        socket.sndhwm = 0
        try:
            port = socket.bind_to_random_port(f"tcp://{ADDRESS}")
            for connection in self.readers:
                connection.send(f"tcp://{ADDRESS}:{port}")
            while not all(connection.poll() for connection in self.readers):
                await socket.send(_READY)
                await asyncio.sleep(BEACON_S)
            await socket.send(_GO)
        except BaseException:
            socket.close(linger=0)
            raise
        self.leave()
        return XpubSender(socket, self.copy)

    def leave(self) -> None:
        for connection in self.readers:
            connection.close()


@dataclass(frozen=True)
class SubEnd(ReaderEnd):
    """Connects, and says so on the first beacon."""

    writer: Connection
    copy: bool

    async def open(self) -> SubReceiver:
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
        return SubReceiver(socket, self.copy)

    def leave(self) -> None:
        self.writer.close()


def _queue_line(end: type[QueueReaderEnd], secure: bool) -> Callable[[Payload, int], Line]:
    def line(payload: Payload, n_reader: int) -> Line:
        pipes = [Pipe(duplex=False) for _ in range(n_reader)]
        readers = [end(receiver, rank) for rank, (receiver, _) in enumerate(pipes)]
        return Line(RemoteWriterEnd([sender for _, sender in pipes], payload, secure), readers)

    return line


def _bare_line(copy: bool) -> Callable[[Payload, int], Line]:
    def line(payload: Payload, n_reader: int) -> Line:
        pipes = [Pipe() for _ in range(n_reader)]
        return Line(XpubEnd([ours for ours, _ in pipes], copy), [SubEnd(theirs, copy) for _, theirs in pipes])

    return line


PLAIN = Rival("aioshm, secure=False", _queue_line(QueueReaderEnd, secure=False), blocks=False)
CURVE = Rival("aioshm, CURVE", _queue_line(QueueReaderEnd, secure=True), blocks=False)
LEASED = Rival("aioshm leased, secure=False", _queue_line(LeasingReaderEnd, secure=False), blocks=False)
BARE = Rival("bare zmq.asyncio", _bare_line(copy=True), blocks=False)
BARE_UNCOPIED = Rival("bare zmq.asyncio, copy=False", _bare_line(copy=False), blocks=False)

OVER_TCP = [PLAIN, CURVE, LEASED, BARE, BARE_UNCOPIED]
