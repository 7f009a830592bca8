"""What the engines of launches run."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

from served_engine import Engine

from aioshm.engine import HandshakeOptions, run_engine_core


def serve(handshake_address: str, dp_rank: int, local_dp_rank: int, **options: Any) -> None:
    """Serve; ``options`` are of the handshake."""
    handshake = HandshakeOptions(**options)
    asyncio.run(run_engine_core(Engine(), handshake_address, dp_rank, handshake=handshake))


def serve_over_there(handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    """Serve, as if this were another host, without a front end of its own."""
    serve(handshake_address, dp_rank, local_dp_rank, local=False, headless=True)


def fail(dp_rank: int, how: dict[int, str], **others: Any) -> None:
    """Serve, except for ranks that are to fail in some way."""
    kind = how.get(dp_rank)
    if kind == "at once":
        sys.exit(f"rank {dp_rank} has no device")
    if kind == "hangs":
        time.sleep(100)

    class Failing(Engine):
        def initialize(self, metadata: Any) -> dict[str, Any]:
            if kind == "in initialize":
                raise RuntimeError("no weights")
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return super().initialize(metadata)

    asyncio.run(run_engine_core(Failing(), others["handshake_address"], dp_rank))


def serve_api(listen_address: str, sock: Any, args: Any, client_config: dict[str, Any]) -> None:
    """Be an API server that asks its engines once."""
    from aioshm.engine import EngineClient, EngineZmqAddresses

    async def work() -> None:
        addresses = EngineZmqAddresses([client_config["input_address"]], [client_config["output_address"]])
        async with EngineClient(addresses, 2) as client:
            await client.wait_until_ready(30)
            request = {"request_id": f"of {client_config['client_index']}", "tokens": 3}
            assert len([output async for output in client.submit(request)]) == 3

    asyncio.run(work())
