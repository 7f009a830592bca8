"""What the tests of startups share: engines as tasks, and engines as processes with a simple manager."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fake_process import FakeProcess

from aioshm.engine import (
    CoreEngine,
    EngineHandshakeMetadata,
    EngineStartupCoordinator,
    EngineZmqAddresses,
    HandshakeOptions,
    StartupOptions,
    StartupReport,
    get_engine_client_zmq_addr,
    shake_hands,
    wait_for_engine_startup,
)

ADDRESSES = ("ipc:///nowhere/in", "ipc:///nowhere/out")
LOADING = "connected", "nothing"
GOOD = "ready", "nothing"
_SCRIPT = Path(__file__).with_name("fake_engine.py")


def addresses() -> EngineZmqAddresses:
    return EngineZmqAddresses([ADDRESSES[0]], [ADDRESSES[1]])


def ready_with(**fields: Any) -> Callable[[EngineHandshakeMetadata], dict[str, Any]]:
    return lambda metadata: fields


@asynccontextmanager
async def tasks(*work: Awaitable[Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run these meanwhile; whoever is not done at the end is cancelled."""
    running = [asyncio.ensure_future(each) for each in work]
    try:
        yield running  # type: ignore[misc]
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def engine(address: str, index: int, **options: Any) -> Awaitable[EngineHandshakeMetadata]:
    initialize = options.pop("initialize", ready_with(num_gpu_blocks=100))
    return shake_hands(address, index, initialize=initialize, handshake=HandshakeOptions(**options))


class FakeManager:
    """The least that a manager may be, besides what is optional."""

    def __init__(self, address: str, *behaviours: tuple[str, str]) -> None:
        self.processes: list[FakeProcess] = []
        self.closes = 0
        self._address = address
        for behaviour in behaviours:
            self.start(*behaviour)

    def start(self, *behaviour: str) -> FakeProcess:
        rank = len(self.processes)
        process = FakeProcess(f"EngineCore_{rank}", str(_SCRIPT), self._address, str(rank), *behaviour)
        self.processes.append(process)
        return process

    def last_lines(self, name: str) -> list[str]:
        process = next(each for each in self.processes if each.name == name)
        return process.said()[1].splitlines() if process.exitcode is not None else []

    async def aclose(self) -> None:
        self.closes += 1
        for process in self.processes:
            process.kill()

    def release(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            if process.sentinel >= 0:
                os.close(process.sentinel)
                process.sentinel = -1


@asynccontextmanager
async def managed(address: str, *behaviours: tuple[str, str]) -> AsyncIterator[FakeManager]:
    manager = FakeManager(address, *behaviours)
    try:
        yield manager
    finally:
        manager.release()


def starting(
    place: str | None = None,
    engines: int | list[CoreEngine] = 1,
    manager: Any = None,
    *,
    where: EngineZmqAddresses | None = None,
    coordinator: Any = None,
    **options: Any,
) -> EngineStartupCoordinator:
    """Create a startup of these engines, or of so many local ones, at a new address if there is no ``place``."""
    if isinstance(engines, int):
        engines = [CoreEngine(rank) for rank in range(engines)]
    return EngineStartupCoordinator(
        place or get_engine_client_zmq_addr(True, ""),
        engines,
        where or addresses(),
        proc_manager=manager,
        coord_process=coordinator,
        options=StartupOptions(**options),
    )


async def ready(place: Any, engines: int | list[CoreEngine] = 1, manager: Any = None, **options: Any) -> StartupReport:
    """Wait in one call until these engines are ready, see `starting`."""
    if isinstance(engines, int):
        engines = [CoreEngine(rank) for rank in range(engines)]
    return await wait_for_engine_startup(place, addresses(), engines, None, proc_manager=manager, **options)
