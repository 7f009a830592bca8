"""A group of workers while it runs: workers are created, die, are replaced, leave and join."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import aclosing, suppress
from typing import Any, cast

import msgspec

from aioshm.engine.workers.calls import CallTable
from aioshm.engine.workers.processes import EXIT_WITHIN_S, Rank, Settings, WorkerProcess, WorkerProcesses
from aioshm.engine.workers.worker import MessageCodec
from aioshm.errors import AioshmError, CodecError, EndClosed, RemoteFailure, RoleError, WorkerError, copy_error
from aioshm.process.background import give_back, in_thread
from aioshm.process.restart import ALIVE, Life, RankInfo, Restart
from aioshm.process.stalls import Watched
from aioshm.queue import MessageQueue
from aioshm.queue.ends.writer import Writer

CODE_WITHIN_S = 1.0
"""How long a worker with a closed queue may take to exit. After that it is killed."""

BY_REQUEST = "was killed by WorkerGroup.restart"
"""The reason for the end of a process that `Session.restart` has ended."""

logger: logging.Logger = logging.getLogger("aioshm.engine")


class Session:
    """A group while it runs; on its loop."""

    processes: WorkerProcesses
    calls: CallTable

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.failure: AioshmError | None = None  # of every later call
        self.is_open: bool = False  # whether the processes and the calls exist
        self.replaces: bool = False  # whether dead workers are replaced: with ``restart``, after the start
        self.ranks: dict[int, Rank] = {}
        self._add_ranks(settings.n_workers)
        self.standbys: list[WorkerProcess] = []
        self.wanted_standbys: int = settings.standbys
        self.news: asyncio.Event = asyncio.Event()  # a standby was taken, or a process has exited
        self._n_standbys = 0  # started in all
        self._tasks: set[asyncio.Task[None]] = set()
        self._watchers: set[asyncio.Queue[RankInfo | None]] = set()
        self._construction = b""  # the pickled call that creates a worker

    def _add_ranks(self, n_workers: int) -> list[Rank]:
        restart = self._settings.restart or Restart()
        added = []
        for rank in range(len(self.ranks), n_workers):
            self.ranks[rank] = Rank(rank, f"{self._settings.name}_{rank}", restart, self._note_change)
            added.append(self.ranks[rank])
        return added

    def check(self) -> None:
        """Raise the error if the group has ended."""
        if self.failure is not None:
            raise copy_error(self.failure)

    # The start

    def open(self) -> None:
        """Create the queue of calls of all workers; processes are started later."""
        settings = self._settings
        # All workers join it in the same way: at the start, as replacements, and when the group is made larger.
        options = msgspec.structs.replace(settings.options, on_reader_death="evict", max_readers=settings.max_workers)
        broadcasts = MessageQueue(0, 0, None, *settings.sizes, codec=MessageCodec(), options=options)
        try:
            self.processes = WorkerProcesses(settings, self)
        except BaseException:
            broadcasts.end.state.discard()
            raise
        cast(Writer, broadcasts.end).label(f"{settings.name}.calls")
        self.calls = CallTable(self, broadcasts)
        self.is_open = True

    async def start(self) -> None:
        """Start the processes, and wait until every worker is created."""
        settings = self._settings
        call = settings.worker, settings.args, settings.kwargs
        try:
            async with asyncio.timeout(settings.ready_timeout) as scope:
                try:
                    self._construction = await in_thread(lambda: pickle.dumps(call))
                except Exception as error:
                    text = f"worker, args and kwargs cannot be pickled: {type(error).__name__}: {error}"
                    raise CodecError(text) from error
                await self.calls.broadcasts.wait_until_ready()  # now workers can join
                for rank in self.ranks.values():
                    self.check()  # the group may be closed meanwhile
                    rank.take_process(self.processes.start(rank.name, self._construction, rank.rank))
                    await asyncio.sleep(0)
                results = await _all(self._create_first(rank) for rank in self.ranks.values())
                self.check()
        except TimeoutError:
            if not scope.expired():
                raise
            names = self.describe(rank for rank, each in self.ranks.items() if not each.present)
            text = f"the start of the workers: no answer from {names} within {settings.ready_timeout} s"
            raise TimeoutError(text) from None
        if failures := {rank: failure for rank, failure in enumerate(results) if failure is not None}:
            raise WorkerError(method_name(settings.worker), failures)
        self.replaces = settings.restart is not None
        for rank in self.ranks.values():
            rank.task = self.spawn(self._keep(rank), f"aioshm-keeps-worker-{rank.rank}")
        if self.wanted_standbys:
            self.spawn(self._keep_standbys(), "aioshm-keeps-standbys")

    async def _create_first(self, rank: Rank) -> RemoteFailure | None:
        """Create a worker at the start; raise the exit of a process that dies meanwhile."""
        try:
            return await self._create(rank)
        except AioshmError:  # some are an OSError, too
            raise
        except (EOFError, OSError):
            assert rank.process is not None
            await self.processes.kill_now(rank.process, EXIT_WITHIN_S)
            self.end(self.processes.death(rank))
            raise self.processes.death(rank) from None

    async def _create(self, rank: Rank) -> RemoteFailure | None:
        """Create a worker's object, and start to send calls to it; return the exception of its constructor."""
        process = rank.process
        assert process is not None
        broadcasts = self.calls.broadcasts.export_handle().to_json()
        failure = await process.create(rank.rank, broadcasts, self._settings)
        if failure is None:
            self.processes.progress.add(process.name, process.process)
            self.calls.add(rank)
        return failure

    # The states of the workers

    @property
    def callable(self) -> int:
        """The number of workers without those that leave."""
        return sum(not rank.leaving for rank in self.ranks.values())

    @property
    def workers(self) -> tuple[RankInfo, ...]:
        """The states of the workers, by rank."""
        return tuple(rank.info for rank in [*self.ranks.values()])  # a copy: `stats` may run in another thread

    def describe(self, ranks: Iterable[int]) -> str:
        """Name workers, with the state of workers that make no progress or cannot run."""
        return ", ".join(self.ranks[rank].describe() for rank in sorted(ranks) if rank in self.ranks)

    def describe_absent(self) -> str:
        """Describe the deaths of absent workers, and the state of their replacements."""
        texts = []
        for info in self.workers:
            if info.state not in ALIVE:
                text = f"worker {info.rank} is {info.state}"
                if info.cause:
                    text = f"{info.cause}, and its replacement is {info.state}"
                if info.state == "starting":
                    text += f" (pid {info.pid})"
                texts.append(text)
        return "; ".join(texts)

    async def membership(self) -> AsyncGenerator[RankInfo, None]:
        """Yield the changes of the workers from now on, until the group ends."""
        changes: asyncio.Queue[RankInfo | None] = asyncio.Queue()
        if self.failure is None:
            self._watchers.add(changes)
        try:
            while self.failure is None and (change := await changes.get()) is not None:
                yield change
        finally:
            self._watchers.discard(changes)

    async def _alive(self, rank: Rank) -> None:
        """Wait until a worker is ready, or the group has ended."""
        async with aclosing(self.membership()) as changes:
            while not rank.is_alive and await anext(changes, None) is not None:
                pass

    def _note_change(self, info: RankInfo | None) -> None:
        """Report a change to the iterators of `membership`; None: the group has ended."""
        for changes in self._watchers:
            changes.put_nowait(info)

    def health_changed(self, watched: Watched) -> None:
        """Note that a worker has stalled, was stopped, or makes progress again."""
        for rank in self.ranks.values():
            if rank.process is not None and rank.process.process is watched.process:
                rank.note_health(watched.health, watched.where)
                self.calls.freed(rank)

    # Deaths and replacements

    async def _keep(self, rank: Rank) -> None:
        """Replace the worker of a rank after each death; or end the group, without ``restart`` or in a crash loop."""
        cause = ""
        runs = rank.process is not None
        while True:
            if not runs and not await rank.bring_back(cause, lambda: self._start(rank)):
                self.end(self.processes.death(rank, f"a crash loop: {rank.history.story}"))
                return
            process = rank.process
            assert process is not None
            await process.ended.wait()
            runs = False
            self.calls.leave(rank)
            cause = (await self.processes.kill_now(process, CODE_WITHIN_S)).describe()
            failure = self.processes.death(rank)
            self.calls.remove(rank, failure)
            rank.cause = cause
            if not self.replaces:
                rank.enter("exited")
                self.end(failure)
                return
            rank.enter("waiting")
            if process.process.reason == BY_REQUEST:  # no death that the policy counts
                logger.info("%s; replacing it", cause)
                rank.history.restarts += 1
                cause = ""

    async def _start(self, rank: Rank) -> str:
        """Create the worker in a standby, or else in a new process; return the cause of a failure, or ""."""
        try:
            if rank.process is not None:
                self.processes.discard(rank.process)
            if self.standbys:
                process = self.standbys.pop(0)
            else:
                process = self.processes.start(rank.name, self._construction, rank.rank)
        except Exception as error:
            return f"worker {rank.rank} could not be started: {error}"
        rank.take_process(process)
        rank.enter("starting")
        cause = await self.processes.prepare(process, self._create(rank), "created")
        if not cause:
            logger.info("%s is worker %d: pid %d", process.name, rank.rank, process.pid)
        self.news.set()  # not before: the replacement comes before the next standby
        return cause

    async def _keep_standbys(self) -> None:
        """Keep as many standbys as are wanted: processes that have imported the worker's modules, without a rank."""
        life = Life(0, self._settings.restart or Restart())  # of all standbys
        cause = ""
        while True:
            self.news.clear()
            for process in [process for process in self.standbys if process.exited.done()]:
                self.standbys.remove(process)
                self.processes.discard(process)
                cause = process.exited.result().describe()
            if len(self.standbys) >= self.wanted_standbys:
                await self.news.wait()
            elif await life.bring_back(cause, self._start_standby):
                cause = ""
            else:
                logger.error("standbys are not restarted any more: %s", life.history.story)
                return

    async def _start_standby(self) -> str:
        name = f"{self._settings.name}_standby_{self._n_standbys}"
        self._n_standbys += 1
        try:
            process = self.processes.start(name, self._construction)
        except Exception as error:
            return f"a standby could not be started: {error}"
        cause = await self.processes.prepare(process, process.wait_imported(), "ready")
        if cause:
            with suppress(RoleError):  # killed, but not gone
                self.processes.discard(process)
            return f"{cause} before it was needed"
        self.standbys.append(process)
        return ""

    async def restart(self, number: int, timeout: float | None) -> None:
        """End a worker, and wait for its replacement; see `WorkerGroup.restart`."""
        self.check()  # the workers of a group that has ended are left alone
        rank = self.ranks[number]
        if rank.is_alive:
            process = rank.process
            assert process is not None
            self.calls.leave(rank)
            rank.enter("stopping")
            self.spawn(self._end(process), f"aioshm-restarts-worker-{number}")
        try:
            async with asyncio.timeout(timeout):
                await self._alive(rank)
                self.check()
        except TimeoutError:
            text = f"no replacement of {rank.describe()} within {timeout} s: {self.describe_absent()}"
            raise TimeoutError(text) from None

    async def _end(self, process: WorkerProcess) -> None:
        await give_back(lambda: process.process.end(BY_REQUEST))
        process.ended.set()  # even SIGKILL may have no effect

    # The number of workers

    async def scale(self, n_workers: int) -> None:
        """Change the number of workers, also if this is cancelled meanwhile."""
        await asyncio.wait([self.spawn(self._scale(n_workers), "aioshm-scales-workers")])
        self.check()

    async def _scale(self, n_workers: int) -> None:
        try:
            async with self.calls.lock:  # after earlier calls of all
                await self.calls.settled()
                if n_workers < len(self.ranks):
                    await self._shrink([self.ranks[rank] for rank in range(n_workers, len(self.ranks))])
                newcomers = self._add_ranks(n_workers)
                self.calls.update()
                for rank in newcomers:
                    rank.task = self.spawn(self._keep(rank), f"aioshm-keeps-worker-{rank.rank}")
                for rank in newcomers:
                    await self._alive(rank)
        except AioshmError:
            if self.failure is None:
                raise

    async def _shrink(self, leaving: list[Rank]) -> None:
        calls = self.calls
        for rank in leaving:
            rank.leaving = True
        await calls.drain(leaving)
        while not all(rank.present for rank in self.ranks.values()):  # one has died: its restart is not interrupted
            await calls.settled()
            await calls.drain(leaving)
        failure = EndClosed("the group of workers was made smaller")
        for rank in leaving:
            assert rank.task is not None
            rank.task.cancel()  # from here on the death does not matter
            calls.remove(rank, failure)
            del self.ranks[rank.rank]
            for call in rank.queue:
                call.finish(copy_error(failure))
        # The workers exit because their queues were closed.
        await _all(self.processes.stop_worker(rank.process) for rank in leaving if rank.process is not None)

    # The end

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a task of the group until it closes; a failure ends the group."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            text = f"{task.get_name()} has failed: {type(error).__name__}: {error}"
            logger.error("%s", text, exc_info=error)
            self.end(AioshmError(text))

    def end(self, failure: AioshmError) -> None:
        """Fail all present and later calls; only the first failure counts."""
        if self.failure is None:
            self.failure = failure
            if self.is_open:
                self.calls.end(failure)
            self._note_change(None)

    async def stop(self, patience: float) -> None:
        """Let the workers exit by themselves for that many seconds, then stop the remaining ones; after `end`.

        Cancelling this kills them.
        """
        closing = asyncio.create_task(self._close_queues(), name="aioshm-closes-workers")
        await self.processes.stop(closing, patience)
        closing.result()

    async def _close_queues(self) -> None:
        try:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            await self.calls.aclose()


def method_name(method: object) -> str:
    """Return the name of a method or function for error texts; raise `TypeError` if it is neither."""
    if isinstance(method, str) and method:
        return method
    if not callable(method):
        raise TypeError(f"method must be the name of a method, or a function, not {method!r}")
    return str(getattr(method, "__qualname__", repr(method)))


async def _all(works: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run coroutines concurrently; after a failure, cancel all and wait for them."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
