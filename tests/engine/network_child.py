"""An engine, or a front end, on a host of its own: ``python network_child.py engine|launch|return FRONT_END_ADDRESS``.

A front end prints a line once the engine has answered a request: the first one starts the engine, others find it there.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from aioshm.engine import (
    ClientOptions,
    CoreEngine,
    EngineClient,
    EngineKeys,
    EngineStartupCoordinator,
    EngineZmqAddresses,
    HandshakeOptions,
    StartupOptions,
    run_engine_core,
)

KEYS = EngineKeys(bytes(32))


class Engine:
    """Answers each request once."""

    def __init__(self) -> None:
        self._requests: list[str] = []

    def initialize(self, _metadata: object) -> dict[str, Any]:
        return {"num_gpu_blocks": 5}

    def add_request(self, request: Any) -> None:
        self._requests.append(request["request_id"])

    def abort_requests(self, ids: list[str]) -> None: ...

    def step(self) -> list[dict[str, Any]]:
        outputs = [{"request_id": request_id, "finish_reason": "stop"} for request_id in self._requests]
        self._requests.clear()
        return outputs

    def shutdown(self) -> None: ...


async def main(role: str, host: str) -> None:
    addresses = EngineZmqAddresses([f"tcp://{host}:5561"], [f"tcp://{host}:5562"])
    handshake = f"tcp://{host}:5563"
    if role == "engine":
        await run_engine_core(Engine(), handshake, 0, handshake=HandshakeOptions(local=False, headless=True, keys=KEYS))
        return
    async with EngineClient(addresses, 1, options=ClientOptions(keys=KEYS)) as client:
        if role == "launch":
            engines = [CoreEngine(0, local=False)]
            async with EngineStartupCoordinator(
                handshake, engines, addresses, options=StartupOptions(keys=KEYS)
            ) as startup:
                print("bound", flush=True)
                await startup.wait(60)
        await client.wait_until_ready(60)
        async for _ in client.submit({"request_id": role}):
            print("answered", flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
