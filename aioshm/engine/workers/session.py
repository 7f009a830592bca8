"""A group of workers while it runs: workers are created, die, are replaced, leave and join."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from aioshm.engine.workers.calls import CallTable
from aioshm.engine.workers.messages import MessageCodec, method_name
from aioshm.engine.workers.processes import Settings, WorkerProcess, WorkerProcesses
from aioshm.engine.workers.rank import Rank
from aioshm.engine.workers.standbys import Standbys
from aioshm.errors import (
    AioshmError,
    CodecError,
    EndClosed,
    PeerClosed,
    PeerDied,
    RemoteFailure,
    WorkerError,
    copy_error,
)
from aioshm.process.background import completed, give_back, in_thread
from aioshm.process.restart import ALIVE, RankInfo, Restart
from aioshm.process.stalls import Watched
from aioshm.queue import MessageQueue

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
        self.ended: asyncio.Event = asyncio.Event()
        self.is_open: bool = False  # whether the processes and the calls exist
        self.replaces: bool = False  # whether dead workers are replaced: with ``restart``, after the start
        self.ranks: dict[int, Rank] = {}
        self._add_ranks(settings.n_workers)
        self.standbys: Standbys = Standbys(self, settings)
        self._tasks: set[asyncio.Task[None]] = set()
        self._watchers: set[asyncio.Queue[RankInfo | None]] = set()
        self._pickled = b""  # the call that creates a worker

    def _add_ranks(self, n_workers: int) -> list[Rank]:
        restart = self._settings.restart or Restart()
        added = []
        for rank in range(len(self.ranks), n_workers):
            self.ranks[rank] = Rank(rank, f"{self._settings.name}_{rank}", restart, self.worker_changed)
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
        self.calls = CallTable(self, broadcasts)
        self.is_open = True

    async def start(self) -> None:
        """Start the processes, and wait until every worker is created."""
        settings = self._settings
        call = settings.worker, settings.args, settings.kwargs
        try:
            async with asyncio.timeout(settings.ready_timeout) as scope:
                try:
                    self._pickled = await in_thread(lambda: pickle.dumps(call))
                except Exception as error:
                    text = f"worker, args and kwargs cannot be pickled: {type(error).__name__}: {error}"
                    raise CodecError(text) from error
                await self.calls.broadcasts.wait_until_ready()  # now workers can join
                for rank in self.ranks.values():
                    rank.take_process(self.processes.start(rank.name, rank.rank))
                    await asyncio.sleep(0)
                await self._create_all()
        except TimeoutError:
            if not scope.expired():
                raise
            names = self.describe(rank for rank, each in self.ranks.items() if not each.present)
            text = f"the start of the workers: no answer from {names} within {settings.ready_timeout} s"
            raise TimeoutError(text) from None
        self.replaces = settings.restart is not None
        if not self.replaces:
            self._pickled = b""
        self.standbys.fill()

    async def _create_all(self) -> None:
        results = await _all(self._create_first(rank) for rank in self.ranks.values())
        failures = {rank: failure for rank, failure in zip(self.ranks, results, strict=True) if failure is not None}
        if failures:
            raise WorkerError(method_name(self._settings.worker), failures)

    async def _create_first(self, rank: Rank) -> RemoteFailure | None:
        """Create a worker at the start; raise the exit of a process that dies meanwhile."""
        try:
            return await self._create(rank)
        except AioshmError:  # some are an OSError, too
            raise
        except (EOFError, OSError):
            self.queue_ended(rank)
            await self.ended.wait()
            assert self.failure is not None
            raise copy_error(self.failure) from None

    async def _create(self, rank: Rank) -> RemoteFailure | None:
        """Create a worker's object, and open its queues; return the exception of its constructor."""
        process = rank.process
        assert process is not None
        await process.handle()
        await process.control.send((rank.rank, self._pickled))
        failure: RemoteFailure | None = await process.control.receive()
        if failure is None:
            await self.connect(rank, process)
        return failure

    async def connect(self, rank: Rank, process: WorkerProcess) -> None:
        """Open the queues of a worker that was constructed, and start to send calls to it."""
        options = msgspec.structs.replace(
            self._settings.options, on_reader_death="raise", max_readers=None, slow_reader="block", prefault_bytes=0
        )
        async with AsyncExitStack() as unused:
            requests = MessageQueue(1, 1, None, *self._settings.sizes, codec=MessageCodec(), options=options)
            unused.push_async_callback(requests.aclose)
            await process.control.send((self.calls.broadcasts.export_handle(), requests.export_handle()))
            replies = MessageQueue.create_from_handle(await process.handle(), 0, codec=MessageCodec(), options=options)
            unused.push_async_callback(replies.aclose)
            admitting = asyncio.create_task(requests.wait_until_ready())
            try:
                await replies.wait_until_ready()
                await process.control.receive()  # the worker has attached to both of its queues
                await admitting
            except (PeerClosed, PeerDied):  # the worker is ending: the reason is in its standard error
                raise EOFError from None
            finally:
                admitting.cancel()
            if process.exited.done():
                raise EOFError
            unused.pop_all()
        self.calls.add(rank, requests, replies)
        self.processes.progress.add(process.name, process.process)

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
        return ", ".join(self.ranks[rank].describe() for rank in sorted(ranks))

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

    async def membership(self) -> AsyncIterator[RankInfo]:
        """Yield the changes of the workers from now on, until the group ends."""
        changes: asyncio.Queue[RankInfo | None] = asyncio.Queue()
        if self.failure is None:
            self._watchers.add(changes)
        try:
            while self.failure is None and (change := await changes.get()) is not None:
                yield change
        finally:
            self._watchers.discard(changes)

    def worker_changed(self, info: RankInfo | None) -> None:
        """Report a change to the iterators of `membership`; None: the group has ended."""
        for changes in self._watchers:
            changes.put_nowait(info)

    def health_changed(self, watched: Watched) -> None:
        """Note that a worker has stalled, was stopped, or makes progress again."""
        for rank in self.ranks.values():
            if rank.process is not None and rank.process.process is watched.process:
                rank.note_health(watched.health, watched.where)
                self.calls.schedule.freed(rank)

    # Deaths and replacements

    def processes_exited(self, gone: list[WorkerProcess]) -> None:
        """Fail the calls in flight on dead workers, and replace the workers; or end the group."""
        dead = [rank for rank in self.ranks.values() if rank.process in gone]
        if not self.replaces:
            for rank in dead:
                rank.cause = rank.exit.describe()
                rank.enter("exited")
            self.end(self.processes.death(dead))
            return
        for process in gone:
            self.standbys.died(process)
        for rank in dead:
            if rank.present:  # else the task that starts the worker handles the exit
                self._replace_dead(rank)

    def _replace_dead(self, rank: Rank) -> None:
        assert rank.process is not None
        self.calls.died(rank, self.processes.death([rank]))
        cause = rank.exit.describe()
        rank.cause = cause
        rank.enter("waiting")
        if rank.process.process.reason == BY_REQUEST:  # no death that the policy counts
            logger.info("%s; replacing it", cause)
            rank.history.restarts += 1
            cause = ""
        self._bring_back(rank, cause)

    def _bring_back(self, rank: Rank, cause: str = "") -> asyncio.Task[None]:
        """Start a process for a rank until the worker is ready; return the task that does."""

        async def bring_back() -> None:
            if not await rank.bring_back(cause, lambda: self._start(rank)):
                self.end(self.processes.death([rank], f"a crash loop: {rank.history.story}"))

        rank.task = self.spawn(bring_back(), f"aioshm-replaces-worker-{rank.rank}")
        return rank.task

    async def _start(self, rank: Rank) -> str:
        """Create the worker in a standby, or else in a new process; return the cause of a failure, or ""."""
        if rank.process is not None:
            self.processes.discard(rank.process)
        if self.standbys.ready:
            process = self.standbys.ready.pop(0)
        else:
            try:
                process = self.processes.start(rank.name, rank.rank)
            except Exception as error:
                return f"worker {rank.rank} could not be started: {error}"
        rank.take_process(process)
        rank.enter("starting")
        cause = await self.processes.prepare(process, self._create_again(rank), "created")
        if not cause:
            logger.info("%s is worker %d: pid %d", process.name, rank.rank, process.pid)
        self.standbys.fill()  # not before: the replacement comes first
        return cause

    async def _create_again(self, rank: Rank) -> str:
        try:
            failure = await self._create(rank)
        except AioshmError as error:
            return f"cannot attach to the queues of {rank.process}: {error}"
        if failure is not None:
            return f"{rank.process} could not be created: {failure}"
        return ""

    async def restart(self, number: int, timeout: float | None) -> None:
        """End a worker, and wait for its replacement; see `WorkerGroup.restart`."""
        self.check()  # the workers of a group that has ended are left alone
        rank = self.ranks[number]
        if rank.is_alive:
            assert rank.process is not None
            rank.enter("stopping")
            rank.task = self.spawn(_kill(rank.process), f"aioshm-restarts-worker-{number}")
        try:
            async with asyncio.timeout(timeout):
                while not rank.is_alive:
                    assert rank.task is not None
                    await asyncio.wait([rank.task])
                    self.check()
                    if self.ranks.get(number) is not rank:
                        raise EndClosed("the group of workers was made smaller")
        except TimeoutError:
            text = f"no replacement of {rank.describe()} within {timeout} s: {self.describe_absent()}"
            raise TimeoutError(text) from None

    def queue_ended(self, rank: Rank) -> None:
        """Expect the exit of a worker after the end of its queue or socket."""
        assert rank.process is not None
        asyncio.get_running_loop().call_later(CODE_WITHIN_S, self._check_exited, rank, rank.process)

    def _check_exited(self, rank: Rank, process: WorkerProcess) -> None:
        if not process.exited.done() and self.failure is None and self.ranks.get(rank.rank) is rank:
            process.process.kill()

    # The number of workers

    async def scale(self, n_workers: int) -> None:
        """Change the number of workers, also if this is cancelled meanwhile."""
        await asyncio.wait([self.spawn(self._scale(n_workers), "aioshm-scales-workers")])
        self.check()

    async def _scale(self, n_workers: int) -> None:
        calls = self.calls
        try:
            async with calls.lock:  # after earlier calls of all
                await calls.all_present()
                if n_workers < len(self.ranks):
                    await self._shrink([self.ranks[rank] for rank in range(n_workers, len(self.ranks))])
                newcomers = self._add_ranks(n_workers)
                calls.note_presence()
                if newcomers:
                    await asyncio.wait([self._bring_back(rank) for rank in newcomers])
        except AioshmError:
            if self.failure is None:
                raise

    async def _shrink(self, leaving: list[Rank]) -> None:
        calls = self.calls
        for rank in leaving:
            rank.leaving = True
        await calls.drain(leaving)
        while not all(rank.present for rank in self.ranks.values()):  # one has died: its restart is not interrupted
            await calls.all_present()
            await calls.drain(leaving)
        failure = EndClosed("the group of workers was made smaller")
        processes = []
        for rank in leaving:
            assert rank.process is not None
            processes.append(rank.process)
            del self.ranks[rank.rank]  # from here on the death does not matter
            if rank.task is not None:
                rank.task.cancel()
            calls.died(rank, failure)
        # The workers exit because their queues were closed.
        await _all(self.processes.stop_worker(process) for process in processes)

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
            self.ended.set()
            if self.is_open:
                self.calls.end(failure)
            self.worker_changed(None)

    async def stop(self, patience: float) -> None:
        """Let the workers exit by themselves for that many seconds, then stop the remaining ones; after `end`.

        Cancelling this kills them.
        """
        closing = asyncio.create_task(self._close_queues(), name="aioshm-closes-workers")
        try:
            await completed(closing)
        except asyncio.CancelledError:
            await self.processes.kill()
            raise
        await self.processes.stop(patience)
        closing.result()

    async def _close_queues(self) -> None:
        try:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            await self.calls.aclose()


async def _kill(process: WorkerProcess) -> None:
    await give_back(lambda: process.process.end(BY_REQUEST))
    await asyncio.wait([process.exited])  # from then on the rank has the task that replaces the worker


async def _all(works: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run coroutines concurrently; after a failure, cancel all and wait for them."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
