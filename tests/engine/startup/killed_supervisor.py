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
from collections.abc import Callable
from typing import Any, NoReturn

from aioshm.engine import (
    DPCoordinator,
    EngineLayout,
    EngineSupervisor,
    WorkerGroup,
    die_with_parent,
    run_engine_core,
)
from aioshm.engine.startup.processes import CoreEngineProcManager

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
        if moment.startswith("group"):
            self.has_unfinished_dp = lambda unfinished: unfinished

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
    again = os.path.exists(died())
    if again and moment == "before HELLO":
        stop_here()
    asyncio.run(run_engine_core(Engine(moment, again), handshake_address, dp_rank))


def died() -> str:
    """Return the path of the file that exists once a process was killed, which is restarted."""
    return os.environ["AIOSHM_TEST_DIED"]


def stop_here(*_: Any, **__: Any) -> NoReturn:
    """Say that the moment has come, and go no further; blocks this thread, with all that it has."""
    os.write(1, b"now\n")
    time.sleep(FOR_EVER)
    raise AssertionError


def stop_after(owner: type, name: str) -> None:
    """Stop after the next call of a method."""
    method = getattr(owner, name)

    def stopping(*args: Any, **kwargs: Any) -> NoReturn:
        method(*args, **kwargs)
        stop_here()

    setattr(owner, name, stopping)


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


# What is patched before a process is killed; None: the process that starts stops by itself.
MOMENTS: dict[str, Callable[[], object] | None] = {
    "in imports": None,
    "before HELLO": None,
    "in initialize": None,
    "coordinator: in imports": None,
    "coordinator: spawned": lambda: setattr(DPCoordinator, "_await_addresses", stop_here),
    "group: one is spawned": lambda: stop_after(CoreEngineProcManager, "start_engine"),
}
IN_IMPORTS = {"in imports": "EngineCore_0", "coordinator: in imports": "DPCoordinator"}  # which process stops there


async def run(moment: str) -> None:
    """Bring a moment about; SIGTERM cancels this, as servers have it, where a test sends it."""
    if "AIOSHM_TEST_SIGTERM" in os.environ:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    lockstep = moment.startswith("group")
    coordinator = moment.startswith("coordinator")
    async with EngineSupervisor(
        serve,
        2 if lockstep or moment == "none" else 1,
        args=(moment,),
        lockstep=lockstep,
        layout=EngineLayout(coordinator=lockstep or coordinator),
    ) as supervisor:
        if moment == "none":
            await asyncio.sleep(FOR_EVER)
        patch = MOMENTS[moment]
        if patch is not None:
            patch()
        await kill(supervisor, coordinator)


if __name__ == "__main__":
    die_with_parent()  # nobody else ends it where the test is killed
    asyncio.run(run(sys.argv[1]))
elif (
    __name__ == "__mp_main__"
    and os.path.exists(died())
    and IN_IMPORTS.get(sys.argv[1]) == multiprocessing.current_process().name
):
    stop_here()
