"""A group of workers while it runs: workers are created, die, are replaced, leave and join."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, suppress
from typing import Any, NoReturn, TypeVar

import msgspec

from aioshm.engine.workers.calls import CallTable
from aioshm.engine.workers.messages import MessageCodec, method_name
from aioshm.engine.workers.processes import Settings, WorkerProcess, WorkerProcesses
from aioshm.engine.workers.replacement import Replacer
from aioshm.errors import AioshmError, CodecError, EndClosed, RemoteFailure, WorkerError
from aioshm.process.background import completed, in_thread
from aioshm.process.restart import Life, RankInfo, Restart
from aioshm.process.stalls import Watched
from aioshm.queue import MessageQueue

T = TypeVar("T")

CODE_WITHIN_S = 1.0
"""How long a worker with a closed queue may take to exit. After that it is killed."""

logger: logging.Logger = logging.getLogger("aioshm.engine")


class Session:
    """A group while it runs; on its loop."""

    processes: WorkerProcesses
    calls: CallTable

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.n_workers: int = settings.n_workers
        self.callable: int = settings.n_workers  # without workers that leave
        self.failure: Callable[[], AioshmError] | None = None  # of every later call
        self.ended: asyncio.Event = asyncio.Event()
        self.is_open: bool = False  # whether the processes and the calls exist
        self.lives: dict[int, Life] = {}  # by rank; none before the workers are created
        self.replacer: Replacer | None = None  # not without ``restart``, nor before the start
        self._tasks: set[asyncio.Task[None]] = set()
        self._watchers: set[asyncio.Queue[RankInfo | None]] = set()
        self._own_options = msgspec.structs.replace(
            settings.options, on_reader_death="raise", max_readers=None, slow_reader="block", prefault_bytes=0
        )
        self._pickled = b""  # the call that creates a worker

    def check(self) -> None:
        """Raise the error if the group has ended."""
        if self.failure is not None:
            raise self.failure()

    def open(self) -> None:
        """Create the queue of calls of all workers; processes are started later."""
        settings = self._settings
        options = settings.options
        if settings.restart is not None:
            options = msgspec.structs.replace(options, on_reader_death="evict", max_readers=settings.max_workers)
        n_workers = settings.n_workers
        broadcasts = MessageQueue(n_workers, n_workers, None, *settings.sizes, codec=MessageCodec(), options=options)
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
                await self.processes.start_workers(self.n_workers)
                await self._create_all()
        except TimeoutError:
            if not scope.expired():
                raise
            workers = self.processes.workers
            ranks = range(self.n_workers)
            late = [rank for rank in ranks if rank not in workers or not workers[rank].constructed]
            # Without late constructors: workers wait for each other to attach.
            names = self.processes.describe(late or ranks)
            text = f"the start of the workers: no answer from {names} within {settings.ready_timeout} s"
            raise TimeoutError(text) from None
        for rank, worker in self.processes.workers.items():
            self.lives[rank] = Life(rank, settings.restart or Restart(), self.worker_changed, worker.pid)
            self.processes.watch_progress(worker)
        if settings.restart is None:
            self._pickled = b""
        else:
            self.replacer = Replacer(self, settings, settings.restart)

    async def _create_all(self) -> None:
        workers = self.processes.workers
        results = await _all(self._step(self.construct, worker) for worker in workers.values())
        failures = {rank: failure for rank, failure in zip(workers, results, strict=True) if failure is not None}
        if failures:
            raise WorkerError(method_name(self._settings.worker), failures)
        # Not earlier: a constructor may take long, and the queue would report its missing readers meanwhile.
        self.spawn(self._admit(), "aioshm-admits-workers")
        await _all(self._step(self.connect, worker) for worker in workers.values())

    async def _step(self, step: Callable[[WorkerProcess], Coroutine[Any, Any, T]], worker: WorkerProcess) -> T:
        """Run a step of the start; raise the exit of a dead process."""
        assert worker.rank is not None
        try:
            return await step(worker)
        except AioshmError:  # some are an OSError, too
            raise
        except (EOFError, OSError):
            await self.lost(worker.rank)

    async def _admit(self) -> None:
        """Let the first workers attach to the queue of calls of all workers."""
        with suppress(AioshmError):  # a worker has died: the process watch reports the exit
            await self.calls.broadcasts.wait_until_ready()

    async def construct(self, worker: WorkerProcess) -> RemoteFailure | None:
        """Create the object of a worker; return the exception of its constructor."""
        await worker.handle()
        await worker.control.send((worker.rank, self._pickled))
        failure: RemoteFailure | None = await worker.control.receive()
        worker.constructed = True
        return failure

    async def connect(self, worker: WorkerProcess) -> None:
        """Open the queues of a worker that was constructed, and start to send calls to it."""
        assert worker.rank is not None
        options = self._own_options
        async with AsyncExitStack() as unused:
            requests = MessageQueue(1, 1, None, *self._settings.sizes, codec=MessageCodec(), options=options)
            unused.push_async_callback(requests.aclose)
            await worker.control.send((self.calls.broadcasts.export_handle(), requests.export_handle()))
            replies = MessageQueue.create_from_handle(await worker.handle(), 0, codec=MessageCodec(), options=options)
            unused.push_async_callback(replies.aclose)
            admitting = asyncio.create_task(requests.wait_until_ready())
            try:
                await replies.wait_until_ready()
                await worker.control.receive()  # the worker has attached to both of its queues
                await admitting
            finally:
                admitting.cancel()
            if worker.exited.done():
                raise EOFError
            unused.pop_all()
        self.calls.add(worker.rank, requests, replies)

    # Changes of the workers

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

    @property
    def workers(self) -> tuple[RankInfo, ...]:
        """The states of the workers, by rank."""
        return tuple(life.info for _, life in sorted(self.lives.items()))

    def worker_changed(self, info: RankInfo | None) -> None:
        """Report a change to the iterators of `membership`; None: the group has ended."""
        for changes in self._watchers:
            changes.put_nowait(info)

    def health_changed(self, rank: int, watched: Watched) -> None:
        """Note that a worker has stalled, was stopped, or makes progress again."""
        life = self.lives.get(rank)
        if life is not None and life.is_alive:
            life.note_health(watched.health, watched.where)
            self.calls.schedule.set_late(rank, late=watched.health != "running")

    def processes_exited(self, gone: list[WorkerProcess]) -> None:
        """Fail the calls in flight on dead workers, and replace the workers; or end the group."""
        if self.replacer is None:
            for worker in gone:
                if worker.rank in self.lives:
                    self.lives[worker.rank].cause = worker.exit().describe()
                    self.lives[worker.rank].enter("exited")
            self.end(self.processes.death())
            return
        for worker in gone:
            rank = worker.rank
            if rank is not None and rank not in self.calls.absent and rank < self.n_workers:
                self.calls.mark_absent([rank])
                self.calls.died(rank, self.processes.death(rank))
            self.replacer.died(worker)

    def queue_ended(self, rank: int) -> None:
        """Expect the exit of a worker after the end of its queue or socket."""
        worker = self.processes.workers.get(rank)
        if worker is not None:  # else it was asked to exit
            asyncio.get_running_loop().call_later(CODE_WITHIN_S, self._check_exited, rank, worker)

    def _check_exited(self, rank: int, worker: WorkerProcess) -> None:
        if not worker.exited.done() and self.failure is None and rank in self.processes.workers:
            worker.process.kill()

    async def lost(self, rank: int) -> NoReturn:
        """Raise the exit of a worker after the end of its queue or socket. For groups without ``restart``."""
        self.queue_ended(rank)
        await self.ended.wait()
        assert self.failure is not None
        raise self.failure()

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
            self.end(lambda: AioshmError(text))

    async def scale(self, n_workers: int, replacer: Replacer) -> None:
        """Change the number of workers, also if this is cancelled meanwhile."""
        task = self.spawn(self._scale(n_workers, replacer), "aioshm-scales-workers")
        await asyncio.wait([task])
        self.check()

    async def _scale(self, n_workers: int, replacer: Replacer) -> None:
        calls = self.calls
        try:
            async with calls.lock:  # after earlier calls of all
                await calls.all_present()
                if n_workers < self.n_workers:
                    await self._shrink(n_workers, replacer)
                newcomers = range(self.n_workers, n_workers)
                calls.mark_absent(newcomers)
                self.n_workers = self.callable = n_workers
                if newcomers:
                    await asyncio.wait([replacer.add(rank) for rank in newcomers])
        except AioshmError:
            if self.failure is None:
                raise

    async def _shrink(self, n_workers: int, replacer: Replacer) -> None:
        calls = self.calls
        leaving = range(n_workers, self.n_workers)
        self.callable = n_workers
        await calls.drain(leaving)
        while calls.absent:  # a worker has died meanwhile: its restart is not interrupted
            await calls.all_present()
            await calls.drain(leaving)
        self.n_workers = n_workers
        for rank in leaving:
            replacer.remove(rank)  # from here on their deaths do not matter
            calls.forget(rank, lambda: EndClosed("the group of workers was made smaller"))
        calls.mark_present(leaving)
        # The workers exit because their queues were closed.
        await _all(self.processes.stop_worker(rank) for rank in leaving)

    # The end

    def end(self, failure: Callable[[], AioshmError]) -> None:
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


async def _all(works: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run coroutines concurrently; after a failure, cancel all and wait for them."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
