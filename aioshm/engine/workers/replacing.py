"""Replaces workers that have died: by a standby, or by a new process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from aioshm.engine.workers.answers import WorkerAnswers
from aioshm.engine.workers.crew import Member, WorkerCrew
from aioshm.errors import AioshmError
from aioshm.process.lives import Life, bring_back
from aioshm.process.restart import ProcessPhase, RankInfo, Restart, RestartHistory

logger: logging.Logger = logging.getLogger("aioshm.engine")

EXIT_WITHIN_S = 5.0
"""How long a process whose pipe has ended, or that was killed, may take to exit."""


class Replacing:
    """Has a successor take the rank of each worker that dies, and keeps standbys; on the running loop.

    Args:
        crew: The processes.
        answers: Reads their queues.
        restart: When to replace one, for each rank by itself.
        standbys: How many processes to keep that only have to be told their rank.
        worker: What standbys import before they are needed.
        construction: The pickled step that makes a worker.
        calls: Returns how many messages were sent to all workers.
        ready_timeout: Seconds that a successor may take until it is made, and a standby until it has imported
            everything; None: as long as it takes.
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
        worker: Callable[..., Any],
        construction: bytes,
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
        self._worker, self._construction = worker, construction
        self._calls, self._ready_timeout = calls, ready_timeout
        self._on_back, self._on_end, self._on_change = on_back, on_end, on_change
        self._lives: dict[int, Life] = {}
        for rank, member in crew.workers.items():
            life = self._lives[rank] = Life(rank, restart)
            life.pid, life.state = member.pid, "running"
        self._standbys: list[Member] = []
        self._of_standbys = RestartHistory(restart)
        self._tasks: set[asyncio.Task[None]] = set()
        self._filling: asyncio.Task[None] | None = None
        self._fill()

    @property
    def workers(self) -> tuple[RankInfo, ...]:
        """The workers, by rank."""
        return tuple(life.info for _, life in sorted(self._lives.items()))

    @property
    def standbys(self) -> int:
        """How many standbys there are that can take a rank at once."""
        return len(self._standbys)

    def died(self, member: Member) -> None:
        """Replace a process that has exited."""
        cause = member.exited.result().describe()
        if member in self._standbys:
            self._standbys.remove(member)
            self._crew.dismiss(member)
            self._fill(cause)
            return
        life = None if member.rank is None else self._lives.get(member.rank)
        if life is not None and life.state == "running":  # else the task that starts it sees that
            self._replace(life, cause)

    def add(self, rank: int) -> asyncio.Task[None]:
        """Have one more worker, and return the task that is done when it is made."""
        life = self._lives[rank] = Life(rank, self._restart)
        return self._replace(life, "")

    def remove(self, rank: int) -> None:
        """Have no worker of this rank any more."""
        life = self._lives.pop(rank)
        if life.task is not None:
            life.task.cancel()

    def describe_absent(self) -> str:
        """Say how the workers have died that have no successor yet, and how far those are."""
        said = []
        for info in self.workers:
            if info.state != "running":
                who = f"{info.cause}, and its successor" if info.cause else f"worker {info.rank}"
                said.append(f"{who} is {info.state}{f' (pid {info.pid})' if info.state == 'starting' else ''}")
        return "; ".join(said)

    async def aclose(self) -> None:
        """Replace nothing any more. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # One that takes a rank

    def _replace(self, life: Life, cause: str) -> asyncio.Task[None]:
        life.task = self._spawn(self._bring_back(life, cause), f"worker-{life.rank}")
        return life.task

    async def _bring_back(self, life: Life, cause: str) -> None:
        """Have a process take a rank; ``cause`` is how the one before has died, if there was one."""

        def wait(cause: str) -> None:
            life.cause = cause
            logger.warning("%s; restarting it (%s)", cause, life.history.number)
            self._set(life, "waiting")

        if not await bring_back(life.history, cause, lambda: self._start(life), wait):
            self._on_end(self._crew.death_of(life.rank, f"a crash loop: {life.history.story}"))

    async def _start(self, life: Life) -> str:
        """Let a standby, or else a new process, be a worker; return why it is none, or an empty string."""
        crew, rank = self._crew, life.rank
        try:
            member = self._standbys.pop(0) if self._standbys else await crew.start(rank)
        except Exception as error:
            return f"worker {rank} could not be started: {error}"
        life.pid = member.pid
        self._set(life, "starting")
        cause = await self._make(rank, member)
        if not cause:
            self._set(life, "running")  # whoever dies from now on is replaced by another task
            logger.info("%s is worker %d: pid %d", member.name, rank, member.pid)
            self._on_back(rank)
            self._spawn(self._answers.close_former(), "closes")
        self._fill()  # not before: what the start of a process takes is the successor's
        return cause

    async def _make(self, rank: int, member: Member) -> str:
        """Let a process be a worker; return why it is none, by which time it has exited, or an empty string."""
        cause, within_s = "", self._ready_timeout
        try:
            async with asyncio.timeout(within_s):
                await self._crew.place(member, rank, self._construction)
                handle = await member.handle()
                well, failure = await member.control.receive()
            if well and not member.exited.done():
                self._answers.attach(rank, handle, self._calls())
                return ""
            if not well:
                cause = f"{member.name} (pid {member.pid}) could not be made: {failure}"
        except AioshmError as error:
            cause = f"the queue of {member.name} (pid {member.pid}) cannot be attached to: {error}"
        except TimeoutError:
            cause = f"{member.name} (pid {member.pid}) was not made after {within_s:g} s, and was killed"
        except (EOFError, OSError):
            await asyncio.wait([member.exited], timeout=EXIT_WITHIN_S)
        member.process.kill()
        exited = await member.exited
        return cause or exited.describe()

    # Standbys

    def _fill(self, cause: str = "") -> None:
        """Start as many standbys as are wanted; ``cause`` is how one has died, if one has."""
        if len(self._standbys) < self._wanted and (self._filling is None or self._filling.done()):
            self._filling = self._spawn(self._start_standbys(cause), "standbys")

    async def _start_standbys(self, cause: str) -> None:
        while len(self._standbys) < self._wanted:
            if not await bring_back(self._of_standbys, cause, self._start_standby, logger.warning):
                logger.error("no standbys any more: %s", self._of_standbys.story)
                self._wanted = 0
            cause = ""

    async def _start_standby(self) -> str:
        crew = self._crew
        try:
            member = await crew.start(None, self._worker)
        except Exception as error:
            return f"a standby could not be started: {error}"
        cause, within_s = "", self._ready_timeout
        try:
            async with asyncio.timeout(within_s):
                await member.handle()
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                cause = f"{member.name} (pid {member.pid}) was not ready after {within_s:g} s, and was killed"
            else:
                await asyncio.wait([member.exited], timeout=EXIT_WITHIN_S)
            member.process.kill()
            await member.exited
        if member.exited.done():
            crew.dismiss(member)
            return cause or f"{member.exited.result().describe()} before it was needed"
        self._standbys.append(member)
        return ""

    # What is said

    def _set(self, life: Life, state: ProcessPhase) -> None:
        life.state = state
        self._on_change(life.info)

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
