"""Engines for plain threads: the client and the launch without ``await``.

    from aioshm.engine.blocking import launch_core_engines

    with launch_core_engines(serve, 2) as launch:
        for output in launch.client.submit(request):
            ...

The client runs on the background loop of the process. It notices the death of an engine also while there is no call,
and any number of threads may wait for outputs at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aioshm.engine.client.blocking import EngineClient, OutputStream
from aioshm.engine.dp.coordinator import DPCoordinator
from aioshm.engine.protocol.addresses import EngineZmqAddresses, StartupReport
from aioshm.engine.ray.actor import EngineActor
from aioshm.engine.ray.manager import CoreEngineActorManager
from aioshm.engine.startup import launch as launching
from aioshm.engine.startup.processes import CoreEngineProcManager
from aioshm.process.child import Child
from aioshm.process.loop_thread import LoopThread, loop_for
from aioshm.process.watch import WatchedProcess

__all__ = ["CoreEngineLaunch", "EngineClient", "OutputStream", "launch_core_engines"]


class CoreEngineLaunch:
    """The engines and their surroundings; see `aioshm.engine.CoreEngineLaunch`.

    Attributes:
        awaited: The launch on the loop of the thread.
        engine_manager: The engines of this host, or Ray's actors.
        coordinator: The data-parallel coordinator, if there is one.
        processes: The engines that were started here: processes of this host, or Ray's actors.
        addresses: The addresses for engines, and for API servers.
        handshake_address: Where engines say HELLO.
    """

    def __init__(self, launch: launching.CoreEngineLaunch, host: LoopThread) -> None:
        self.awaited = launch
        self.engine_manager: CoreEngineProcManager | CoreEngineActorManager = launch.engine_manager
        self.coordinator: DPCoordinator | None = launch.coordinator
        self.processes: Sequence[Child | EngineActor] = launch.processes
        self.addresses: EngineZmqAddresses = launch.addresses
        self.handshake_address: str = launch.handshake_address
        self._host = host
        self._client = EngineClient.around(launch.client, host) if launch.has_client else None

    @property
    def report(self) -> StartupReport | None:
        """The answers of the engines; None until all are ready."""
        return self.awaited.report

    @property
    def client(self) -> EngineClient:
        """The client of these engines.

        Raises:
            RoleError: API servers have the clients, or there is no engine to have one for.
        """
        if self._client is None:
            _ = self.awaited.client
            raise AssertionError
        return self._client

    def wait_until_ready(
        self, timeout: float | None = None, *, watched_processes: Iterable[WatchedProcess] = ()
    ) -> StartupReport:
        """Wait until every engine is ready; needed after ``wait=False`` only.

        Args:
            timeout: Seconds to wait; None waits for as long as there is progress.
            watched_processes: More processes without which there is nothing to start for.
        """
        launch = self.awaited
        launch.watched_processes = (*launch.watched_processes, *watched_processes)
        return self._host.run(lambda: launch.wait_until_ready(timeout))


@contextmanager
def launch_core_engines(
    target_fn: Callable[..., object],
    engine_count: int = 1,
    local_engine_count: int | None = None,
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    **options: Any,
) -> Iterator[CoreEngineLaunch]:
    """Start coordinator and engines, shake hands with them, and have a client ready; a context manager.

    Ctrl-C while engines start stops them; it reaches this process only, not the engines.

    Args:
        target_fn: What each engine's process runs.
        engine_count: How many engines there are in all.
        local_engine_count: How many of them run on this host; None: all.
        loop_factory: Makes an event loop for a thread of the client's own; None: the background loop of the process.
        options: Every other argument of `aioshm.engine.launch_core_engines`, which says what is raised, too.
            ``on_progress`` is called in the thread.

    Yields:
        What was started.
    """
    host = loop_for("a launch of engines", loop_factory)
    try:
        manager = launching.launch_core_engines(target_fn, engine_count, local_engine_count, **options)
        launch = host.run(manager.__aenter__)
        try:
            yield CoreEngineLaunch(launch, host)
        finally:
            host.run(lambda: manager.__aexit__(None, None, None))
    finally:
        host.end()
