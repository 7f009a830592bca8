"""pyzmq over ipc: PUSH/PULL to one reader, XPUB/SUB to several; plain calls, or awaited through ``zmq.asyncio``.

Tensors travel as frames of their own, sent and received with ``copy=False``: the quickest way there is, although the
sender must then leave its buffers alone until they have gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from benchmarks.compare.codecs import decoder, encoder, from_frames, to_frames
from benchmarks.compare.contestant import ALL_CODECS, Codec, Contestant, End, Job, Line, Port, ipc_address

NO_BOUND = 0
"""For XPUB, which drops messages at its high-water mark."""


@dataclass(frozen=True)
class WriterEnd(End):
    """Binds, and waits until every reader is there."""

    address: str
    job: Job
    awaited: bool

    def open(self) -> Port:
        several = self.job.n_reader > 1
        # Both kinds of socket take the same steps; only what is awaited differs, so opening uses the plain one.
        plain: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB if several else zmq.PUSH)
        plain.sndhwm = NO_BOUND if several else self.job.slots
        plain.linger = 0
        if several:
            plain.setsockopt(zmq.XPUB_VERBOSE, True)
        plain.bind(self.address)
        for _ in range(self.job.n_reader if several else 0):
            plain.recv()  # a subscription
        socket: Any = zmq.asyncio.Socket.shadow(plain.underlying) if self.awaited else plain
        return Port(_sender(socket, self.job.codec, self.awaited), functools.partial(_close, socket, plain))


@dataclass(frozen=True)
class ReaderEnd(End):
    """Connects, and subscribes if there are several."""

    address: str
    job: Job
    awaited: bool

    def open(self) -> Port:
        several = self.job.n_reader > 1
        plain: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB if several else zmq.PULL)
        plain.rcvhwm = NO_BOUND if several else self.job.slots
        plain.linger = 0
        if several:
            plain.setsockopt(zmq.SUBSCRIBE, b"")
        plain.connect(self.address)
        socket: Any = zmq.asyncio.Socket.shadow(plain.underlying) if self.awaited else plain
        return Port(_receiver(socket, self.job.codec, self.awaited), functools.partial(_close, socket, plain))


def _sender(socket: Any, codec: Codec, awaited: bool) -> Callable[..., Any]:
    if codec == "tensor":
        send_frames = socket.send_multipart
        return lambda message: send_frames(to_frames(message), copy=False)  # an awaitable, if awaited
    if codec == "raw":
        return lambda message: socket.send(bytes(message)) if awaited else socket.send(message)
    encode, send = encoder(codec), socket.send
    return lambda message: send(encode(message))


def _receiver(socket: Any, codec: Codec, awaited: bool) -> Callable[..., Any]:
    decode, receive, receive_frames = decoder(codec), socket.recv, socket.recv_multipart
    if codec == "raw":
        return receive  # type: ignore[no-any-return]
    if awaited:

        async def receive_awaited() -> Any:
            return decode(await receive())

        async def receive_tensor_awaited() -> Any:
            return from_frames([frame.buffer for frame in await receive_frames(copy=False)])

        return receive_tensor_awaited if codec == "tensor" else receive_awaited
    if codec == "tensor":
        return lambda: from_frames([frame.buffer for frame in receive_frames(copy=False)])
    return lambda: decode(receive())


def _close(socket: Any, plain: Any) -> None:
    if socket is not plain:
        socket.close(linger=0)
    plain.close(linger=0)


def _lines(awaited: bool) -> Callable[[Job], Line]:
    def line(job: Job) -> Line:
        address = ipc_address()
        return Line(WriterEnd(address, job, awaited), [ReaderEnd(address, job, awaited)] * job.n_reader)

    return line


CONTESTANTS = [
    Contestant("zmq.asyncio", _lines(True), True, "zmq.asyncio", "pyzmq", ALL_CODECS),
    Contestant("pyzmq", _lines(False), False, "zmq", "pyzmq", ALL_CODECS),
]
