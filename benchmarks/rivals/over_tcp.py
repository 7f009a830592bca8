"""The contestants over TCP on the loopback interface: aioshm's remote readers, and a bare ``zmq.asyncio`` XPUB/SUB.

The bare one promises nothing: it forgets what a reader misses while its connection is down, holds nobody back, and lets
anybody in. It has no high-water mark here, so that every message of the measurement arrives; with one, it would drop
them silently. It takes part twice: as it comes, with one copy at either end, and with ``copy=False``, where what is
received is a view of ZeroMQ's memory, as aioshm's leases are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq
import zmq.asyncio

from aioshm import MessageQueue, Options
from benchmarks.payloads import Payload
from benchmarks.rivals.aioshm_queue import QueueReaderEnd, QueueWriterEnd, queue_line
from benchmarks.rivals.base import Line, Receiver, Rival
from benchmarks.rivals.zmq_ends import SocketReceiver, SocketSender, socket_line

ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class RemoteWriterEnd(QueueWriterEnd):
    """Creates a queue without local readers, and gives its handle to the readers."""

    secure: bool

    def create(self) -> MessageQueue:
        return MessageQueue(
            len(self.handles),
            0,
            max_chunk_bytes=self.payload.chunk_bytes,
            max_chunks=self.payload.slots,
            connect_ip=ADDRESS,
            codec="raw",
            options=Options(secure=self.secure),
        )


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


class BytesSender(SocketSender):
    """Publishes bytes."""

    def __init__(self, socket: zmq.asyncio.Socket, copy: bool) -> None:
        super().__init__(socket)
        self._copy = copy

    async def send(self, message: bytes) -> None:
        await self.socket.send(message, copy=self._copy)


class BytesReceiver(SocketReceiver):
    """Receives bytes."""

    async def receive(self) -> Any:
        return await self.socket.recv()


class ViewReceiver(SocketReceiver):
    """Receives a view of ZeroMQ's memory."""

    async def receive(self) -> Any:
        return (await self.socket.recv(copy=False)).buffer


def _bare_line(payload: Payload, n_reader: int, copy: bool) -> Line:
    receiver = BytesReceiver if copy else ViewReceiver
    return socket_line(zmq.XPUB, f"tcp://{ADDRESS}:*", n_reader, partial(BytesSender, copy=copy), receiver)


_OPEN, _SECURE = partial(RemoteWriterEnd, secure=False), partial(RemoteWriterEnd, secure=True)

PLAIN = Rival("aioshm, secure=False", partial(queue_line, writer=_OPEN), blocks=False)
CURVE = Rival("aioshm, CURVE", partial(queue_line, writer=_SECURE), blocks=False)
LEASED = Rival("aioshm leased, secure=False", partial(queue_line, writer=_OPEN, reader=LeasingReaderEnd), blocks=False)
BARE = Rival("bare zmq.asyncio", partial(_bare_line, copy=True), blocks=False)
BARE_UNCOPIED = Rival("bare zmq.asyncio, copy=False", partial(_bare_line, copy=False), blocks=False)

OVER_TCP = [PLAIN, CURVE, LEASED, BARE, BARE_UNCOPIED]
