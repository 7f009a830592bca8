"""Starts the engines, serves, and tells how they are."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from aioshm.engine import CoreEngineLaunch, EngineClient, launch_core_engines
from aioshm.errors import EngineDead, EngineStartupError
from engine_frontend import engine
from engine_frontend.http import make_app
from engine_frontend.messages import Generation, Progress

STATUS_WITHIN_S = 2.0

logger = logging.getLogger("engine_frontend")


async def serve(n_engines: int, n_workers: int, host: str, port: int) -> int:
    """Start the engines, serve until told to end, and return an exit code: 1 if an engine has died."""
    async with launch_core_engines(
        engine.run,
        n_engines,
        kwargs={"n_workers": n_workers},
        coordinator=False,  # the one client here knows what there is to do
        request_type=Generation,
        output_type=Progress,
        on_progress=lambda progress: print(progress, flush=True),
    ) as launch:
        telling = asyncio.create_task(tell_first_death(launch))
        try:
            await serve_http(launch, host, port)
        finally:
            telling.cancel()
        return 1 if launch.engine_manager.finished_procs() else 0


async def tell_first_death(launch: CoreEngineLaunch) -> None:
    """Log the end of an engine."""
    for name, code in (await launch.engine_manager.join_first()).items():
        logger.error("%s has ended with exit code %s: no request can be served any more", name, code)


async def serve_http(launch: CoreEngineLaunch, host: str, port: int) -> None:
    """Serve until a signal says that it is enough."""

    async def health() -> dict[str, Any]:
        return await describe(launch)

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:  # a port of 0 is the kernel's choice
        config = uvicorn.Config(make_app(launch.client, health), log_level="warning", timeout_graceful_shutdown=5)
        await _Server(config).serve([listener])


class _Server(uvicorn.Server):
    """Takes the signals from the loop; uvicorn itself raises them once more when it has ended."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            print(f"serving on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)


async def describe(launch: CoreEngineLaunch) -> dict[str, Any]:
    """Return how the engines are, and what they do."""
    client = launch.client
    statuses = await asyncio.gather(*(_status(client, index) for index in client.ranks))
    ended = launch.engine_manager.finished_procs()
    engines = []
    for index, (process, status) in enumerate(zip(launch.processes, statuses, strict=True)):
        engine = {"engine": index, "pid": process.pid, "workers": client.ready[index]["workers"], **status}
        if process.name in ended:
            engine |= {"state": "dead", "exitcode": ended[process.name]}
        engines.append(engine)
    well = all(engine["state"] == "alive" for engine in engines)
    return {"status": "ok" if well else "failed", "engines": engines}


async def _status(client: EngineClient, index: int) -> dict[str, Any]:
    try:
        async with asyncio.timeout(STATUS_WITHIN_S):
            return {"state": "alive", **await client.call("status", engine=index)}
    except EngineDead:  # one is, and so this one is of no use any more: see README.md
        return {"state": "given up"}
    except TimeoutError:
        return {"state": "silent"}


def main() -> int:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m engine_frontend", description="Serves a small model.")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="of each engine")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    try:
        return asyncio.run(serve(arguments.engines, arguments.workers, arguments.host, arguments.port))
    except EngineStartupError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
