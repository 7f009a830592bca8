"""The calls of all workers, one after the other: whose turn it is, what is sent, and what breaks it off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn

from aioshm.engine.workers.answers import WorkerAnswers, WorkerLost
from aioshm.engine.workers.crew import Member, WorkerCrew
from aioshm.engine.workers.fate import Fate
from aioshm.engine.workers.performing import Step
from aioshm.engine.workers.schedule import Schedule
from aioshm.errors import AioshmError, PeerDied, WorkerError
from aioshm.queue import MessageQueue

CODE_WITHIN_S = 1.0
"""How long a worker whose queue is closed may take to exit, before it is killed, or told without its exit code."""


class Steps:
    """Sends steps to all workers, and waits for their answers.

    Args:
        queue: Goes to all of them.
        crew: Their processes.
        answers: Their queues.
        schedule: Is told who has a step to do.
        fate: The group's.
        on_lost: Called with a worker whose queue has ended, but not its process.
        describe_absent: Says who has died and has no successor yet.

    Attributes:
        n_workers: How many workers answer.
        sent: How many steps were sent.
        absent: Ranks that wait for a successor.
    """

    def __init__(
        self,
        n_workers: int,
        queue: MessageQueue,
        crew: WorkerCrew,
        answers: WorkerAnswers,
        schedule: Schedule,
        fate: Fate,
        *,
        on_lost: Callable[[Member], None],
        describe_absent: Callable[[], str],
    ) -> None:
        self.n_workers = n_workers
        self._on_lost, self._describe_absent = on_lost, describe_absent
        self._queue, self._crew, self._answers, self._schedule = queue, crew, answers, schedule
        self._fate = fate
        fate.on_end.append(self._break_off)
        self.sent = 0
        self.absent: set[int] = set()
        self._whole = asyncio.Event()
        self._whole.set()
        self._broken: Callable[[], AioshmError] | None = None  # why the step in flight fails
        self._line = asyncio.Lock()
        self._scope: asyncio.Timeout | None = None  # of the step whose turn it is
        self._in_flight = False  # whether it has been sent
        self._late: asyncio.Task[None] | None = None  # waits for answers that nobody waits for

    @asynccontextmanager
    async def turn(self, what: str, timeout: float | None, missing: set[int]) -> AsyncIterator[None]:
        """Wait for this call's turn; end the block when time is up, or the group is broken."""
        waits = "waits for the calls before it"
        try:
            async with asyncio.timeout(timeout) as scope, self._line:
                if self.absent:
                    waits = "waits for the successors of workers that have died"
                await self.whole()
                waits = ""
                await self._end_late()
                self._broken = None
                missing.update(range(self.n_workers))
                self._scope = scope
                try:
                    yield
                finally:
                    self._scope = None
                    if self._schedule.waits_for_any():
                        self.catch_up()
        except TimeoutError:
            if not scope.expired():
                raise
            if (failure := self._fate.failure or (None if waits else self._broken)) is not None:
                raise failure() from None
            waits = waits or f"no answer from {self._crew.describe(sorted(missing))}"
            absent = f": {self._describe_absent()}" if self.absent else ""
            raise TimeoutError(f"{what}: {waits} within {timeout} s{absent}") from None

    async def exchange(self, what: str, step: Step, missing: set[int]) -> list[Any]:
        """Send a step, and return the results by rank; in this call's turn.

        Args:
            what: What is called, for people.
            step: The step.
            missing: The ranks that are to answer; loses those that have.
        """
        self._schedule.step_begins(range(self.n_workers))
        self._in_flight = True
        try:
            await self._queue.enqueue(step)
            self.sent += 1  # not if that was cancelled or refused: then nothing was sent
            results, errors = await self._answers.collect(self.sent - 1, missing)
        except (PeerDied, WorkerLost) as error:
            await self.lost(error.rank)
        finally:
            self._in_flight = False
            self._step_ends()
        if errors:
            raise WorkerError(what, dict(sorted(errors.items())))
        return results

    async def send(self, step: Step) -> None:
        """Send a step that nobody waits for; in this call's turn. Its answers are dropped when they have come."""
        self._schedule.step_begins(range(self.n_workers))
        try:
            await self._queue.enqueue(step)
            self.sent += 1
        finally:
            self._step_ends()

    def catch_up(self) -> None:
        """Wait for what is still to be answered of steps that nobody waits for: a worker is not idle before."""
        if (
            self._scope is None
            and (self._late is None or self._late.done())
            and self._schedule.in_steps()
            and self._fate.failure is None
        ):
            self._late = asyncio.get_running_loop().create_task(self._collect_late())

    async def _collect_late(self) -> None:
        with suppress(AioshmError, WorkerLost):  # the next step meets that, too
            await self._answers.catch_up(self.sent, self._step_ends)

    async def _end_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            await asyncio.wait([self._late])

    def _step_ends(self) -> None:
        for rank in self._schedule.in_steps() - self._answers.owing(self.sent):
            self._schedule.step_ends(rank)

    # Workers that are gone

    def away(self, ranks: Iterable[int]) -> None:
        """Let steps wait for workers of these ranks."""
        self.absent.update(ranks)
        if self.absent:
            self._whole.clear()

    def back(self, ranks: Iterable[int]) -> None:
        """Wait for them no more."""
        self.absent.difference_update(ranks)
        if not self.absent:
            self._whole.set()

    async def whole(self) -> None:
        """Wait until no worker is absent."""
        await self._whole.wait()
        self._fate.check()

    async def lost(self, rank: int) -> NoReturn:
        """Raise what has become of a worker whose queue is closed or broken."""
        member = self._crew.workers[rank]
        with suppress(TimeoutError):
            async with asyncio.timeout(CODE_WITHIN_S):
                await self._fate.ended.wait()  # where workers are replaced, the end of this step interrupts that
        self._on_lost(member)
        await self._fate.ended.wait()
        assert self._fate.failure is not None
        raise self._fate.failure()

    def break_step(self, failure: Callable[[], AioshmError]) -> None:
        """Let the step in flight, if there is one, raise an error."""
        if self._in_flight and self._scope is not None and not self._scope.expired() and self._broken is None:
            self._broken = failure
            self._scope.reschedule(0)

    def _break_off(self, _failure: Callable[[], AioshmError]) -> None:
        self._whole.set()
        if self._late is not None:
            self._late.cancel()
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(0)

    async def aclose(self) -> None:
        """Wait for nothing any more. Idempotent."""
        await self._end_late()
