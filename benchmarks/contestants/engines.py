"""Contestants that bring requests to an engine in another process, and its outputs back.

All carry the same structs, encoded by msgspec, over a Unix socket (TCP where a name says so),
and the engine answers each request with one output.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import msgspec
import zmq
import zmq.asyncio

from aioshm.engine import (
    CoreEngine,
    EngineClient,
    EngineCredentials,
    EngineKeys,
    EngineStartupCoordinator,
    EngineZmqAddresses,
    run_engine_core,
)
from aioshm.engine.blocking import EngineClient as BlockingClient
from benchmarks.framework.crew import Boss, Crew, Hand

READY_S = 30.0

_LOOPBACK = "tcp://127.0.0.1:0"


class Request(msgspec.Struct):
    """A prompt."""

    request_id: str
    prompt_token_ids: list[int]


class Output(msgspec.Struct):
    """The first token, which is the last one, too."""

    request_id: str
    token_id: int
    finish_reason: str | None = None


Ask: TypeAlias = Callable[[Request], Awaitable[Output]]


@dataclass(frozen=True)
class EngineContestant:
    """One way to bring requests to an engine.

    Attributes:
        name: As reports call it.
        front: Starts an engine; ``async with`` gets what sends it a request and returns the first output.
    """

    name: str
    front: Callable[[Crew], AbstractAsyncContextManager[Ask]]


def answer(request: Request) -> Output:
    """Do what an engine does."""
    return Output(request.request_id, request.prompt_token_ids[-1], "length")


# aioshm


class Echo:
    """An engine that answers each request in its next step."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def initialize(self, _metadata: object) -> dict[str, Any]:
        """Prepare nothing."""
        return {}

    def add_request(self, request: Request) -> None:
        """Take a request."""
        self._requests.append(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Drop requests."""
        self._requests = [request for request in self._requests if request.request_id not in request_ids]

    def step(self) -> list[Output]:
        """Answer all."""
        outputs = [answer(request) for request in self._requests]
        self._requests.clear()
        return outputs


async def serve(boss: Boss, address: str, keys: EngineCredentials | None = None) -> None:
    """Role: an engine of aioshm's, with keys if it is to encrypt over TCP."""
    serving = asyncio.create_task(
        run_engine_core(Echo(), address, 0, request_type=Request, keys=keys, secure=keys is not None)
    )
    ordering = asyncio.create_task(boss.order())
    await asyncio.wait([serving, ordering], return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    ordering.cancel()
    await asyncio.wait([serving, ordering])
    if not serving.cancelled():
        serving.result()


@asynccontextmanager
async def _client(crew: Crew) -> AsyncIterator[Ask]:
    with tempfile.TemporaryDirectory(prefix="aioshm-") as folder:
        async with EngineClient(_addresses(folder), 1, output_type=Output) as client:
            hand = await _start(crew, folder, client.addresses)
            await client.wait_until_ready(READY_S)
            yield _asking(client)
            await crew.dismiss([hand])


def _asking(client: EngineClient) -> Ask:
    async def ask(request: Request) -> Output:
        output: Output = await anext(client.submit(request))
        return output

    return ask


@asynccontextmanager
async def _client_over_tcp(crew: Crew, secure: bool) -> AsyncIterator[Ask]:
    addresses, engines, keys = EngineZmqAddresses([_LOOPBACK], [_LOOPBACK]), [CoreEngine(0)], EngineKeys.generate()
    async with EngineClient(addresses, 1, output_type=Output, keys=keys, secure=secure) as client:
        async with EngineStartupCoordinator(_LOOPBACK, engines, addresses, keys=keys, secure=secure) as startup:
            own = keys.for_engine(0) if secure else None
            hand = crew.start("engine of aioshm", serve, startup.handshake_address, own)
            await startup.wait(READY_S)
        await client.wait_until_ready(READY_S)
        yield _asking(client)
        await crew.dismiss([hand])


@asynccontextmanager
async def _blocking_client(crew: Crew) -> AsyncIterator[Ask]:
    with (
        tempfile.TemporaryDirectory(prefix="aioshm-") as folder,
        BlockingClient(_addresses(folder), 1, output_type=Output) as client,
    ):
        hand = await _start(crew, folder, client.addresses)
        client.wait_until_ready(READY_S)

        async def ask(request: Request) -> Output:  # it blocks this loop, which has nothing else to do
            output: Output = next(client.submit(request))
            return output

        yield ask
        await crew.dismiss([hand])


def _addresses(folder: str) -> EngineZmqAddresses:
    return EngineZmqAddresses([f"ipc://{folder}/in"], [f"ipc://{folder}/out"])


async def _start(crew: Crew, folder: str, addresses: EngineZmqAddresses) -> Hand:
    handshake = f"ipc://{folder}/handshake"
    hand = crew.start("engine of aioshm", serve, handshake)
    async with EngineStartupCoordinator(handshake, [CoreEngine(0)], addresses) as startup:
        await startup.wait(READY_S)
    return hand


# zmq.asyncio, bare


async def echo(boss: Boss, address: str) -> None:
    """Role: a DEALER that answers."""
    decode, encode = msgspec.msgpack.Decoder(Request).decode, msgspec.msgpack.Encoder().encode
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, b"\0\0")
    socket.connect(address)
    await socket.send(b"")

    async def answer_all() -> None:
        while True:
            await socket.send(encode(answer(decode(await socket.recv()))))

    serving = asyncio.create_task(answer_all())
    await boss.order()
    serving.cancel()
    await asyncio.wait([serving])
    socket.close(linger=0)


@asynccontextmanager
async def _router(crew: Crew) -> AsyncIterator[Ask]:
    decode, encode = msgspec.msgpack.Decoder(Output).decode, msgspec.msgpack.Encoder().encode
    with tempfile.TemporaryDirectory(prefix="aioshm-") as folder:
        address = f"ipc://{folder}/router"
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        try:
            socket.bind(address)
            hand = crew.start("engine of zmq.asyncio", echo, address)
            async with asyncio.timeout(READY_S):
                identity, _ = await socket.recv_multipart()

            async def ask(request: Request) -> Output:
                await socket.send_multipart([identity, encode(request)])
                return decode((await socket.recv_multipart())[1])

            yield ask
            await crew.dismiss([hand])
        finally:
            socket.close(linger=0)
            context.term()


ENGINES = [
    EngineContestant("aioshm", _client),
    EngineContestant("aioshm, blocking", _blocking_client),
    EngineContestant("zmq.asyncio", _router),
    EngineContestant("aioshm, TCP, CURVE", partial(_client_over_tcp, secure=True)),
    EngineContestant("aioshm, TCP, secure=False", partial(_client_over_tcp, secure=False)),
]
