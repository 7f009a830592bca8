"""A supervisor that stands still at a moment of a restart, to be killed there: ``python killed_supervisor.py MOMENT``.

At that moment it says so, and then either it or the process that starts goes no further.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from aioshm.engine import (
    CoreEngineState,
    DPCoordinator,
    EngineLayout,
    EngineStartupCoordinator,
    EngineSupervisor,
    Restart,
    WorkerGroup,
    die_with_parent,
    run_engine_core,
)
from aioshm.engine.client.link import EngineLink
from aioshm.engine.protocol.handshake import FrontEndHandshake
from aioshm.engine.startup.processes import CoreEngineProcManager
from aioshm.engine.startup.restarts import EngineLife
from aioshm.process.child import _Popen

FOR_EVER = 1_000_000.0
SLOWLY = Restart(backoff_s=FOR_EVER, backoff_max_s=FOR_EVER)


class Worker:
    """A process of the second generation."""

    def __init__(self, rank: int) -> None:
        pass


class SlowWorker(Worker):
    """Warms up, the first one sooner than the second one; says when it is made, and closed."""

    def __init__(self, rank: int) -> None:
        time.sleep(0.5 + rank)
        self._say("made")

    def close(self) -> None:
        """Give back what it holds."""
        self._say("closed")

    def _say(self, what: str) -> None:
        with open(f"{died()}-{what}-{os.getpid()}", "x"):
            pass


class Engine:
    """May have a worker; never finishes a request."""

    def __init__(self, moment: str, again: bool) -> None:
        self._moment = moment
        self._again = again
        self._group: WorkerGroup | None = None

    async def initialize(self, _metadata: object) -> dict[str, Any]:
        """Start the worker."""
        if self._moment in WITH_WORKERS:
            slow = self._moment == "none"
            self._group = await WorkerGroup(SlowWorker if slow else Worker, 1 + slow).__aenter__()
            await asyncio.sleep(slow)
        if self._again and self._moment == "in initialize":
            stop_here()
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
        if self._group is not None:
            await self._group.aclose()


class LockstepEngine(Engine):
    """Needs the others, or says so."""

    def has_unfinished_dp(self, unfinished: bool) -> bool:
        """Agree with them."""
        return unfinished


def serve(moment: str, handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    """Run an engine; one that is started again may go no further somewhere."""
    again = os.path.exists(died())
    if again and moment == "before HELLO":
        stop_here()
    kind = LockstepEngine if moment in OF_GROUPS else Engine
    asyncio.run(run_engine_core(kind(moment, again), handshake_address, dp_rank))


def died() -> str:
    """Return the path of the file that says that a process was killed, and is started again from now on."""
    return os.environ["AIOSHM_TEST_DIED"]


def stop_here() -> NoReturn:
    """Say that the moment has come, and go no further; blocks this thread, with all that it has."""
    os.write(1, b"now\n")
    time.sleep(FOR_EVER)
    raise AssertionError


def before(owner: type, name: str) -> Callable[[], None]:
    """Return what stops at the next call of a method, before it does anything."""
    return lambda: setattr(owner, name, lambda *_, **__: stop_here())


def after(owner: type, name: str) -> Callable[[], None]:
    """Return what stops at the next call of a method when it has done what it does."""

    def patch() -> None:
        method = getattr(owner, name)

        def stopping(*args: Any, **kwargs: Any) -> NoReturn:
            method(*args, **kwargs)
            stop_here()

        setattr(owner, name, stopping)

    return patch


def after_killing_all() -> None:
    """Stop once the engines that a group has left are dead."""

    def stopping(self: EngineLife, state: str) -> NoReturn:
        assert (state, self.exited.done()) == ("waiting", True)
        stop_here()

    EngineLife.enter = stopping  # type: ignore[method-assign]


def nothing() -> None:
    """Stop in the process that starts, which sees to that itself."""


def when_ready() -> None:
    """Stop when an engine has said READY."""
    move = EngineStartupCoordinator._move

    def stopping(self: EngineStartupCoordinator, index: int) -> None:
        if self.handshake.engines[index].state is CoreEngineState.READY:
            stop_here()
        move(self, index)

    EngineStartupCoordinator._move = stopping  # type: ignore[method-assign]


def when_bound() -> None:
    """Stop when a coordinator says where it is bound, and nobody has heard that yet."""

    def stopping(self: DPCoordinator) -> NoReturn:
        self._reported.poll(None)
        stop_here()

    DPCoordinator._await_addresses = stopping  # type: ignore[method-assign]


async def kill(supervisor: EngineSupervisor, hook: Callable[[], None], coordinator: bool = False) -> None:
    """Kill an engine, or the coordinator, and stop at a moment of the restart."""
    hook()
    with open(died(), "x"):
        launch = supervisor.launch
        if coordinator:
            assert launch.coordinator is not None
            launch.coordinator.proc.kill()
        else:
            os.kill(supervisor.engines[-1].pid or 0, signal.SIGKILL)
    await asyncio.sleep(FOR_EVER)


async def in_backoff(supervisor: EngineSupervisor) -> None:
    """Kill an engine twice: the second restart takes its time."""
    os.kill(supervisor.engines[-1].pid or 0, signal.SIGKILL)
    while supervisor.engines[-1].restarts == 0 or supervisor.engines[-1].state != "running":
        await asyncio.sleep(0.001)
    os.kill(supervisor.engines[-1].pid or 0, signal.SIGKILL)
    while supervisor.engines[-1].state != "waiting":
        await asyncio.sleep(0)
    stop_here()


async def in_draining(supervisor: EngineSupervisor) -> None:
    """Take out an engine that does not finish."""
    stream = supervisor.client.submit({"request_id": "endless"}, engine=1)
    going = asyncio.create_task(supervisor.scale(1))
    while supervisor.engines[1].state != "stopping":
        await asyncio.sleep(0)
    stop_here()
    await going
    await stream.aclose()


Work = Callable[[EngineSupervisor], Coroutine[Any, Any, None]]


def engine_at(hook: Callable[[], None]) -> Work:
    """Return what kills an engine, and stops there."""
    return lambda supervisor: kill(supervisor, hook)


def coordinator_at(hook: Callable[[], None]) -> Work:
    """Return what kills the coordinator, and stops there."""
    return lambda supervisor: kill(supervisor, hook, coordinator=True)


async def serve_on(_supervisor: EngineSupervisor) -> None:
    """Go on until it is interrupted."""
    await asyncio.sleep(FOR_EVER)


OF_ENGINES: dict[str, Work] = {
    "before spawn": engine_at(before(CoreEngineProcManager, "start_engine")),
    "before it has its orders": engine_at(before(_Popen, "_exact_sentinel")),
    "in imports": engine_at(nothing),
    "before HELLO": engine_at(nothing),
    "HELLO heard": engine_at(before(FrontEndHandshake, "receive")),
    "in initialize": engine_at(nothing),
    "registered": engine_at(after(EngineLink, "registered")),
    "READY heard": engine_at(when_ready),
    "at backoff": in_backoff,
    "draining": in_draining,
}
OF_COORDINATORS: dict[str, Work] = {
    "coordinator: before spawn": coordinator_at(before(DPCoordinator, "run_again")),
    "coordinator: in imports": coordinator_at(nothing),
    "coordinator: bound": coordinator_at(when_bound),
}
OF_GROUPS: dict[str, Work] = {
    "group: all are dead": engine_at(after_killing_all),
    "group: coordinator in imports": engine_at(nothing),
    "group: one is spawned": engine_at(after(CoreEngineProcManager, "start_engine")),
    "group: one has registered": engine_at(after(EngineLink, "registered")),
}
MOMENTS = OF_ENGINES | OF_COORDINATORS | OF_GROUPS | {"none": serve_on}
WITH_WORKERS = {"in initialize", "draining", "none"}
WITH_COORDINATOR = {"before spawn", "at backoff", *OF_COORDINATORS, *OF_GROUPS}
WITH_TWO_ENGINES = {"draining", "none", *OF_GROUPS}
IN_IMPORTS = {  # which process goes no further there
    "in imports": "EngineCore_0",
    "coordinator: in imports": "DPCoordinator",
    "group: coordinator in imports": "DPCoordinator",
}


async def run(moment: str) -> None:
    """Bring that moment about; SIGTERM cancels this, as servers have it, where a test sends it."""
    if "AIOSHM_TEST_SIGTERM" in os.environ:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with EngineSupervisor(
        serve,
        2 if moment in WITH_TWO_ENGINES else 1,
        args=(moment,),
        restart=SLOWLY if moment == "at backoff" else None,
        lockstep=moment in OF_GROUPS,
        layout=EngineLayout(coordinator=moment in WITH_COORDINATOR),
    ) as supervisor:
        await MOMENTS[moment](supervisor)


if __name__ == "__main__":
    die_with_parent()  # nobody else ends it where the test is killed
    asyncio.run(run(sys.argv[1]))
elif (
    __name__ == "__mp_main__"
    and os.path.exists(died())
    and IN_IMPORTS.get(sys.argv[1]) == multiprocessing.current_process().name
):
    stop_here()
