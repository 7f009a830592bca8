"""Serves the model: ``python -m engine_frontend``, in the folder ``examples``. See README.md here."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from typing import Any

import uvicorn
from engine_frontend import engine
from engine_frontend.http import make_app
from engine_frontend.messages import Generation, Progress

from aioshm import EngineDead
from aioshm.engine import (
    CoreEngine,
    CoreEngineProcManager,
    EngineClient,
    EngineStartupCoordinator,
    EngineZmqAddresses,
    get_engine_client_zmq_addr,
)


async def serve(n_engines: int, n_workers: int, host: str, port: int) -> int:
    """Start the engines, serve until told to end, and return an exit code: 1 if an engine has died."""
    addresses = EngineZmqAddresses(
        [get_engine_client_zmq_addr(True, host)], [get_engine_client_zmq_addr(True, host)]
    )
    handshake_address = get_engine_client_zmq_addr(True, host)
    engines = [CoreEngine(index, local=True) for index in range(n_engines)]
    async with EngineClient(addresses, engines, request_type=Generation, output_type=Progress) as client:
        async with EngineStartupCoordinator(
            handshake_address, engines, client.addresses, on_progress=lambda progress: print(progress, flush=True)
        ) as startup:
            startup.proc_manager = manager = CoreEngineProcManager(
                engine.run, n_engines, n_workers=n_workers, handshake_address=handshake_address
            )
            await startup.wait()
        async with manager:
            client.watch(manager)
            await client.wait_until_ready()

            def health() -> dict[str, Any]:
                return describe(manager, client)

            with socket.create_server((host, port)) as listener:  # a port of 0 is the kernel's choice
                host, port = listener.getsockname()[:2]
                server = uvicorn.Server(uvicorn.Config(make_app(client, health), log_level="warning"))
                print(f"serving on http://{host}:{port}", flush=True)
                await server.serve([listener])
            return 0 if health()["status"] == "ok" else 1


def describe(manager: CoreEngineProcManager, client: EngineClient) -> dict[str, Any]:
    """Return how the engines are."""
    ended = manager.finished_procs()
    states = [
        {
            "engine": index,
            "pid": process.pid,
            "workers": client.ready.get(index, {}).get("workers", []),
            "state": "dead" if process.name in ended else "ready",
            "exitcode": ended.get(process.name),
        }
        for index, process in enumerate(manager.processes)
    ]
    return {"status": "failed" if ended else "ok", "engines": states}


def main() -> int:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m engine_frontend", description=__doc__)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="of each engine")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    return asyncio.run(serve(arguments.engines, arguments.workers, arguments.host, arguments.port))


if __name__ == "__main__":
    sys.exit(main())
