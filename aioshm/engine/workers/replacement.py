"""Replaces dead workers: by a standby, or by a new process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from aioshm.engine.workers.processes import Settings, WorkerProcess
from aioshm.errors import AioshmError, EndClosed
from aioshm.process.background import give_back
from aioshm.process.restart import ALIVE, Life, Restart, RestartHistory, bring_back

if TYPE_CHECKING:
    from aioshm.engine.workers.session import Session

logger: logging.Logger = logging.getLogger("aioshm.engine")

EXIT_WITHIN_S = 5.0
"""How long a process may take to exit after its socket has ended."""

BY_REQUEST = "was killed by WorkerGroup.restart"
"""The reason for the end of a process that `Replacer.restart` has ended."""


class Replacer:
    """Starts a replacement of each dead worker, and keeps standbys; on the running loop."""

    def __init__(self, session: Session, settings: Settings, restart: Restart) -> None:
        self._session = session
        self._processes = session.processes
        self._settings = settings
        self._restart = restart
        self._wanted = settings.standbys
        self._ready_timeout = settings.ready_timeout
        self._lives = session.lives
        self._standbys: list[WorkerProcess] = []
        self._standby_history = RestartHistory(restart)
        self._filling: asyncio.Task[None] | None = None
        self._fill()

    @property
    def standbys(self) -> int:
        return len(self._standbys)

    def died(self, process: WorkerProcess) -> None:
        """Replace a process that has exited."""
        cause = process.exited.result().describe()
        if process in self._standbys:
            self._standbys.remove(process)
            self._processes.discard(process)
            self._fill(cause)
            return
        life = None if process.rank is None else self._lives.get(process.rank)
        if life is None or not (life.is_alive or life.state == "stopping"):
            return  # the task that starts the worker handles the exit
        life.cause = cause
        life.enter("waiting")
        if process.process.reason == BY_REQUEST:  # no death that the policy counts
            logger.info("%s; replacing it", cause)
            life.history.restarts += 1
            cause = ""
        self._replace(life, cause)

    def add(self, rank: int) -> asyncio.Task[None]:
        """Add a worker; return the task that is done when the worker is created."""
        life = self._lives[rank] = Life(rank, self._restart, self._session.worker_changed)
        return self._replace(life, "")

    async def restart(self, rank: int, timeout: float | None) -> None:
        """End a worker, and wait for its replacement; see `WorkerGroup.restart`."""
        self._session.check()  # the workers of a group that has ended are left alone
        life = self._lives[rank]
        if life.is_alive:
            life.enter("stopping")
            self._session.calls.schedule.set_late(rank)
            ending = self._end(self._processes.workers[rank])
            life.task = self._session.spawn(ending, f"aioshm-restarts-worker-{rank}")
        try:
            async with asyncio.timeout(timeout):
                while not life.is_alive:
                    assert life.task is not None
                    await asyncio.wait([life.task])
                    self._session.check()
                    if self._lives.get(rank) is not life:
                        raise EndClosed("the group of workers was made smaller")
        except TimeoutError:
            name = self._processes.describe([rank])
            raise TimeoutError(f"no replacement of {name} within {timeout} s: {self.describe_absent()}") from None

    async def _end(self, worker: WorkerProcess) -> None:
        await give_back(lambda: worker.process.end(BY_REQUEST))
        await asyncio.wait([worker.exited])  # from then on the life has the task that replaces the worker

    def remove(self, rank: int) -> None:
        life = self._lives.pop(rank)
        if life.task is not None:
            life.task.cancel()

    def describe_absent(self) -> str:
        """Describe the deaths of absent workers, and the state of their replacements."""
        texts = []
        for info in self._session.workers:
            if info.state not in ALIVE:
                text = f"worker {info.rank} is {info.state}"
                if info.cause:
                    text = f"{info.cause}, and its replacement is {info.state}"
                if info.state == "starting":
                    text += f" (pid {info.pid})"
                texts.append(text)
        return "; ".join(texts)

    # A process for a rank

    def _replace(self, life: Life, cause: str) -> asyncio.Task[None]:
        life.task = self._session.spawn(self._bring_back(life, cause), f"aioshm-replaces-worker-{life.rank}")
        return life.task

    async def _bring_back(self, life: Life, cause: str) -> None:
        if not await life.bring_back(cause, lambda: self._start(life)):
            self._session.end(self._processes.death(life.rank, f"a crash loop: {life.history.story}"))

    async def _start(self, life: Life) -> str:
        """Create the worker in a standby, or else in a new process; return the cause of a failure, or ""."""
        rank = life.rank
        if self._standbys:
            process = self._standbys.pop(0)
        else:
            try:
                process = self._processes.start(rank)
            except Exception as error:
                return f"worker {rank} could not be started: {error}"
        life.pid = process.pid
        life.enter("starting")
        self._processes.assign(process, rank)
        cause = await self._prepare(process, self._create(rank, process), "created")
        if not cause:
            life.enter("running")  # if the worker dies from now on, another task replaces it
            self._processes.watch_progress(process)
            logger.info("%s is worker %d: pid %d", process.name, rank, process.pid)
            self._session.calls.mark_present([rank])
        self._fill()  # not before: the replacement comes first
        return cause

    async def _create(self, rank: int, process: WorkerProcess) -> str:
        failure = await self._session.construct(process)
        if failure is not None:
            return f"{process} could not be created: {failure}"
        try:
            await self._session.connect(process)
        except AioshmError as error:
            return f"cannot attach to the queues of {process}: {error}"
        return ""

    async def _prepare(self, process: WorkerProcess, work: Coroutine[Any, Any, str], what: str) -> str:
        """Run a step of a new process; return "", or after its exit the cause of a failure."""
        within_s = self._ready_timeout
        cause = ""
        try:
            async with asyncio.timeout(within_s):
                cause = await work
            if not cause and not process.exited.done():
                return ""
        except TimeoutError:
            cause = f"{process} was not {what} after {within_s:g} s, and was killed"
        except (EOFError, OSError):
            await asyncio.wait([process.exited], timeout=EXIT_WITHIN_S)
        process.process.kill()
        exited = await process.exited
        return cause or exited.describe()

    # Standbys

    def _fill(self, cause: str = "") -> None:
        """Start the missing standbys; ``cause``: the death of the last standby."""
        if len(self._standbys) < self._wanted and (self._filling is None or self._filling.done()):
            self._filling = self._session.spawn(self._start_standbys(cause), "aioshm-starts-standbys")

    async def _start_standbys(self, cause: str) -> None:
        while len(self._standbys) < self._wanted:
            if not await bring_back(self._standby_history, cause, self._start_standby):
                logger.error("standbys are not restarted any more: %s", self._standby_history.story)
                self._wanted = 0
            cause = ""

    async def _start_standby(self) -> str:
        try:
            process = self._processes.start(None, self._settings.worker)
        except Exception as error:
            return f"a standby could not be started: {error}"
        cause = await self._prepare(process, self._import(process), "ready")
        if cause:
            self._processes.discard(process)
            return f"{cause} before it was needed"
        self._standbys.append(process)
        return ""

    async def _import(self, process: WorkerProcess) -> str:
        await process.handle()  # is sent once everything is imported
        return ""
