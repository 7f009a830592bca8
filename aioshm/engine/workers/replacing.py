"""Replaces workers that have died: by a standby, or by a new process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from aioshm.engine.workers.answers import WorkerAnswers
from aioshm.engine.workers.crew import Member, WorkerCrew
from aioshm.engine.workers.performing import Step
from aioshm.errors import AioshmError
from aioshm.process.background import in_thread
from aioshm.process.restart import ProcessPhase, RankInfo, Restart, RestartHistory

logger: logging.Logger = logging.getLogger("aioshm.engine")

EXIT_WITHIN_S = 5.0
"""How long a process whose pipe has ended, or that was killed, may take to exit."""


class _Life:
    """The processes of one worker, one after the other."""

    def __init__(self, rank: int, restart: Restart) -> None:
        self.rank = rank
        self.history = RestartHistory(restart)
        self.state: ProcessPhase = "running"
        self.cause = ""
        self.task: asyncio.Task[None] | None = None


class Replacing:
    """Has a successor take the rank of each worker that dies, and keeps standbys; on the running loop.

    Args:
        crew: The processes.
        answers: Reads their queues.
        restart: When to replace one, for each rank by itself.
        standbys: How many processes to keep that only have to be told their rank.
        construction: Makes a worker.
        calls: Returns how many messages were sent to all workers.
        ready_timeout: Seconds that a successor may take until it is made; None: as long as it takes.
        on_back: Called with the rank of a worker that has a successor.
        on_end: Called with what makes the error, when a rank has none any more.
        on_change: Called when a worker's state has changed.
    """

    def __init__(
        self,
        crew: WorkerCrew,
        answers: WorkerAnswers,
        restart: Restart,
        standbys: int,
        construction: Step,
        calls: Callable[[], int],
        ready_timeout: float | None,
        *,
        on_back: Callable[[int], None],
        on_end: Callable[[Callable[[], AioshmError]], None],
        on_change: Callable[[RankInfo], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._crew, self._answers = crew, answers
        self._restart, self._wanted = restart, standbys
        self._construction, self._calls, self._ready_timeout = construction, calls, ready_timeout
        self._on_back, self._on_end, self._on_change = on_back, on_end, on_change
        self._lives = {rank: _Life(rank, restart) for rank in crew.workers}
        self._standbys: list[Member] = []
        self._of_standbys = RestartHistory(restart)
        self._tasks: set[asyncio.Task[None]] = set()
        self._filling: asyncio.Task[None] | None = None
        self._fill()

    @property
    def workers(self) -> tuple[RankInfo, ...]:
        """The workers, by rank."""
        return tuple(self._info(life) for _, life in sorted(self._lives.items()))

    @property
    def standbys(self) -> int:
        """How many standbys there are that can take a rank at once."""
        return len(self._standbys)

    def died(self, member: Member) -> None:
        """Replace a process that has exited."""
        if member in self._standbys:
            self._standbys.remove(member)
            self._crew.dismiss(member)
            self._fill()
            return
        life = None if member.rank is None else self._lives.get(member.rank)
        if life is not None and (life.task is None or life.task.done()):  # else the task sees it
            life.task = self._spawn(self._replace(life, member), f"worker-{life.rank}")

    def add(self, rank: int) -> asyncio.Task[None]:
        """Have one more worker, and return the task that is done when it is made."""
        life = self._lives[rank] = _Life(rank, self._restart)
        life.task = self._spawn(self._replace(life, None), f"worker-{rank}")
        return life.task

    def remove(self, rank: int) -> None:
        """Have no worker of this rank any more."""
        life = self._lives.pop(rank)
        if life.task is not None:
            life.task.cancel()

    async def aclose(self) -> None:
        """Replace nothing any more. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # One that takes a rank

    async def _replace(self, life: _Life, dead: Member | None) -> None:
        """Have a process take a rank, again and again, until one is made or a crash loop is found."""
        cause = "" if dead is None else dead.exited.result().describe()
        while True:
            if dead is not None:
                life.cause = cause
                delay = life.history.died(self._loop.time(), cause)
                if delay is None:
                    self._on_end(self._crew.death_of(dead, f"a crash loop: {life.history.story}"))
                    return
                logger.warning("%s; its restart is number %d", cause, life.history.restarts)
                self._set(life, "waiting")
                await asyncio.sleep(delay)
            member = self._standbys.pop(0) if self._standbys else None
            self._fill()
            if member is None:
                member = self._crew.take_in(*await in_thread(lambda: self._crew.start(life.rank, None)))
            self._set(life, "starting")
            cause = await self._make(life, member)
            if not cause:
                self._set(life, "running")
                logger.info("%s is worker %d: pid %d", member.name, life.rank, member.pid)
                self._on_back(life.rank)
                await self._answers.close_former()
                return
            dead = member

    async def _make(self, life: _Life, member: Member) -> str:
        """Let a process be a worker; return why it is none, by which time it has exited, or an empty string."""
        cause, within_s = "", self._ready_timeout
        try:
            async with asyncio.timeout(within_s):
                self._crew.place(member, life.rank, self._construction)
                said = await member.message()
                handle = said if isinstance(said, str) else await member.message()  # a standby has said True before
                well, failure = await member.message()
            if well:
                self._answers.attach(life.rank, handle, self._calls())
                return ""
            cause = f"{member.name} (pid {member.pid}) could not be made: {failure}"
        except TimeoutError:
            cause = f"{member.name} (pid {member.pid}) was not made after {within_s:g} s, and was killed"
        except (EOFError, OSError):
            await asyncio.wait([member.exited], timeout=EXIT_WITHIN_S)
        member.process.kill()
        exited = await member.exited
        return cause or exited.describe()

    # Standbys

    def _fill(self) -> None:
        if len(self._standbys) < self._wanted and (self._filling is None or self._filling.done()):
            self._filling = self._spawn(self._start_standbys(), "standbys")

    async def _start_standbys(self) -> None:
        imported = self._construction[0]
        while len(self._standbys) < self._wanted:
            cause = ""
            try:
                member = self._crew.take_in(*await in_thread(lambda: self._crew.start(None, imported)))
            except Exception as error:
                cause = f"a standby could not be started: {error}"
            else:
                try:
                    await member.message()
                    self._standbys.append(member)
                except (EOFError, OSError):
                    cause = f"{member.name} (pid {member.pid}) has exited before it was needed"
                    self._crew.dismiss_soon(member)
            if cause:
                delay = self._of_standbys.died(self._loop.time(), cause)
                if delay is None:
                    logger.error("no standbys any more: %s", self._of_standbys.story)
                    self._wanted = 0
                    return
                await asyncio.sleep(delay)

    # What is said

    def _set(self, life: _Life, state: ProcessPhase) -> None:
        life.state = state
        self._on_change(self._info(life))

    def _info(self, life: _Life) -> RankInfo:
        member = self._crew.workers.get(life.rank)
        pid = None if member is None else member.pid
        return RankInfo(life.rank, pid, life.state, life.history.restarts, life.cause)

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name=f"aioshm-replaces-{what}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            text = f"workers cannot be replaced: {type(error).__name__}: {error}"
            logger.error("%s", text, exc_info=error)
            self._on_end(lambda: AioshmError(text))
