"""A group of workers while it runs: its parts, and what each is told when workers die, come back, leave or join."""

from __future__ import annotations

import asyncio
import pickle
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec

from aioshm.config import Options
from aioshm.engine.workers.answers import WorkerAnswers
from aioshm.engine.workers.asked import named
from aioshm.engine.workers.calls import Calls
from aioshm.engine.workers.crew import Member, WorkerCrew
from aioshm.engine.workers.fate import Fate
from aioshm.engine.workers.performing import Leave, Step
from aioshm.engine.workers.process import LoopFactory
from aioshm.engine.workers.replacing import Replacing
from aioshm.engine.workers.schedule import Schedule
from aioshm.engine.workers.steps import Steps
from aioshm.errors import AioshmError, EndClosed
from aioshm.process.background import completed, in_thread
from aioshm.process.restart import RankInfo, Restart
from aioshm.queue import MessageQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a group is to be like; see `WorkerGroup`.

    Attributes:
        construction: Makes a worker.
        sizes: The bytes of a chunk, and the chunks, of each queue.
    """

    construction: Step
    n_workers: int
    name: str
    options: Options
    sizes: tuple[int, int]
    ready_timeout: float | None
    shutdown_timeout: float
    capture_stderr: bool
    loop_factory: LoopFactory | None
    restart: Restart | None
    standbys: int
    max_workers: int


class Running:
    """The parts of a group; on the running loop.

    Args:
        settings: What the group is to be like.
        fate: Is told how it ends.

    Attributes:
        n_workers: How many workers there are.
        callable: How many of them can be called alone: those that do not leave.
        crew: Their processes.
        steps: The calls of all.
        calls: The calls of one.
        replacing: Has the dead replaced; None: nobody has, or they are not made yet.
    """

    def __init__(self, settings: Settings, fate: Fate) -> None:
        self._settings, self._fate = settings, fate
        self.n_workers = self.callable = n_workers = settings.n_workers
        self._watchers: set[asyncio.Queue[RankInfo | None]] = set()
        fate.on_end.append(self._tell_end)
        this: Running = weakref.proxy(self)  # the loop holds on to what it calls; a forgotten group shall end
        options = settings.options
        if settings.restart is not None:
            options = msgspec.structs.replace(options, on_reader_death="evict", max_readers=settings.max_workers)
        self._queue = MessageQueue(n_workers, n_workers, None, *settings.sizes, options=options)
        try:
            self.crew = WorkerCrew(
                settings.name,
                self._queue.export_handle(),
                settings.sizes,
                settings.options,
                shutdown_timeout=settings.shutdown_timeout,
                capture_stderr=settings.capture_stderr,
                loop_factory=settings.loop_factory,
                on_exit=lambda gone: this._processes_exited(gone),
            )
        except BaseException:
            self._queue.end.gate.discard()
            raise
        self._answers = WorkerAnswers(settings.options)
        schedule = self._schedule = Schedule()
        steps = self.steps = Steps(
            n_workers,
            self._queue,
            self.crew,
            self._answers,
            schedule,
            fate,
            on_lost=lambda member: this._worker_lost(member),
            describe_absent=lambda: this._describe_absent(),
        )
        self.calls = Calls(
            self.crew,
            schedule,
            settings.sizes,
            settings.options,
            fate,
            steps=lambda: steps.sent,
            catch_up=steps.catch_up,
            on_lost=lambda member: this._worker_lost(member),
            describe_absent=lambda: this._describe_absent(),
        )
        self.replacing: Replacing | None = None

    async def start(self) -> None:
        """Start the processes, and wait until every worker is made."""
        settings, crew, steps = self._settings, self.crew, self.steps
        missing: set[int] = set()
        construction = b""
        async with steps.turn("the start of the workers", settings.ready_timeout, missing):
            await crew.start_workers(self.n_workers)
            if settings.restart is not None:  # once: this takes long where the arguments are large
                construction = await in_thread(lambda: pickle.dumps(settings.construction))
            try:
                for rank, member in crew.workers.items():
                    await crew.place(member, rank)
                for rank, member in crew.workers.items():
                    self._answers.attach(rank, await member.handle())
                    missing.discard(rank)
            except (EOFError, OSError):
                await steps.lost(min(missing))
            missing.update(range(self.n_workers))
            await steps.exchange(named(settings.construction[0]), settings.construction, missing)
        for rank in range(self.n_workers):
            self.calls.back(rank, 0)
        if settings.restart is None:
            return
        this: Running = weakref.proxy(self)
        self.replacing = Replacing(
            crew,
            self._answers,
            settings.restart,
            settings.standbys,
            settings.construction[0],
            construction,
            lambda: steps.sent,
            settings.ready_timeout,
            on_back=lambda rank: this._worker_back(rank),
            on_end=lambda failure: this._fate.end(failure),
            on_change=lambda info: this._worker_changed(info),
        )

    # Workers come and go

    async def membership(self) -> AsyncIterator[RankInfo]:
        """Yield what becomes of the workers from now on, until the group ends."""
        changes: asyncio.Queue[RankInfo | None] = asyncio.Queue()
        if self._fate.failure is None:
            self._watchers.add(changes)
        try:
            while self._fate.failure is None and (change := await changes.get()) is not None:
                yield change
        finally:
            self._watchers.discard(changes)

    async def scale(self, n_workers: int, replacing: Replacing) -> None:
        """Have more workers, or fewer, in turn with the calls of all."""
        steps = self.steps
        async with steps.turn("scale", None, set()):
            if n_workers < self.n_workers:
                await self._shrink(n_workers, replacing)
            newcomers = range(self.n_workers, n_workers)
            steps.away(newcomers)
            self.n_workers = steps.n_workers = self.callable = n_workers
            if newcomers:
                await asyncio.gather(*(asyncio.shield(replacing.add(rank)) for rank in newcomers))

    async def _shrink(self, n_workers: int, replacing: Replacing) -> None:
        steps, calls = self.steps, self.calls
        leaving = range(n_workers, self.n_workers)
        self.callable = n_workers
        try:
            await calls.drain(leaving)
            while steps.absent:  # a worker has died meanwhile: its restart is not broken off
                await steps.whole()
                await calls.drain(leaving)
        except BaseException:
            self.callable = self.n_workers
            for rank in leaving:
                self._schedule.leaves(rank, leaves=False)
            raise
        self.n_workers = steps.n_workers = n_workers
        for rank in leaving:
            replacing.remove(rank)
            self._answers.detach(rank)  # none of them answers, nor matters any more if it dies
        dismissal = asyncio.create_task(self._dismiss(leaving), name="aioshm-dismisses-workers")
        try:
            await asyncio.shield(dismissal)
        except asyncio.CancelledError:  # too late to keep them; but if the group ends, they are stopped with it
            if self._fate.failure is not None:
                dismissal.cancel()
            await completed(dismissal)
            raise

    async def _dismiss(self, leaving: range) -> None:
        """Tell the last workers to exit, and wait until they have; a worker that stays may die meanwhile."""
        try:
            await self.steps.send((Leave(frozenset(leaving)), (), {}, None))
            await asyncio.gather(*(self.crew.stop_worker(rank, self._settings.shutdown_timeout) for rank in leaving))
        finally:
            for rank in leaving:
                self.calls.forget(rank, lambda: EndClosed("the group of workers was made smaller"))
            self.steps.back(leaving)
        await self._answers.close_former()

    def _processes_exited(self, gone: list[Member]) -> None:
        if self.replacing is None:
            self._fate.end(self.crew.death())
            return
        for member in gone:
            rank = member.rank
            if rank is not None and rank not in self.steps.absent and rank < self.n_workers:
                failure = self.crew.death_of(rank)
                self.steps.away([rank])
                self.steps.break_step(failure)
                self.calls.died(rank, failure)
            self.replacing.died(member)
        if self._schedule.waits_for_any():
            self.steps.catch_up()

    def _worker_lost(self, member: Member) -> None:
        """Have a worker end whose queue has ended, but not its process."""
        if self.replacing is None:
            self._fate.end(self.crew.death(member.rank or 0))
        else:
            member.process.kill()

    def _describe_absent(self) -> str:
        return "" if self.replacing is None else self.replacing.describe_absent()

    def _worker_back(self, rank: int) -> None:
        self.calls.back(rank, self.steps.sent)
        self.steps.back([rank])

    def _worker_changed(self, info: RankInfo) -> None:
        for changes in self._watchers:
            changes.put_nowait(info)

    def _tell_end(self, _failure: Callable[[], AioshmError]) -> None:
        for changes in self._watchers:
            changes.put_nowait(None)

    # Closing

    async def stop(self, patience: float) -> None:
        """Let the workers exit by themselves for so many seconds, then stop what is left.

        The fate is known by now.
        """
        try:
            if self.replacing is not None:
                await self.replacing.aclose()
            await self.steps.aclose()
            await self.calls.aclose()
            await self._queue.aclose()
        finally:
            try:
                await self.crew.stop(patience)
            finally:
                await self._answers.aclose()
