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

from aioshm.engine import ClientOptions, EngineClient, EngineLayout, EngineSupervisor, RankInfo, StartupOptions
from aioshm.errors import EngineDead, EngineStartupError
from engine_frontend import engine
from engine_frontend.http import make_app
from engine_frontend.messages import Generation, Progress

STATUS_WITHIN_S = 2.0

logger = logging.getLogger("engine_frontend")


async def serve(n_engines: int, n_workers: int, host: str, port: int) -> int:
    """Start the engines, serve until told to end, and return an exit code: 1 if the engines were in a crash loop."""
    async with EngineSupervisor(
        engine.run,
        n_engines,
        kwargs={"n_workers": n_workers},
        resubmit="unstarted",
        on_change=tell,
        layout=EngineLayout(coordinator=False),
        client=ClientOptions(request_type=Generation, output_type=Progress),
        startup=StartupOptions(on_progress=lambda progress: print(progress, flush=True)),
    ) as supervisor:
        looping = asyncio.create_task(crash_loop(supervisor))
        try:
            await serve_http(supervisor, host, port)
        finally:
            looping.cancel()
        return int(looping.done() and not looping.cancelled())


def tell(info: RankInfo) -> None:
    """Log what has become of an engine."""
    why = f": {info.cause}" if info.state == "waiting" else ""
    logger.info("engine %d (pid %s) is %s%s", info.rank, info.pid, info.state, why)


async def crash_loop(supervisor: EngineSupervisor) -> None:
    """Wait until the engines cannot be started again any more, and log why."""
    try:
        await supervisor.wait()
    except EngineDead as error:
        logger.error("%s: no request can be served any more", error)


async def serve_http(supervisor: EngineSupervisor, host: str, port: int) -> None:
    """Serve until a signal says that it is enough."""

    async def health() -> dict[str, Any]:
        return await describe(supervisor)

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:  # a port of 0 is the kernel's choice
        app = make_app(supervisor.client, health, supervisor.scale)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
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


async def describe(supervisor: EngineSupervisor) -> dict[str, Any]:
    """Return how the engines are, and what they do."""
    client, engines = supervisor.client, []
    statuses = await asyncio.gather(*(_status(client, info) for info in supervisor.engines))
    for info, status in zip(supervisor.engines, statuses, strict=False):
        known = {"pid": info.pid, "restarts": info.restarts, "cause": info.cause, "where": info.where}
        engines.append({"engine": info.rank, **known, **status})
    serving = sum(engine["state"] == "running" for engine in engines)
    well = "ok" if serving == len(engines) else "degraded" if serving else "failed"
    return {"status": well, "in_flight": client.in_flight, "engines": engines}


async def _status(client: EngineClient, info: RankInfo) -> dict[str, Any]:
    if info.state != "running":
        return {"state": info.state, "workers": []}
    try:
        async with asyncio.timeout(STATUS_WITHIN_S):
            status = await client.call("status", engine=info.rank)
            return {"state": info.state, "workers": client.ready[info.rank]["workers"], **status}
    except (EngineDead, KeyError):
        return {"state": "dead", "workers": []}
    except TimeoutError:
        return {"state": "silent", "workers": []}


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
