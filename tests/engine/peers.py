"""Engines, front ends, and peers of a coordinator, as bare sockets."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from aioshm.engine import DPCoordinator, EngineClient, EngineKeys, EngineZmqAddresses
from aioshm.engine.dp import CoordinatorAddresses
from aioshm.engine.protocol.messages import mark

WITHIN_S = 30


class Peers:
    """Makes sockets that connect to a coordinator, and closes them; with keys, those of engines and front ends."""

    def __init__(self, addresses: CoordinatorAddresses, keys: EngineKeys | None = None) -> None:
        self.addresses = addresses
        self.keys = keys
        self.context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self.context.term()

    def connect(self, kind: int, address: str, rank: int | None = None) -> zmq.asyncio.Socket:
        socket = self.context.socket(kind)
        self._sockets.append(socket)
        if self.keys is not None:
            curve = self.keys.to_coordinator() if rank is None else self.keys.for_engine(rank).to_coordinator()
            socket.curve_publickey, socket.curve_secretkey = curve.public, curve.secret
            socket.curve_serverkey = curve.server
        socket.connect(address)
        return socket

    async def subscriber(self, address: str, rank: int | None = None) -> zmq.asyncio.Socket:
        socket = self.connect(zmq.XSUB, address, rank)
        await socket.send(b"\x01")
        return socket

    async def engines(self, count: int) -> list[zmq.asyncio.Socket]:
        """Return sockets that have subscribed as engines, and were told READY."""
        sockets = [await self.subscriber(self.addresses.engine_input, rank) for rank in range(count)]
        for socket in sockets:
            assert await frames(socket) == [b"READY"]
        return sockets

    async def front_end(self) -> zmq.asyncio.Socket:
        return await self.subscriber(self.addresses.stats_publish)

    def reporter(self, rank: int = 0) -> zmq.asyncio.Socket:
        return self.connect(zmq.PUSH, self.addresses.engine_output, rank)


def places(coordinator: DPCoordinator) -> CoordinatorAddresses:
    return CoordinatorAddresses(coordinator.get_stats_publish_address(), *coordinator.get_engine_socket_addresses())


async def frames(socket: zmq.asyncio.Socket) -> list[bytes]:
    async with asyncio.timeout(WITHIN_S):
        received: list[bytes] = await socket.recv_multipart()
        return received


async def published(socket: zmq.asyncio.Socket) -> list[Any]:
    """Return the next thing that front ends are told."""
    (message,) = await frames(socket)
    told: list[Any] = msgspec.msgpack.decode(message)
    return told


async def until(socket: zmq.asyncio.Socket, expected: list[Any]) -> None:
    """Wait until front ends are told this."""
    async with asyncio.timeout(WITHIN_S):
        while await published(socket) != expected:
            pass


async def starts(socket: zmq.asyncio.Socket) -> tuple[int, int | None]:
    """Return the next start of a wave that engines are told."""
    kind, payload = await frames(socket)
    assert kind == b"\x02"
    return msgspec.msgpack.decode(payload, type=tuple[int, int | None])


def counts(index: int, waiting: int, running: int, **more: Any) -> bytes:
    return report(index, {"num_waiting_reqs": waiting, "num_running_reqs": running, **more})


def complete(index: int, wave: int) -> bytes:
    return report(index, None, wave)


def start(index: int, wave: int) -> bytes:
    return report(index, None, None, wave)


def report(index: int, stats: Any, complete: int | None = None, start: int | None = None) -> bytes:
    return pack([index, [], stats, 0.0, None, None, complete, start])


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


async def received(socket: Any) -> list[bytes]:
    """Return the next message of a socket that is not asyncio's."""
    async with asyncio.timeout(WITHIN_S):
        while not socket.poll(0):
            await asyncio.sleep(0.001)
    message: list[bytes] = socket.recv_multipart()
    return message


class BareEngine:
    """The sockets of engine 0 at a client."""

    def __init__(self, context: Any, client: EngineClient, **ready: Any) -> None:
        self.dealer = context.socket(zmq.DEALER)
        self.push = context.socket(zmq.PUSH)
        self.dealer.setsockopt(zmq.ROUTING_ID, b"\0\0")
        self.dealer.connect(client.addresses.inputs[0])
        self.push.connect(client.addresses.outputs[0])
        self.dealer.send(pack(ready))

    async def hears(self) -> list[bytes]:
        return await received(self.dealer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.dealer.close(linger=0)
        self.push.close(linger=0)


class BareClient:
    """The ROUTER and PULL of a front end without keys, which read nothing by themselves."""

    def __init__(self, context: Any, addresses: EngineZmqAddresses, index: int = 0) -> None:
        self.router = context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.pull = context.socket(zmq.PULL)
        self._addresses = addresses.inputs[index], addresses.outputs[index]

    def __enter__(self) -> Self:
        self.router.bind(self._addresses[0])
        self.pull.bind(self._addresses[1])
        return self

    def __exit__(self, *_: object) -> None:
        self.router.close(linger=0)
        self.pull.close(linger=0)

    async def hears(self) -> bytes:
        """Return the next registration or heartbeat."""
        _, frame = await received(self.router)
        return frame

    def submit(self, request: dict[str, Any], *, generation: int = 0) -> None:
        frames = [pack(request)]
        if generation:
            frames = mark(frames, generation)
        self.router.send_multipart([b"\0\0", b"\0", *frames])


class BareFrontEnd:
    """A front end's ROUTER for the handshake with one engine."""

    def __init__(self, context: Any, address: str, identity: bytes) -> None:
        self.router = context.socket(zmq.ROUTER)
        self.router.bind(address)
        self.address: str = self.router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._identity = identity

    async def hears(self) -> dict[str, Any]:
        sender, frame = await received(self.router)
        assert sender == self._identity
        heard: dict[str, Any] = msgspec.msgpack.decode(frame)
        return heard

    def says(self, *frames: bytes) -> None:
        self.router.send_multipart([self._identity, *frames])

    def idle(self) -> bool:
        return not self.router.poll(0)

    def close(self) -> None:
        self.router.close(linger=0)
