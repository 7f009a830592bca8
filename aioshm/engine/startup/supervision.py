"""The processes of a startup: watched, named when one fails, and stopped with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Any

from aioshm.engine.client.liveness import engine_of
from aioshm.engine.protocol.addresses import CoreEngine
from aioshm.engine.protocol.progress import PHASES, StartupProgress, describe_failure, engine_index
from aioshm.errors import EngineStartupError, HandshakeError
from aioshm.process.background import completed, in_thread
from aioshm.process.manager import ProcessManager
from aioshm.process.stopping import ashutdown
from aioshm.process.watch import (
    SUSPECT_STATES,
    ProcessExit,
    ProcessWatch,
    WatchedManager,
    WatchedProcess,
    process_state,
)

STOP_S = 1.0
"""How long processes may take to exit when asked to: they have nothing yet that they would have to finish."""

_TAILS = 8  # the error has the last lines of at most so many processes

logger: logging.Logger = logging.getLogger("aioshm.engine")


class Supervision:
    """Watches the processes of a startup, and describes their failures."""

    def __init__(self, watched: Iterable[WatchedProcess], on_exit: Callable[[], None]) -> None:
        self._watched = tuple(watched)
        self._on_exit = on_exit
        self._manager: WatchedManager | None = None
        self._coordinator: WatchedProcess | None = None
        self._watch: ProcessWatch | None = None
        self._stopping: asyncio.Task[None] | None = None

    def watch_also(self, processes: Iterable[WatchedProcess]) -> None:
        """Watch more processes, which are not stopped."""
        self._watched += tuple(processes)

    def watch(self, manager: WatchedManager | None, coordinator: WatchedProcess | None) -> None:
        """Watch the engines and the coordinator, too. Idempotent."""
        if self._watch is None:
            self._watch = ProcessWatch(on_exit=self._on_exit)
        if manager is not None and manager is not self._manager:
            self._watch.add_manager(manager)
        self._manager = manager
        self._coordinator = coordinator
        self._watch.add(self._watched if coordinator is None else (*self._watched, coordinator))

    def engines(self) -> dict[int, WatchedProcess]:
        """Return the known engine processes of this host, by rank."""
        here = [process for process in getattr(self._manager, "processes", ()) if not hasattr(process, "host")]
        ranks = ((engine_index(process.name), process) for process in here)
        return {rank: process for rank, process in ranks if rank is not None}

    def exited(self) -> list[ProcessExit]:
        """Return the processes that have exited."""
        return self._watch.exited() if self._watch is not None else []

    def failure(
        self, cause: str, refusal: HandshakeError | None, progress: StartupProgress, engines: Mapping[int, CoreEngine]
    ) -> EngineStartupError:
        """Return the error of a failed startup."""
        exits = self.exited()
        processes = self.engines()
        said = []
        for each in exits:
            rank = engine_of(each)
            engine = None if rank is None else engines.get(rank)
            found = replace(each, last_line="")  # the last lines come below
            said.append(found.describe("" if engine is None else PHASES[engine.state]))
        failed = {each.name: each.exitcode for each in exits}
        late = [processes[engine.index] for engine in progress.waiting if engine.index in processes]
        alive = [process for process in late if process.name not in failed]
        for process in alive:
            state = process_state(process.pid or 0)
            if state in SUSPECT_STATES:
                said.append(f"{process.name} (pid {process.pid}) is {state}")
        names = [each.name for each in exits if engine_of(each) is not None] + [process.name for process in alive]
        text = describe_failure(cause, said, progress, self._last_lines(names))
        if refusal is None:
            return EngineStartupError(text, failed=failed)
        return HandshakeError(
            text, engine=refusal.engine, state=refusal.state, expected=refusal.expected, failed=failed
        )

    async def stop(self) -> None:
        """Stop the engines and the coordinator. Idempotent; finishes also when cancelled."""
        self.close()
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(), name="aioshm-engine-startup-stops")
        await completed(self._stopping)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._watch is not None:
            self._watch.close()

    def _last_lines(self, names: Iterable[str]) -> dict[str, list[str]]:
        last_lines = getattr(self._manager, "last_lines", None)
        if last_lines is None:
            return {}
        tails = ((name, list(last_lines(name))) for name in names)
        return dict(islice(((name, lines) for name, lines in tails if lines), _TAILS))

    async def _stop(self) -> None:
        results = await asyncio.gather(
            _stop_manager(self._manager), _stop_process(self._coordinator), return_exceptions=True
        )
        for result in results:
            if isinstance(result, Exception):
                logger.error("while engines were stopped: %s", result, exc_info=result)


async def _stop_manager(manager: Any) -> None:
    aclose = getattr(manager, "aclose", None)
    close = getattr(manager, "close", None)
    if isinstance(manager, ProcessManager):
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):  # a cancelled `aclose` kills and waits
                await manager.aclose()
    elif aclose is not None:
        await aclose()
    elif close is not None:
        await in_thread(close)


async def _stop_process(process: WatchedProcess | None) -> None:
    if isinstance(process, BaseProcess):
        await ashutdown([process], STOP_S)
