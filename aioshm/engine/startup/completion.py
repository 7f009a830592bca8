"""Waits until a front end is done, or the first of its processes fails."""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from aioshm.engine.startup.api_servers import APIServerProcessManager
from aioshm.errors import ProcessDied
from aioshm.process.background import in_thread
from aioshm.process.watch import ProcessWatch, WatchedProcess

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

    Everything is stopped in every case, also when this is cancelled, which then continues as a cancellation. Ctrl-C,
    unless the program handles SIGINT, stops everything and returns; a second one cancels. A cancellation while
    everything is being stopped kills the remaining processes.

    Args:
        api_server_manager: The API servers.
        engine_manager: The engines: a manager of processes, or another object, such as an `EngineSupervisor`, whose
            ``join_first()`` raises when an engine fails.
        coordinator: The DP coordinator, with its process as ``proc``.

    Raises:
        ProcessDied: A process exited with a code other than 0.
        EngineDead: An engine that is no process of the manager has failed.
    """
    managers = [manager for manager in (api_server_manager, engine_manager, coordinator) if manager is not None]
    try:
        await _until_done(api_server_manager, engine_manager, coordinator)
    finally:
        failures = [error for error in await asyncio.gather(*map(_stop, managers), return_exceptions=True) if error]
        for error in failures:
            _log.error("could not stop everything: %s", error)
    if failures:
        raise failures[0]


async def _until_done(servers: APIServerProcessManager, *others: Stoppable | None) -> None:
    processes = [process for other in others for process in _processes(other)]
    apart: list[Any] = [other for other in others if hasattr(other, "join_first") and not _processes(other)]
    with _ctrl_c() as pressed, ProcessWatch(processes) as watch:
        if servers.restarts:
            waiting = [servers.wait(), _all_exit(watch, [process.pid for process in processes])]
        else:  # one watch for all, so that the error names the first failure
            watch.add(servers.processes)
            waiting = [_all_exit(watch, [process.pid for process in servers.processes])]
        waiting += [other.join_first() for other in apart]
        try:
            await (_first_and_no_failure(waiting) if len(waiting) > 1 else waiting[0])
        except asyncio.CancelledError:
            if not pressed():
                raise
            _log.info("interrupted: stopping everything")


async def _all_exit(watch: ProcessWatch, pids: Iterable[int | None]) -> None:
    """Wait until these processes have exited, or all; raise if one of any kind has failed."""
    left = set(pids)
    while left and watch.running:
        for found in await watch.next():
            if found.exitcode != 0:
                raise ProcessDied(found.name, found.pid, found.exitcode)
            left.discard(found.pid)


async def _first_and_no_failure(waiting: Sequence[Awaitable[object]]) -> None:
    """Wait until the first one is done, unless another one raises before that."""
    first, *_ = tasks = [asyncio.ensure_future(each) for each in waiting]
    try:
        left = set(tasks)
        while not first.done():
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        first.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _processes(manager: Any) -> Sequence[WatchedProcess]:
    if hasattr(manager, "processes"):
        return list(manager.processes)
    return [manager.proc] if hasattr(manager, "proc") else []


async def _stop(manager: Any) -> None:
    if hasattr(manager, "aclose"):
        await manager.aclose()
    else:
        await in_thread(manager.close)


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Make Ctrl-C cancel this task within the block, unless the program handles SIGINT itself."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not _nobodys(before):
        yield lambda: False
        return
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    waiting = True
    pressed = False

    def cancel() -> None:
        nonlocal pressed
        if waiting and not pressed:
            pressed = True
            task.cancel()

    def only_that() -> bool:
        return pressed and task.uncancel() == 0

    # Not signal.signal: its handlers are called late if the signal comes just before the loop sleeps.
    loop.add_signal_handler(signal.SIGINT, cancel)
    try:
        yield only_that
    finally:
        waiting = False
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


def _nobodys(handler: object) -> bool:
    if isinstance(handler, functools.partial):  # asyncio.Runner's handler, which would cancel the main task
        return isinstance(getattr(handler.func, "__self__", None), asyncio.Runner)
    return handler is signal.default_int_handler
