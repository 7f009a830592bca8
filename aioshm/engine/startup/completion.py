"""Waits until a front end is done, or the first of its processes fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from aioshm.engine.startup.api_servers import APIServerProcessManager, all_succeed
from aioshm.process.background import in_thread
from aioshm.process.watch import WatchedProcess

_log = logging.getLogger("aioshm.engine")


class Stoppable(Protocol):
    """Owns processes or actors, and stops them."""

    def close(self) -> None:
        """Stop everything; may block. An ``aclose`` is awaited instead, if there is one."""


async def wait_for_completion_or_failure(
    api_server_manager: APIServerProcessManager,
    engine_manager: Stoppable | None = None,
    coordinator: Stoppable | None = None,
) -> None:
    """Wait until all API servers are done, or the first process of any kind has failed; then stop everything.

    An API server that its manager restarts has not failed.

    Everything is stopped in every case, also when this is cancelled, as by Ctrl-C under `asyncio.run`. A cancellation
    while everything is being stopped kills the remaining processes.

    Args:
        api_server_manager: The API servers.
        engine_manager: The engines: a manager of processes, or another object, such as an `EngineSupervisor`, whose
            ``join_first()`` raises when an engine fails.
        coordinator: The DP coordinator, with its process as ``proc``.

    Raises:
        ProcessDied: A process exited with a code other than 0.
        EngineDead: An engine that is no process of the manager has failed.
    """
    others = [manager for manager in (engine_manager, coordinator) if manager is not None]
    completion = asyncio.ensure_future(api_server_manager.wait())
    tasks = [completion, *(asyncio.ensure_future(_fail_with(other)) for other in others)]
    try:
        left = set(tasks)
        while not completion.done():
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        stopping = map(_stop, [api_server_manager, *others])
        outcomes = await asyncio.gather(*stopping, return_exceptions=True)
        await asyncio.gather(*tasks, return_exceptions=True)
        failures = [error for error in outcomes if error is not None]
        for error in failures:
            _log.error("could not stop everything: %s", error)
    if failures:
        raise failures[0]


async def _fail_with(manager: Any) -> None:
    """Raise if a process or actor of this manager fails."""
    processes = _processes(manager)
    if processes:
        await all_succeed(processes)
    elif hasattr(manager, "join_first"):
        await manager.join_first()


def _processes(manager: Any) -> Sequence[WatchedProcess]:
    if hasattr(manager, "processes"):
        return list(manager.processes)
    return [manager.proc] if hasattr(manager, "proc") else []


async def _stop(manager: Any) -> None:
    if hasattr(manager, "aclose"):
        await manager.aclose()
    else:
        await in_thread(manager.close)
