"""The workers of one engine: a step goes to all of them through one queue, each answers through one of its own."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn, Self

import msgspec

from aioshm.arguments import check_int, check_seconds
from aioshm.closing import AsyncClosing
from aioshm.config import Options
from aioshm.engine.metering import meter_of, metered
from aioshm.engine.stats import WorkerGroupStats
from aioshm.engine.workers.answers import WorkerAnswers, WorkerLost
from aioshm.engine.workers.crew import Member, WorkerCrew
from aioshm.engine.workers.process import Leave, LoopFactory, Step
from aioshm.engine.workers.replacing import Replacing
from aioshm.errors import AioshmError, EndClosed, PeerDied, QueueClosed, RoleError, WorkerError
from aioshm.process.limits import naming_limits
from aioshm.process.restart import RankInfo, Restart
from aioshm.process.stopping import SHUTDOWN_TIMEOUT_S
from aioshm.queue import MessageQueue
from aioshm.queue.base import MAX_CHUNK_BYTES, MAX_CHUNKS
from aioshm.queue.ends.waiting import deadline_after

CODE_WITHIN_S = 1.0
"""How long a worker whose queue is closed may take to exit, before it is told without its exit code."""


class WorkerGroup(AsyncClosing):
    """Worker processes that are called together, such as the ranks of a tensor-parallel model.

        async with WorkerGroup(Worker, 2, kwargs={"model": path}) as group:
            results = await group.collective_rpc("step", (batch,))

    In each process ``worker(*args, rank=rank, **kwargs)`` makes an object; if that is awaitable, it is awaited. Its
    methods may be coroutines; a worker does one call at a time, in the order of the calls. If it has a method
    ``close``, that is called when the group is closed. Entering the block starts the processes and waits until every
    worker is made.

    The processes exit with this one, however that happens. If one of them exits while the group is open, each call that
    waits raises `WorkerDied`, and so does every later one: what is left of the group is only good for being closed.
    With ``restart`` only the call in flight does: a standby or a new process takes the rank, is made by ``worker``
    anew, and the next call waits for that. Workers that cannot go on without the one before, since they share a state
    or are in the midst of a collective operation, are better off without. An exception in a worker is no death: the
    call raises `WorkerError`, and the group goes on.

    Args:
        worker: Makes a worker. It travels by pickle, as ``args`` and ``kwargs`` do.
        n_workers: How many.
        args: For ``worker``.
        kwargs: For ``worker``.
        name: The processes are ``{name}_0`` and so on.
        options: Of all queues between them and this process.
        max_chunk_bytes: Room for one message in each queue's ring, in bytes; larger ones take longer.
        max_chunks: How many messages of that size each ring has room for.
        ready_timeout: Seconds that starting may take; None: as long as it takes.
        shutdown_timeout: Seconds that workers may take to exit by themselves, and then once more when asked to.
        capture_stderr: See `ProcessManager`.
        loop_factory: Makes each worker's event loop, such as ``uvloop.new_event_loop``; None: asyncio's own. It travels
            by pickle, as ``worker`` does.
        restart: When workers that die are replaced, for each rank by itself; None: never. A crash loop ends the group.
        standbys: How many processes wait for a rank: they have imported ``worker``, and only make it.
        max_workers: How many workers `scale` may ask for; None: ``n_workers``.

    Raises:
        TypeError, ValueError: An argument makes no sense; the text names it.
    """

    def __init__(
        self,
        worker: Callable[..., Any],
        n_workers: int,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str = "Worker",
        options: Options | None = None,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        max_chunks: int = MAX_CHUNKS,
        ready_timeout: float | None = None,
        shutdown_timeout: float = SHUTDOWN_TIMEOUT_S,
        capture_stderr: bool = True,
        loop_factory: LoopFactory | None = None,
        restart: Restart | None = None,
        standbys: int = 0,
        max_workers: int | None = None,
    ) -> None:
        if not callable(worker):
            raise TypeError(f"worker must be callable, not {worker!r}")
        if loop_factory is not None and not callable(loop_factory):
            raise TypeError(f"loop_factory must be callable, or None, not {loop_factory!r}")
        if not isinstance(name, str) or not name:
            raise ValueError(f"name must be a string, and not empty, not {name!r}")
        self.n_workers: int = check_int("n_workers", n_workers, minimum=1)
        self._name = name
        self._options = Options.from_env() if options is None else options
        self._sizes = max_chunk_bytes, max_chunks
        self._construction: Step = worker, _arguments(args), _keywords(kwargs), None
        self._ready_timeout = None if ready_timeout is None else check_seconds("ready_timeout", ready_timeout)
        self._shutdown_timeout = check_seconds("shutdown_timeout", shutdown_timeout)
        self._capture_stderr = capture_stderr
        self._loop_factory = loop_factory
        self._restart = restart
        self._n_standbys = check_int("standbys", standbys, minimum=0)
        if standbys and restart is None:
            raise ValueError(f"standbys must be 0 without restart=Restart(...), not {standbys}")
        self._most = n_workers if max_workers is None else check_int("max_workers", max_workers, minimum=n_workers)
        self._replacing: Replacing | None = None
        self._absent: set[int] = set()  # ranks that wait for a successor
        self._whole = asyncio.Event()
        self._broken: Callable[[], AioshmError] | None = None  # why the call in flight fails
        self._watchers: set[asyncio.Queue[RankInfo | None]] = set()
        self._crew: WorkerCrew | None = None
        self._steps: MessageQueue | None = None
        self._answers = WorkerAnswers(self._options)
        self._calls = 0  # that were sent
        self._line = asyncio.Lock()
        self._scope: asyncio.Timeout | None = None  # of the call whose turn it is
        self._failure: Callable[[], AioshmError] | None = None
        self._failed = asyncio.Event()
        self._closed = False
        self._pid = os.getpid()

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, by rank; none before they are started."""
        return self._crew.pids if self._crew is not None else []

    # Calls

    @metered
    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Call a method of every worker; wait until all have answered.

        Calls of several tasks are served one after the other, in their order. A call that is cancelled, or takes too
        long, goes on in the workers, and the next one is only begun when they are done with it; its answers are
        nobody's. Results arrive as pickle has them; arrays and tensors of any size as copies of their own.

        Args:
            method: The name of the method; or a function that pickle can find in the workers, called with the worker
                before ``args``.
            args: For the method.
            kwargs: For the method.
            timeout: Seconds, the wait for earlier calls included; None: as long as it takes.
            unique_reply_rank: The one worker whose result is wanted; the others only say that they are done.

        Returns:
            The results by rank, or the one that is wanted.

        Raises:
            WorkerError: Workers raised exceptions.
            WorkerDied: One has exited.
            CodecError, MessageTooLarge, SharedMemoryError: The arguments cannot be sent; no worker has seen them.
            TimeoutError: It took too long; the text says which workers have not answered.
            QueueClosed: The group was closed.
            RoleError: The group was not entered.
        """
        if not callable(method) and not (isinstance(method, str) and method):
            raise TypeError(f"method must be the name of a method, or a function, not {method!r}")
        if (
            unique_reply_rank is not None
            and check_int("unique_reply_rank", unique_reply_rank, minimum=0) >= self.n_workers
        ):
            raise ValueError(f"unique_reply_rank must be below {self.n_workers}, not {unique_reply_rank}")
        deadline_after(timeout)  # refuses what is none
        step = method, _arguments(args), _keywords(kwargs), unique_reply_rank
        missing: set[int] = set()  # filled when it is its turn
        async with self._turn(_named(method), timeout, missing):
            results = await self._exchange(step, missing)
        return results if unique_reply_rank is None else results[unique_reply_rank]

    @property
    def workers(self) -> tuple[RankInfo, ...]:
        """The workers, by rank; none before they are started, or without ``restart``."""
        return self._replacing.workers if self._replacing is not None else ()

    @property
    def standbys(self) -> int:
        """How many standbys can take a rank at once."""
        return self._replacing.standbys if self._replacing is not None else 0

    def stats(self) -> WorkerGroupStats:
        """Return what the group has done so far; from any thread."""
        return WorkerGroupStats(self._name, self.n_workers, self.standbys, self.workers, meter_of(self).stats())

    async def membership(self) -> AsyncIterator[RankInfo]:
        """Iterate over what becomes of the workers from now on, with ``async for``, until the group ends."""
        changes: asyncio.Queue[RankInfo | None] = asyncio.Queue()
        if self._failure is None:
            self._watchers.add(changes)
        try:
            while self._failure is None and (change := await changes.get()) is not None:
                yield change
        finally:
            self._watchers.discard(changes)

    async def scale(self, n_workers: int) -> None:
        """Have more workers, or fewer: the last ones go when they have done the calls before this one.

        Args:
            n_workers: How many there are to be.

        Raises:
            RoleError: The group has no ``restart``, or was not entered.
            ValueError: It is more than ``max_workers``.
            WorkerDied, QueueClosed: The group has ended.
        """
        check_int("n_workers", n_workers, minimum=1)
        if n_workers > self._most:
            raise ValueError(f"n_workers must be at most max_workers, which is {self._most}, not {n_workers}")
        if self._replacing is None or self._crew is None:
            raise RoleError("a group can be scaled that has restart=Restart(...), and was entered")
        replacing, crew = self._replacing, self._crew
        async with self._turn("scale", None, set()):
            leaving = frozenset(range(n_workers, self.n_workers))
            if leaving:
                self.n_workers = n_workers
                for rank in leaving:
                    replacing.remove(rank)
                await self._exchange((Leave(leaving), (), {}, None), set(range(n_workers)))
                await asyncio.gather(*(crew.stop_worker(rank, self._shutdown_timeout) for rank in leaving))
                for rank in leaving:
                    self._answers.detach(rank)
                await self._answers.close_former()
            newcomers = range(self.n_workers, n_workers)
            self._absent |= {*newcomers}
            tasks = [replacing.add(rank) for rank in newcomers]
            self.n_workers = n_workers
            if tasks:
                self._whole.clear()
                await asyncio.gather(*map(asyncio.shield, tasks))

    async def join_first(self) -> AioshmError | None:
        """Wait until a worker has exited, also while there are no calls; return what calls raise from then on.

        With ``restart`` it waits for a crash loop. None if the group was closed. Cancelling this changes nothing.
        """
        await self._failed.wait()
        assert self._failure is not None
        error = self._failure()
        return None if isinstance(error, QueueClosed) else error

    @asynccontextmanager
    async def _turn(self, what: str, timeout: float | None, missing: set[int]) -> AsyncIterator[None]:
        """Wait for this call's turn; end the block when time is up, or the group is broken."""
        if self._crew is None and not self._closed:
            raise RoleError("the group was not entered: use `async with`")
        waits = "waits for the calls before it"
        try:
            async with asyncio.timeout(timeout) as scope, self._line:
                if self._absent:
                    waits = "waits for the successors of workers that have died"
                    await self._whole.wait()
                waits = ""
                if self._failure is not None:
                    raise self._failure()
                self._broken = None
                missing.update(range(self.n_workers))
                self._scope = scope
                try:
                    yield
                finally:
                    self._scope = None
        except TimeoutError:
            if not scope.expired():
                raise
            if (failure := self._failure or (None if waits else self._broken)) is not None:
                raise failure() from None
            assert self._crew is not None
            waits = waits or f"no answer from {self._crew.describe(sorted(missing))}"
            raise TimeoutError(f"{what}: {waits} within {timeout} s") from None

    async def _exchange(self, step: Step, missing: set[int]) -> list[Any]:
        assert self._steps is not None
        try:
            await self._steps.enqueue(step)
            self._calls += 1  # not if that was cancelled or refused: then nothing was sent
            results, errors = await self._answers.collect(self._calls - 1, missing)
        except (PeerDied, WorkerLost) as error:
            await self._lost(error.rank)
        if errors:
            raise WorkerError(_named(step[0]), dict(sorted(errors.items())))
        return results

    # Death

    def _processes_exited(self, gone: list[Member]) -> None:
        assert self._crew is not None
        if self._replacing is None:
            self._break_off(self._crew.death())
            return
        for member in gone:
            rank = member.rank
            if rank is not None and rank not in self._absent and rank < self.n_workers:
                self._absent.add(rank)
                self._whole.clear()
                self._break_call(self._crew.death_of(member))
            self._replacing.died(member)

    def _worker_back(self, rank: int) -> None:
        self._absent.discard(rank)
        if not self._absent:
            self._whole.set()

    def _worker_changed(self, info: RankInfo) -> None:
        for changes in self._watchers:
            changes.put_nowait(info)

    async def _lost(self, rank: int) -> NoReturn:
        """Raise what has become of a worker whose queue is closed or broken."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CODE_WITHIN_S):
                await self._failed.wait()  # with ``restart``, the end of this call interrupts that
        if self._failure is None:
            assert self._crew is not None
            self._break_off(self._crew.death(rank))
        assert self._failure is not None
        raise self._failure()

    def _break_call(self, failure: Callable[[], AioshmError]) -> None:
        """Let the call in flight, if there is one, raise an error."""
        if self._scope is not None and not self._scope.expired() and self._broken is None:
            self._broken = failure
            self._scope.reschedule(0)

    def _break_off(self, failure: Callable[[], AioshmError]) -> None:
        """Answer every call, the waiting ones too, with an error from now on."""
        if self._failure is None:
            self._failure = failure
            self._failed.set()
            self._whole.set()
            for changes in self._watchers:
                changes.put_nowait(None)
            if self._scope is not None and not self._scope.expired():
                self._scope.reschedule(0)

    # Starting and closing

    async def __aenter__(self) -> Self:
        if self._crew is not None or self._closed:
            raise RoleError("a group can be entered only once")
        try:
            with naming_limits(f"{self!r}"):
                await self._start()
        except BaseException:
            await self._stop(0)
            raise
        return self

    async def _start(self) -> None:
        everybody = set(range(self.n_workers))
        this: WorkerGroup = weakref.proxy(self)  # the loop holds on to what it calls; a forgotten group shall end
        options = self._options
        if self._restart is not None:
            options = msgspec.structs.replace(options, on_reader_death="evict", max_readers=self._most)
        self._steps = MessageQueue(self.n_workers, self.n_workers, None, *self._sizes, options=options)
        self._crew = WorkerCrew(
            self._name,
            self.n_workers,
            self._steps.export_handle(),
            self._sizes,
            self._options,
            shutdown_timeout=self._shutdown_timeout,
            capture_stderr=self._capture_stderr,
            loop_factory=self._loop_factory,
            on_exit=lambda gone: this._processes_exited(gone),
        )
        missing = set(everybody)
        async with self._turn("the start of the workers", self._ready_timeout, missing):
            try:
                for rank, member in self._crew.workers.items():
                    self._crew.place(member, rank)
                for rank, member in self._crew.workers.items():
                    await member.message()
                    self._answers.attach(rank, await member.message())
                    missing.discard(rank)
            except (EOFError, OSError):
                await self._lost(min(missing))
            missing |= everybody
            await self._exchange(self._construction, missing)
        if self._restart is not None:
            self._replacing = Replacing(
                self._crew,
                self._answers,
                self._restart,
                self._n_standbys,
                self._construction,
                lambda: this._calls,
                self._ready_timeout,
                on_back=lambda rank: this._worker_back(rank),
                on_end=lambda failure: this._break_off(failure),
                on_change=lambda info: this._worker_changed(info),
            )

    async def aclose(self) -> None:
        """Let the workers exit by themselves, then stop what is left; calls that wait raise `QueueClosed`. Idempotent.

        Cancelling this stops them at once, and nothing is left. If one has died, the others are not waited for either:
        they may be waiting for it.
        """
        if self._pid != os.getpid():  # a forked child's copy: the workers are the parent's
            self._closed = True
        if not self._closed:
            await self._stop(0 if self._failure is not None else self._shutdown_timeout)

    async def _stop(self, patience: float) -> None:
        self._closed = True
        if self._crew is not None:
            self._crew.forget()
        self._break_off(lambda: EndClosed("the group of workers was closed"))
        try:
            if self._replacing is not None:
                await self._replacing.aclose()
            if self._steps is not None:
                await self._steps.aclose()
        finally:
            try:
                if self._crew is not None:
                    await self._crew.stop(patience)
            finally:
                await self._answers.aclose()

    def __repr__(self) -> str:
        return f"<WorkerGroup of {self.n_workers} {self._name} processes{', closed' if self._closed else ''}>"


def _named(method: str | Callable[..., Any]) -> str:
    return method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))


def _arguments(args: object) -> tuple[Any, ...]:
    if not isinstance(args, Sequence) or isinstance(args, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"args must be a sequence of arguments, not {args!r}")
    return tuple(args)


def _keywords(kwargs: object) -> dict[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a mapping, not {kwargs!r}")
    return dict(kwargs)
