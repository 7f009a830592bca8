"""A supervisor that is killed while an engine of its comes back: ``python killed_supervisor.py MOMENT``; says when."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

from aioshm.engine import EngineSupervisor, Restart, WorkerGroup, run_engine_core

FOR_EVER = 1_000_000.0


class Worker:
    """A process of the second generation."""

    def __init__(self, rank: int) -> None:
        pass


class Engine:
    """Has a worker; never finishes a request."""

    def __init__(self, hangs: bool) -> None:
        self._hangs = hangs

    async def initialize(self, _metadata: object) -> dict[str, Any]:
        """Start the worker."""
        self._group = await WorkerGroup(Worker, 1).__aenter__()
        if self._hangs:
            now()
            await asyncio.sleep(FOR_EVER)
        return {}

    def add_request(self, request: dict[str, Any]) -> None:
        """Take it."""

    def abort_requests(self, ids: list[str]) -> None:
        """Take it for aborted."""

    async def step(self) -> None:
        """Bring nothing."""
        await asyncio.sleep(0.01)

    async def shutdown(self) -> None:
        """Stop the worker."""
        await self._group.aclose()


def serve(moment: str, handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    """Run an engine; the second process of rank 1 may hang somewhere."""
    again = dp_rank == 1 and os.path.exists(died())
    if again and moment == "before HELLO":
        now()
        time.sleep(FOR_EVER)
    asyncio.run(run_engine_core(Engine(again and moment == "in initialize"), handshake_address, dp_rank))


def died() -> str:
    """Return the path of the file that says that rank 1 has died."""
    return os.environ["AIOSHM_TEST_DIED"]


def now() -> None:
    """Say that the moment has come."""
    os.write(1, b"now\n")


async def run(moment: str) -> None:
    """Bring that moment about."""
    slowly = Restart(backoff_s=FOR_EVER, backoff_max_s=FOR_EVER)
    async with EngineSupervisor(
        serve, 2, args=(moment,), restart=slowly if moment == "at backoff" else None
    ) as engines:
        if moment == "draining":
            stream = engines.client.submit({"request_id": "endless"}, engine=1)
            going = asyncio.create_task(engines.scale(1))
            while engines.engines[1].state != "stopping":
                await asyncio.sleep(0)
            now()
            await going
            await stream.aclose()
        with open(died(), "x"):
            os.kill(engines.engines[1].pid or 0, signal.SIGKILL)
        if moment == "at backoff":
            while engines.engines[1].restarts == 0 or engines.engines[1].state != "running":
                await asyncio.sleep(0.001)
            os.kill(engines.engines[1].pid or 0, signal.SIGKILL)
            while engines.engines[1].state != "waiting":
                await asyncio.sleep(0)
            now()
        elif moment.endswith(" ms"):
            await asyncio.sleep(float(moment.removesuffix(" ms")) / 1000)
            now()
        elif moment == "before spawn":
            while engines.engines[1].state == "running":
                await asyncio.sleep(0)
            now()
        await asyncio.sleep(FOR_EVER)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))
