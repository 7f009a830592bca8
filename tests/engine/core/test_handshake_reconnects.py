"""Handshakes whose connection is refused, or goes silent, before READY."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

import pytest
from startups import addresses, tasks
from support import until

from aioshm.engine import (
    CoreEngine,
    EngineKeys,
    EngineStartupCoordinator,
    HandshakeOptions,
    StartupOptions,
    shake_hands,
)
from aioshm.zeromq import endpoint

WITHIN_S = 15.0


class Proxy:
    """A TCP proxy in front of a front end.

    Attributes:
        refuses: Whether connections are closed immediately.
        connections: How many there were.
        pings: How many heartbeats have passed, where nothing is encrypted.
    """

    def __init__(self, target: str) -> None:
        self._port = int(target.rpartition(":")[2])
        self.refuses = False
        self.connections = 0
        self.pings = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._silent: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await until(lambda: not self._writers, "the end of the proxy")
        await self._server.wait_closed()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def silence(self) -> None:
        """Swallow all that comes over the present connections, and keep them open."""
        self._silent |= self._writers

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.refuses:
            writer.close()
            return
        there_reader, there = await asyncio.open_connection("127.0.0.1", self._port)
        both = {writer, there}
        self._writers |= both
        try:
            await asyncio.gather(self._forward(reader, there), self._forward(there_reader, writer))
        except OSError:
            pass
        finally:
            for each in both:
                each.transport.abort()
            self._writers -= both
            self._silent -= both

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while chunk := await source.read(1 << 16):
            if sink not in self._silent:
                self.pings += b"\x04PING" in chunk
                sink.write(chunk)
        while sink in self._silent and not sink.is_closing():  # the other end may have closed
            await asyncio.sleep(0.01)
        raise ConnectionResetError


async def serve(address: str, initialize: Callable[[Any], Any], **options: Any) -> None:
    """Shake hands, and go on for ever, as an engine does."""
    await shake_hands(address, 0, initialize=initialize, handshake=HandshakeOptions(**options))
    await asyncio.Event().wait()


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "encrypted"])
async def test_engine_whose_connections_are_refused_or_go_silent_gets_ready(
    secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HELLO waits for a connection, and READY for the next one if the first goes silent while the engine starts."""
    monkeypatch.setattr(endpoint, "SILENCE_S", 1.0)
    keys = EngineKeys.generate()
    options = StartupOptions(keys=keys, secure=secure)
    async with (
        EngineStartupCoordinator("tcp://127.0.0.1:0", [CoreEngine(0)], addresses(), options=options) as startup,
        Proxy(startup.handshake_address) as proxy,
    ):

        async def initialize(_: object) -> dict[str, Any]:
            # Without keys nobody takes an engine's place: heartbeats let the front end drop the old connection.
            await until(lambda: proxy.pings or secure, "a heartbeat")
            proxy.silence()
            before = proxy.connections
            await until(lambda: proxy.connections == before + 1, "another connection")
            return {"num_gpu_blocks": 7}

        proxy.refuses = True
        async with tasks(serve(proxy.address, initialize, keys=keys, secure=secure)):
            await until(lambda: proxy.connections == 2, "two connections that are refused")
            proxy.refuses = False
            report = await startup.wait(WITHIN_S)
        sent = {"local": True, "headless": False}
        assert report.engines[0].hello == {"status": "HELLO", **sent}
        assert report.engines[0].ready == {"status": "READY", **sent, "num_gpu_blocks": 7}
