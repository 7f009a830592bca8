"""An engine, or a front end, on a host of its own: ``python network_child.py engine|launch|return FRONT_END_ADDRESS``.

A front end prints a line once the engine has answered a request: the first one starts the engine, others find it there.
"""

from __future__ import annotations

import asyncio
import sys

from served_engine import Engine, ask

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
        async for _ in client.submit(ask(role, 1)):
            print("answered", flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
