"""A supervisor that stands still at a moment of a restart, to be killed there: ``python killed_supervisor.py MOMENT``.

At that moment it prints "now", and then either it or the process that starts goes no further.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import time
from typing import Any, NoReturn

from aioshm.engine import DPCoordinator, EngineLayout, EngineSupervisor, WorkerGroup, die_with_parent, run_engine_core

FOR_EVER = 1_000_000.0


class Worker:
    """A process of the second generation; of two, the second one warms up longer."""

    def __init__(self, rank: int, slow: bool) -> None:
        if slow:
            time.sleep(0.5 + rank)
        self._say("made")

    def close(self) -> None:
        self._say("closed")

    def _say(self, what: str) -> None:
        with open(f"{died()}-{what}-{os.getpid()}", "x"):
            pass


class Engine:
    """May have workers; never finishes a request."""

    def __init__(self, moment: str, again: bool) -> None:
        self._moment = moment
        self._again = again
        self._group: WorkerGroup | None = None

    async def initialize(self, _metadata: object) -> dict[str, Any]:
        if self._moment in ("in initialize", "none"):
            slow = self._moment == "none"
            self._group = await WorkerGroup(Worker, 1 + slow, kwargs={"slow": slow}).__aenter__()
            await asyncio.sleep(slow)
        if self._again and self._moment == "in initialize":
            stop_here()
        return {}

    def add_request(self, request: dict[str, Any]) -> None: ...

    def abort_requests(self, ids: list[str]) -> None: ...

    async def step(self) -> None:
        await asyncio.sleep(0.01)

    async def shutdown(self) -> None:
        if self._group is not None:
            await self._group.aclose()


def serve(moment: str, handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    asyncio.run(run_engine_core(Engine(moment, os.path.exists(died())), handshake_address, dp_rank))


def died() -> str:
    """Return the path of the file that exists once a process was killed, which is restarted."""
    return os.environ["AIOSHM_TEST_DIED"]


def stop_here(*_: Any, **__: Any) -> NoReturn:
    """Say that the moment has come, and go no further; blocks this thread, with all that it has."""
    os.write(1, b"now\n")
    time.sleep(FOR_EVER)
    raise AssertionError


async def kill(supervisor: EngineSupervisor, coordinator: bool) -> None:
    """Kill the last engine, or the coordinator."""
    with open(died(), "x"):
        launch = supervisor.launch
        if coordinator:
            assert launch.coordinator is not None
            launch.coordinator.proc.kill()
        else:
            os.kill(supervisor.engines[-1].pid or 0, signal.SIGKILL)
    await asyncio.sleep(FOR_EVER)


MOMENTS = ["in imports", "in initialize", "coordinator: spawned"]


async def run(moment: str) -> None:
    """Bring a moment about; SIGTERM cancels this, as servers have it, where a test sends it."""
    if "AIOSHM_TEST_SIGTERM" in os.environ:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    coordinator = moment == "coordinator: spawned"
    async with EngineSupervisor(
        serve, 2 if moment == "none" else 1, args=(moment,), layout=EngineLayout(coordinator=coordinator)
    ) as supervisor:
        if moment == "none":
            await asyncio.sleep(FOR_EVER)
        if coordinator:
            DPCoordinator._await_addresses = stop_here  # type: ignore[assignment,method-assign]
        await kill(supervisor, coordinator)


if __name__ == "__main__":
    die_with_parent()  # nobody else ends it where the test is killed
    asyncio.run(run(sys.argv[1]))
elif (
    __name__ == "__mp_main__"
    and sys.argv[1] == "in imports"
    and os.path.exists(died())
    and multiprocessing.current_process().name == "EngineCore_0"
):
    stop_here()
