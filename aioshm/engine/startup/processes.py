"""The engine processes of this host, and all processes of a startup."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any, Self

from aioshm.arguments import check_int, check_plain
from aioshm.engine.client.liveness import engine_of
from aioshm.engine.protocol.addresses import CoreEngine, StartupProgress, engine_index
from aioshm.engine.security.keys import EngineKeys, as_attributes, keys_to_hand_over
from aioshm.errors import EngineStartupError, HandshakeError
from aioshm.process.background import give_back
from aioshm.process.child import Child
from aioshm.process.manager import Job, ProcessManager
from aioshm.process.placement import Placement, check_placement, place_of
from aioshm.process.proc import HUNG_STATES, process_state
from aioshm.process.stopping import SHUTDOWN_TIMEOUT_S, ashutdown
from aioshm.process.watch import ProcessExit, WatchedProcess

STOP_S = 1.0
"""How long the processes of a failed startup may take to exit: they have nothing to finish yet."""

logger: logging.Logger = logging.getLogger("aioshm.engine")


class CoreEngineProcManager(ProcessManager):
    """The engine processes of this machine, named ``EngineCore_0`` and so on by their global index.

    Each runs ``target_fn(*args, **kwargs, dp_rank=global index, local_dp_rank=local index)``. The constructor starts
    the processes, and `wait_for_engine_startup` reports their progress. It blocks for some milliseconds for each
    process, longer to pickle arguments of more than a few MiB, and never waits for a process; it may run in a thread.
    `start` lets the loop run in between.

    Args:
        target_fn: The target of each process.
        local_engine_count: The number of engines of this machine; 0 if all engines are on other hosts.
        start_index: The first global index.
        local_start_index: The first index on this machine.
        args: Positional arguments of the target.
        shutdown_timeout: See `ProcessManager`.
        capture_stderr: See `ProcessManager`.
        keys: Each process starts with the keys of its engine, for `run_engine_core`; None: from the keys of this
            process.
        placement: Environment, CPUs and NUMA node of each engine, by its global index; see `Placement`.
        kwargs: Every other keyword argument of the target.

    Attributes:
        max_engines: None: `start_engine` starts any number of engines.
        placement: As given.

    Raises:
        TypeError, ValueError: An argument is invalid; the text names it.
    """

    max_engines: int | None = None

    def __init__(
        self,
        target_fn: Callable[..., object],
        local_engine_count: int,
        start_index: int = 0,
        local_start_index: int = 0,
        *,
        args: Sequence[Any] = (),
        shutdown_timeout: float = SHUTDOWN_TIMEOUT_S,
        capture_stderr: bool = True,
        keys: EngineKeys | None = None,
        placement: Placement | None = None,
        **kwargs: Any,
    ) -> None:
        check_plain("target_fn", target_fn)
        check_int("local_start_index", local_start_index, minimum=0)
        ranks = _ranks(local_engine_count, start_index, placement)
        self._args = args
        self._kwargs = kwargs
        self._keys = keys
        self.placement: Placement | None = placement
        self._offset = local_start_index - start_index
        self._started: dict[int, int] = {}  # starts so far, by rank
        super().__init__(target_fn, (), shutdown_timeout=shutdown_timeout, capture_stderr=capture_stderr)
        try:
            for rank in ranks:
                self.start_engine(rank)
        except BaseException:
            self.shutdown(timeout=0)
            raise

    @classmethod
    async def start(
        cls, target_fn: Callable[..., object], local_engine_count: int, start_index: int = 0, **options: Any
    ) -> Self:
        """Create a manager, and let the loop run after the start of each engine. Cancelling this leaves nothing.

        Args:
            target_fn: The target of each process.
            local_engine_count: The number of engines of this machine.
            start_index: The first global index.
            options: Further arguments of the class.
        """
        ranks = _ranks(local_engine_count, start_index, options.get("placement"))
        manager = cls(target_fn, 0, start_index, **options)
        try:
            for rank in ranks:
                # Not in a thread: the kernel ends only the children of this process' main thread with it, see
                # `die_with_parent`.
                manager.start_engine(rank)
                await asyncio.sleep(0)
        except BaseException:
            manager._shutdown_timeout = 0
            await manager.aclose()
            raise
        return manager

    def start_engine(self, rank: int) -> Child:
        """Start one more engine, or restart one that has exited, and return its process; see `start_more`.

        Each process of an engine gets keys of its own, see `EngineKeys`.

        Raises:
            RoleError: The manager is closed, or that engine still runs.
            Exception: The process could not be started.
        """
        incarnation = self.next_incarnation(rank)
        job = Job(
            engine_name(rank),
            self._args,
            self._kwargs | {"dp_rank": rank, "local_dp_rank": rank + self._offset},
            as_attributes(keys_to_hand_over(self._keys, rank, incarnation)),
            place_of(self.placement, rank),
        )
        if any(process.name == job.name for process in self.processes):
            child = self.start_again(job.name, job)
        else:
            child = self.start_more(job)
        self._started[rank] = incarnation + 1
        return child

    def next_incarnation(self, rank: int) -> int:
        """Return the incarnation of the next process of this rank."""
        return self._started.get(rank, 0)

    def is_local(self, rank: int) -> bool:
        """Return whether an engine runs on this host: always."""
        return True

    async def stop_engine(self, rank: int) -> None:
        """Stop an engine, see `stop`.

        Raises:
            ValueError: There is no such engine.
        """
        await self.stop(engine_name(rank))


def _ranks(count: int, first: int, placement: Placement | None) -> range:
    check_int("local_engine_count", count, minimum=0)
    check_int("start_index", first, minimum=0)
    ranks = range(first, first + count)
    check_placement(placement, ranks)
    return ranks


def engine_name(rank: int) -> str:
    """Return the process name of an engine."""
    return f"EngineCore_{rank}"


def local_engines(manager: object) -> dict[int, WatchedProcess]:
    """Return the known engine processes of this host, by rank."""
    found = {}
    for process in getattr(manager, "processes", ()):
        rank = engine_index(process.name)
        if rank is not None and not hasattr(process, "host"):
            found[rank] = process
    return found


def startup_failure(
    cause: str | HandshakeError,
    exits: Iterable[ProcessExit],
    progress: StartupProgress,
    engines: Mapping[int, CoreEngine],
    manager: Any,
) -> EngineStartupError:
    """Return the error of a failed startup."""
    causes = []
    failed: dict[str, int | None] = {}
    names = []  # of engines whose last lines are shown
    for each in exits:
        phase = ""
        rank = engine_of(each)
        if rank is not None:
            names.append(each.name)
            if rank in engines:
                phase = engines[rank].state.value
        causes.append(replace(each, last_line="").describe(phase))
        failed[each.name] = each.exitcode
    processes = local_engines(manager)
    for engine in progress.waiting:
        process = processes.get(engine.index)
        if process is not None and process.name not in failed:
            names.append(process.name)
            state = process_state(process.pid or 0)
            if state in HUNG_STATES:
                causes.append(f"{process.name} (pid {process.pid}) is {state}")
    reasons = "; ".join(part for part in (str(cause), ", ".join(causes)) if part)
    lines = [f"engine startup failed: {reasons} ({progress})"]
    for name in names if hasattr(manager, "last_lines") else ():
        tail = manager.last_lines(name)
        if tail:
            lines.append(f"last lines of {name}'s stderr:")
            lines += [f"  {line}" for line in tail]
    text = "\n".join(lines)
    if isinstance(cause, HandshakeError):
        return HandshakeError(text, engine=cause.engine, state=cause.state, expected=cause.expected, failed=failed)
    return EngineStartupError(text, failed=failed)


async def stop_startup(manager: object, coordinator: object) -> None:
    """Stop the engines of a failed startup, and the coordinator if it is a process of ``multiprocessing``."""
    stopping = [_stop_manager(manager)]
    if isinstance(coordinator, BaseProcess):
        stopping.append(ashutdown([coordinator], STOP_S))
    for result in await asyncio.gather(*stopping, return_exceptions=True):
        if isinstance(result, Exception):
            logger.error("while engines were stopped: %s", result, exc_info=result)


async def _stop_manager(manager: Any) -> None:
    if isinstance(manager, ProcessManager):
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):  # a cancelled `aclose` kills and waits
                await manager.aclose()
    else:
        await close_any(manager)


async def close_any(manager: Any) -> None:
    """Close a manager by ``aclose``, or else by ``close``, which may block; one without either is left alone."""
    if hasattr(manager, "aclose"):
        await manager.aclose()
    elif hasattr(manager, "close"):
        await give_back(manager.close)
