"""Handshakes whose connection is refused, or goes silent, before READY."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from proxy import Proxy
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
            proxy.stall()
            before = proxy.connections
            await until(lambda: proxy.connections == before + 1, "another connection")
            proxy.resume()
            return {"num_gpu_blocks": 7}

        proxy.refusing = True
        async with tasks(serve(proxy.endpoint, initialize, keys=keys, secure=secure)):
            await until(lambda: proxy.refused == 2, "two connections that are refused")
            proxy.refusing = False
            report = await startup.wait(WITHIN_S)
        sent = {"local": True, "headless": False}
        assert report.engines[0].hello == {"status": "HELLO", **sent}
        assert report.engines[0].ready == {"status": "READY", **sent, "num_gpu_blocks": 7}
