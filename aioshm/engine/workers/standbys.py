"""Standbys: processes that have imported the worker's modules, and wait for a rank."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from aioshm.engine.workers.processes import Settings, WorkerProcess
from aioshm.process.restart import Life, Restart

if TYPE_CHECKING:
    from aioshm.engine.workers.session import Session

logger: logging.Logger = logging.getLogger("aioshm.engine")


class Standbys:
    """Keeps as many standbys as are wanted; on the running loop."""

    def __init__(self, session: Session, settings: Settings) -> None:
        self._session = session
        self._settings = settings
        self._life = Life(0, settings.restart or Restart())  # of all standbys
        self._filling: asyncio.Task[None] | None = None
        self._started = 0
        self.wanted: int = settings.standbys
        self.ready: list[WorkerProcess] = []

    def died(self, process: WorkerProcess) -> None:
        """Replace a standby that has exited; do nothing for another process."""
        if process in self.ready:
            self.ready.remove(process)
            self._session.processes.discard(process)
            self.fill(process.exited.result().describe())

    def fill(self, cause: str = "") -> None:
        """Start the missing standbys; ``cause``: the death of the last standby."""
        if len(self.ready) < self.wanted and (self._filling is None or self._filling.done()):
            self._filling = self._session.spawn(self._fill(cause), "aioshm-starts-standbys")

    async def _fill(self, cause: str) -> None:
        while len(self.ready) < self.wanted:
            if not await self._life.bring_back(cause, self._start):
                logger.error("standbys are not restarted any more: %s", self._life.history.story)
                self.wanted = 0
            cause = ""

    async def _start(self) -> str:
        processes = self._session.processes
        name = f"{self._settings.name}_standby_{self._started}"
        self._started += 1
        try:
            process = processes.start(name, imported=self._settings.worker)
        except Exception as error:
            return f"a standby could not be started: {error}"
        cause = await processes.prepare(process, _import(process), "ready")
        if cause:
            processes.discard(process)
            return f"{cause} before it was needed"
        self.ready.append(process)
        return ""


async def _import(process: WorkerProcess) -> str:
    await process.handle()  # is sent once everything is imported
    return ""
