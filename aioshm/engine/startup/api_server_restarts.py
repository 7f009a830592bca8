"""Starts the API servers of a front end again when they have died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from aioshm.errors import ProcessDied
from aioshm.process.background import in_thread, notify
from aioshm.process.child import Child
from aioshm.process.lives import Life, bring_back
from aioshm.process.manager import ProcessManager
from aioshm.process.restart import ProcessPhase, RankInfo, Restart
from aioshm.process.watch import ProcessExit, ProcessWatch

logger: logging.Logger = logging.getLogger("aioshm.engine")


class ServerRestarts:
    """Watches the processes of a manager, and starts again those that exit with a code other than 0; on a loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        processes: Sequence[Child],
        manager: ProcessManager,
        restart: Restart,
        on_change: Callable[[RankInfo], object] | None,
    ) -> None:
        self._loop, self._manager, self._on_change = loop, manager, on_change
        self.lives: list[Life] = [Life(rank, restart) for rank in range(len(processes))]
        self._ranks: dict[str, int] = {}
        for life, process in zip(self.lives, processes, strict=True):
            life.pid, life.state = process.pid, "running"
            self._ranks[process.name] = life.rank
        self.failure: ProcessDied | None = None
        self.over: asyncio.Event = asyncio.Event()
        self.closed: bool = False
        self._watch = ProcessWatch(manager=manager, on_exit=self._process_exited)

    def close(self) -> None:
        """Start nothing any more. Idempotent; on a closed loop, too."""
        self.closed = True
        self._watch.close()
        if not self._loop.is_closed():
            self.over.set()
            for life in self.lives:
                if life.task is not None:
                    life.task.cancel()

    async def aclose(self) -> None:
        """Do what `close` does, and wait until nothing goes on."""
        self.close()
        tasks = [life.task for life in self.lives if life.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _process_exited(self) -> None:
        for each in self._watch.take():
            life = self.lives[self._ranks[each.name]]
            if each.exitcode == 0:
                self._set(life, "exited")
                if all(other.state == "exited" for other in self.lives):
                    self.over.set()
            elif self.failure is None:
                life.task = self._loop.create_task(self._bring_back(life, each), name=f"aioshm-restarts-{each.name}")

    async def _bring_back(self, life: Life, found: ProcessExit) -> None:
        def wait(cause: str) -> None:
            life.cause = cause
            logger.warning("%s; restarting it (%s)", cause, life.history.number)
            self._set(life, "waiting")

        async def start() -> str:
            self._set(life, "starting")
            try:
                process = await in_thread(lambda: self._manager.start_again(found.name))
            except Exception as error:
                return f"{found.name} could not be started: {error}"
            life.pid = process.pid
            self._watch.add([process], managed=True)
            self._set(life, "running")
            return ""

        cause = found.describe()
        if not await bring_back(life.history, cause, start, wait):
            life.cause = cause
            self._set(life, "exited")
            story = f"it is in a crash loop: {life.history.story}"
            self.failure = ProcessDied(found.name, found.pid, found.exitcode, story)
            logger.error("%s", self.failure)
            self.over.set()

    def _set(self, life: Life, state: ProcessPhase) -> None:
        life.state = state
        if self._on_change is not None:
            self._loop.call_soon(notify, self._on_change, life.info)
