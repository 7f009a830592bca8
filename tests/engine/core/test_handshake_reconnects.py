"""Handshakes whose connection breaks, or goes silent, before READY."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

import msgspec
import pytest
import zmq
from peers import BareFrontEnd
from startups import addresses, tasks
from support import until

from aioshm.engine import (
    CoreEngine,
    EngineHandshakeMetadata,
    EngineKeys,
    EngineStartupCoordinator,
    HandshakeOptions,
    StartupOptions,
    shake_hands,
)
from aioshm.engine.protocol.addresses import StartupReport
from aioshm.engine.startup.router import HandshakeRouter
from aioshm.zeromq import endpoint

LOOPBACK = "tcp://127.0.0.1:0"
SILENCE_S = 1.0
WITHIN_S = 15.0
INIT = msgspec.msgpack.encode(EngineHandshakeMetadata(addresses(), {}))
HELLO = {"status": "HELLO", "local": True, "headless": False}
READY = {"status": "READY", "local": True, "headless": False}
# What chunks of the traffic contain, by their direction. CURVE hides all but the kind of a command.
SWALLOWED = {"HELLO": b"\xa6status\xa5HELLO", "INIT": b"addresses"}
ENCRYPTED = b"\x07MESSAGE"


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have heartbeats notice a silent connection within a second."""
    monkeypatch.setattr(endpoint, "SILENCE_S", SILENCE_S)


class Proxy:
    """A TCP proxy in front of a front end.

    Args:
        target: The port of the front end; None: connections are closed at once.

    Attributes:
        connections: How many there were.
        swallowed: How many chunks a trap has swallowed.
        pings: How many heartbeats have passed, where nothing is encrypted.
    """

    def __init__(self, target: int | None) -> None:
        self.target = target
        self.connections = 0
        self.swallowed = 0
        self.pings = 0
        self._trap: tuple[bytes, bool] | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._silent: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await until(lambda: not self._writers, "the end of the proxy")
        await self._server.wait_closed()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def trap(self, text: bytes, *, to_engine: bool) -> None:
        """Swallow the next chunk with this text in this direction, and cut the connection."""
        self._trap = text, to_engine

    def silence(self) -> None:
        """Swallow all that comes over the present connections, and keep them open."""
        self._silent |= self._writers

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.target is None:
            writer.close()
            return
        there_reader, there = await asyncio.open_connection("127.0.0.1", self.target)
        both = {writer, there}
        self._writers |= both
        try:
            await asyncio.gather(self._forward(reader, there, False), self._forward(there_reader, writer, True))
        except OSError:
            pass
        finally:
            for each in both:
                each.transport.abort()
            self._writers -= both
            self._silent -= both

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, to_engine: bool) -> None:
        while chunk := await source.read(1 << 16):
            if sink in self._silent:
                continue
            if self._trap is not None and self._trap[1] == to_engine and self._trap[0] in chunk:
                self._trap = None
                self.swallowed += 1
                break
            self.pings += b"\x04PING" in chunk
            sink.write(chunk)
        while sink in self._silent and not sink.is_closing():  # the other end may have closed
            await asyncio.sleep(0.01)
        raise ConnectionResetError


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def serve(address: str, *, initialize: Callable[[Any], Any], **options: Any) -> None:
    """Shake hands, and go on for ever, as an engine does."""
    await shake_hands(address, 0, initialize=initialize, handshake=HandshakeOptions(**options))
    await asyncio.Event().wait()


@asynccontextmanager
async def starting(
    secure: bool,
) -> AsyncIterator[tuple[Proxy, Callable[..., Awaitable[None]], EngineStartupCoordinator]]:
    """Give a front end behind a proxy, and what runs its engine."""
    keys = EngineKeys.generate()
    async with EngineStartupCoordinator(
        LOOPBACK, [CoreEngine(0)], addresses(), options=StartupOptions(keys=keys, secure=secure)
    ) as startup:
        port = port_of(startup.handshake_address)
        async with Proxy(port) as proxy:

            def engine(initialize: Callable[[Any], Any]) -> Awaitable[None]:
                return serve(proxy.address, initialize=initialize, keys=keys, secure=secure)

            yield proxy, engine, startup


def check(report: StartupReport) -> None:
    assert report.num_gpu_blocks == 7
    assert report.engines[0].ready == {**READY, "num_gpu_blocks": 7}
    assert report.engines[0].hello == HELLO


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("message", ["HELLO", "INIT"])
async def test_message_swallowed_by_connection_that_breaks_is_sent_again(message: str, secure: bool) -> None:
    async with starting(secure) as (proxy, engine, startup):
        text = ENCRYPTED if secure else SWALLOWED[message]
        proxy.trap(text, to_engine=message == "INIT")
        async with tasks(engine(lambda _: {"num_gpu_blocks": 7})):
            check(await startup.wait(WITHIN_S))
            assert (proxy.swallowed, proxy.connections) == (1, 2)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "encrypted"])
async def test_engine_whose_connection_goes_silent_while_it_initialises_gets_ready(secure: bool) -> None:
    async with starting(secure) as (proxy, engine, startup):

        async def initialize(_: object) -> dict[str, Any]:
            # Without keys nobody takes an engine's place: heartbeats let the front end drop the old connection.
            await until(lambda: proxy.pings or secure, "a heartbeat")
            proxy.silence()
            await until(lambda: proxy.connections == 2, "another connection")
            return {"num_gpu_blocks": 7}

        async with tasks(engine(initialize)):
            check(await startup.wait(WITHIN_S))
            assert proxy.connections == 2


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "encrypted"])
async def test_engine_whose_connection_breaks_before_the_answer_is_answered_over_the_next(
    secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router's method is replaced: nothing public decides when the front end notices the end."""
    answer = HandshakeRouter.answer
    answers = 0

    def fail_once(self: HandshakeRouter, frames: list[bytes]) -> None:
        nonlocal answers
        answers += 1
        if answers == 1:
            proxy.cut()
            raise zmq.ZMQError(errno.EHOSTUNREACH)
        answer(self, frames)

    monkeypatch.setattr(HandshakeRouter, "answer", fail_once)
    async with starting(secure) as (proxy, engine, startup):
        async with tasks(engine(lambda _: {"num_gpu_blocks": 7})):
            check(await startup.wait(WITHIN_S))
    assert answers == 2


async def test_messages_are_those_of_vllm_until_their_connection_breaks() -> None:
    """Connections that broke before a message was sent into them do not count."""
    with zmq.Context() as context:
        router = BareFrontEnd(context, LOOPBACK, b"\0\0")
        async with Proxy(None) as proxy, tasks(serve(proxy.address, initialize=lambda _: None, secure=False)):
            await until(lambda: proxy.connections == 2, "two connections that are refused")
            proxy.target = port_of(router.address)
            assert await router.hears() == HELLO
            assert router.idle()
            proxy.cut()
            again = await router.hears()
            assert again == {**HELLO, "again": True, "process": again["process"]}
            router.says(INIT)
            assert await router.hears() == READY
            assert router.idle()
        router.close()
