"""The workers of one engine: called together through one queue, or one of them through a queue of its own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self

from aioshm.arguments import check_int, check_plain, check_seconds, check_timeout, check_type
from aioshm.closing import AsyncClosing
from aioshm.config import Options
from aioshm.engine.stats import Meter, WorkerGroupStats
from aioshm.engine.workers.calls import Call
from aioshm.engine.workers.processes import Settings
from aioshm.engine.workers.session import Session, method_name
from aioshm.engine.workers.stream import WorkerStream
from aioshm.engine.workers.worker import LoopFactory, Request
from aioshm.errors import AioshmError, EndClosed, QueueClosed, RoleError, copy_error
from aioshm.process.limits import naming_limits
from aioshm.process.placement import Placement, check_placement
from aioshm.process.restart import RankInfo, Restart
from aioshm.process.stopping import SHUTDOWN_TIMEOUT_S
from aioshm.queue.base import MAX_CHUNK_BYTES, MAX_CHUNKS

PREFETCH = 16
"""How many items the generator of a stream may be ahead of its consumer."""


class WorkerGroup(AsyncClosing):
    """Worker processes that are called together, such as the ranks of a tensor-parallel model, or one by one.

        async with WorkerGroup(Worker, 2, kwargs={"model": path}) as group:
            results = await group.broadcast("step", batch)
            text = await group.call_any("tokenize", prompt)

    Entering the block starts the processes. Each process calls ``worker(*args, rank=rank, **kwargs)`` to create an
    object, without ``rank`` if ``worker`` has no such parameter; an awaitable result is awaited. The object's methods
    may be coroutines. A worker runs one call at a time, in the order of sending: calls of all workers and its own
    calls. If the object has a method ``close``, closing the group calls it.

    The processes exit with this process, in whatever way it ends. If a worker exits while the group is open, each
    waiting call raises `WorkerDied`, and so does every later call: the group can only be closed then. With ``restart``
    only the calls in flight fail (`call` and `stream`: those of that worker): a standby or a new process takes the
    rank, ``worker`` creates a new object, and the next call waits for it. Use no ``restart`` for workers that share
    state or a collective operation with the dead one. An exception in a method is no death: the call raises
    `WorkerError`, and the group continues.

    A worker is stalled if a method does not return, a plain generator does not yield, or its event loop is blocked, for
    ``options.stall_warning_s``. The log names the worker and its line of Python, and its state in `workers` is
    ``"stalled"``; or ``"stopped"``, after SIGSTOP. A method that takes long announces that by
    `aioshm.progress.expect`. ``Restart(hang_s=)`` kills and replaces stalled workers; `restart` does so on demand.

    Args:
        worker: Creates a worker. The group pickles it with ``args`` and ``kwargs`` once when it starts, and with
            ``restart`` keeps the result for every replacement: later changes have no effect. Pickling blocks the loop
            if the arguments have more than a few MiB or hundreds of thousands of objects.
        n_workers: The number of workers.
        args: Positional arguments of ``worker``.
        kwargs: Keyword arguments of ``worker``, without ``rank``.
        name: Name of the processes: ``{name}_0`` and so on.
        options: Options of all queues between the workers and this process; ``stall_warning_s`` holds for the workers,
            too.
        max_chunk_bytes: Room for one message in each queue's ring, in bytes; larger messages take longer.
        max_chunks: How many messages of that size each ring has room for.
        ready_timeout: Seconds that the start may take, and with ``restart`` each replacement and standby, imports
            included. A replacement that takes longer is killed, which counts as a death. None: no limit.
        shutdown_timeout: Seconds that workers may take to exit by themselves, and then once more after SIGTERM.
        capture_stderr: See `ProcessManager`.
        loop_factory: Creates each worker's event loop, such as ``uvloop.new_event_loop``; None: asyncio's own. Must be
            picklable.
        restart: When dead workers are replaced, for each rank by itself; None: never. A crash loop ends the group.
        standbys: How many processes wait for a rank: they have imported ``worker``, and only need to call it.
        max_workers: Upper limit for `scale`; None: ``n_workers``.
        placement: Environment, CPUs and NUMA node of each worker, by its rank; see `Placement`. A standby has no rank
            when it starts, so ``standbys`` need a placement that is the same for all ranks.

    Raises:
        TypeError, ValueError: An argument is invalid; the text names it.
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
        placement: Placement | None = None,
    ) -> None:
        if not callable(worker):
            raise TypeError(f"worker must be callable, not {worker!r}")
        if loop_factory is not None and not callable(loop_factory):
            raise TypeError(f"loop_factory must be callable, or None, not {loop_factory!r}")
        check_plain("loop_factory", loop_factory)
        if not isinstance(name, str) or not name:
            raise ValueError(f"name must be a string, and not empty, not {name!r}")
        check_int("n_workers", n_workers, minimum=1)
        check_type("restart", restart, Restart)
        if check_int("standbys", standbys, minimum=0) and restart is None:
            raise ValueError(f"standbys must be 0 without restart=Restart(...), not {standbys}")
        placement = check_placement(placement, range(n_workers))
        if standbys and placement is not None and placement.depends_on_rank:
            raise ValueError(
                f"standbys must be 0 with a placement that depends on the rank, not {standbys}: a standby starts "
                "before it gets a rank, and environment variables cannot be changed afterwards"
            )
        keywords = _keywords(kwargs)
        if "rank" in keywords:
            raise ValueError(f"kwargs must not have rank, which each worker gets for itself, not {keywords['rank']!r}")
        self._settings = Settings(
            worker=worker,
            args=_arguments(args),
            kwargs=keywords,
            n_workers=n_workers,
            name=name,
            options=Options.from_env() if options is None else options,
            sizes=(max_chunk_bytes, max_chunks),
            ready_timeout=None if ready_timeout is None else check_seconds("ready_timeout", ready_timeout),
            shutdown_timeout=check_seconds("shutdown_timeout", shutdown_timeout),
            capture_stderr=capture_stderr,
            loop_factory=loop_factory,
            restart=restart,
            standbys=standbys,
            max_workers=n_workers if max_workers is None else check_int("max_workers", max_workers, minimum=n_workers),
            placement=placement,
        )
        self._session = Session(self._settings)
        self._calls = Meter()
        self._streams = Meter()
        self._closed = False
        self._pid = os.getpid()

    @property
    def n_workers(self) -> int:
        """How many workers there are."""
        return len(self._session.ranks)

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, by rank; none before they are started."""
        return [info.pid for info in self.workers if info.pid is not None]

    # Calls

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Call a method of every worker, and wait for all answers.

        Calls of several tasks run one by one, in their order. A call that is cancelled or times out continues
        in the workers, which begin the next one afterwards; its answers are dropped. Results are unpickled; arrays and
        tensors of any size are private copies.

        Args:
            method: The name of the method; or a function that pickle can find in the workers, called with the worker
                before ``args``.
            args: Positional arguments of the method.
            kwargs: Keyword arguments of the method.
            timeout: Seconds, including the wait for earlier calls; None waits for ever.
            unique_reply_rank: The only worker whose result is returned; all others only acknowledge.

        Returns:
            The results by rank, or the result of ``unique_reply_rank``.

        Raises:
            WorkerError: Workers raised exceptions.
            WorkerDied: A worker has exited.
            CodecError, MessageTooLarge, SharedMemoryError: The arguments cannot be sent; no worker has received them.
            TimeoutError: The call took too long; the text names the workers that have not answered.
            QueueClosed: The group was closed.
            RoleError: The group was not entered.
        """
        with self._calls.counting():
            name = method_name(method)
            if unique_reply_rank is not None:
                self._check_rank("unique_reply_rank", unique_reply_rank)
            check_timeout("timeout", timeout)
            request = Request(method, _arguments(args), _keywords(kwargs), reply_rank=unique_reply_rank)
            results = await self._entered().calls.call_all(Call(name, request, of_all=True), timeout)
            if unique_reply_rank is None:
                return results
            return results[unique_reply_rank]

    async def broadcast(
        self, method: str | Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of every worker, with the arguments as `call` takes them; return the results by rank.

        See `collective_rpc`, which takes the arguments as vLLM does.
        """
        results: list[Any] = await self.collective_rpc(method, args, kwargs, timeout)
        return results

    async def call(
        self, rank: int, method: str | Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Call a method of one worker.

        A worker runs one call at a time, in the order of sending, calls of all workers included; the workers run in
        parallel. Many tasks may call at the same time. With ``restart``, a call that was not sent before the death of
        its worker waits for the replacement.

        If the call is cancelled or times out, a queued call is dropped, a running coroutine method is cancelled at its
        ``await``, and any other method runs to its end.

        Args:
            rank: The worker.
            method: The name of the method; or a function that pickle can find in the worker, called with the worker
                before ``args``.
            args: Positional arguments of the method.
            timeout: Seconds, including all waits; None waits for ever.
            kwargs: Keyword arguments of the method.

        Returns:
            The result of the method.

        Raises:
            WorkerError: The method raised an exception.
            WorkerDied: The worker has exited before its answer, or the group has ended.
            CodecError, MessageTooLarge, SharedMemoryError: The arguments cannot be sent.
            TimeoutError: The call took too long; the text names the worker.
            QueueClosed: The group was closed.
            RoleError: The group was not entered.
            ValueError: There is no worker of this rank.
        """
        self._check_rank("rank", rank)
        return await self._call(rank, method, args, kwargs, timeout)

    async def call_any(
        self, method: str | Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Call a method on the worker that has been idle longest.

        Without an idle worker the call waits; waiting calls are served in order. A worker is idle when it has answered
        all calls, including those of `broadcast`, and has no stream. A worker under replacement is not idle; a new
        worker is. Nor is a stalled or stopped worker, until it makes progress again.

        Args, Returns, Raises: As `call`.
        """
        return await self._call(None, method, args, kwargs, timeout)

    def stream(
        self,
        rank: int | None,
        method: str | Callable[..., Any],
        /,
        *args: Any,
        timeout: float | None = None,
        prefetch: int = PREFETCH,
        **kwargs: Any,
    ) -> WorkerStream:
        """Iterate with ``async for`` over the items that a method of one worker yields.

        The method is a generator, an asynchronous generator, or returns another iterable. It is called in the order of
        `call`. Then the stream runs beside other calls, which the worker serves between two items, and while an
        asynchronous generator awaits something. The generator is at most ``prefetch`` items ahead of the consumer.

        Leaving the iteration early, a cancellation in it, or ``aclose``, closes the worker's generator: at its
        ``yield``, or, with `asyncio.CancelledError`, at an ``await``. Iterating further raises `RequestAborted`: only a
        finished generator ends without an error.

        Args:
            rank: The worker; None: an idle one, as `call_any`.
            method: As `call`.
            args: Positional arguments of the method.
            timeout: Seconds to wait for each item; None waits for ever. After a `TimeoutError` the next item may be
                waited for again, and a queued stream keeps its place. ``next(timeout)`` of the stream waits for one.
            prefetch: How many items the generator may be ahead.
            kwargs: Keyword arguments of the method.

        Iterating raises the errors of `call`. A generator's exception, and the worker's death, come after the items
        before it.
        """
        name = method_name(method)
        if rank is not None:
            self._check_rank("rank", rank)
        check_timeout("timeout", timeout)
        request = Request(method, args, kwargs, check_int("prefetch", prefetch, minimum=1))
        call = Call(name, request, rank, stream=True)
        return WorkerStream(self._entered().calls, call, timeout, self._streams)

    async def _call(
        self, rank: int | None, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None
    ) -> Any:
        with self._calls.counting():
            call = Call(method_name(method), Request(method, args, kwargs), rank)
            check_timeout("timeout", timeout)
            return await self._entered().calls.call(call, timeout)

    def _check_rank(self, name: str, rank: int) -> None:
        most = self._session.callable
        if check_int(name, rank, minimum=0) >= most:
            raise ValueError(f"{name} must be below {most}, not {rank}")

    def _entered(self) -> Session:
        if self._closed:
            self._session.check()
        if not self._session.is_open:
            raise RoleError("the group was not entered: use `async with`")
        return self._session

    # Workers come and go

    @property
    def workers(self) -> tuple[RankInfo, ...]:
        """The workers, by rank. A stalled worker has its line of Python in ``where``."""
        return self._session.workers

    @property
    def standbys(self) -> int:
        """How many standbys can take a rank immediately."""
        return len(self._session.standbys)

    def stats(self) -> WorkerGroupStats:
        """Return the counters of the group; from any thread."""
        return WorkerGroupStats(
            self._settings.name,
            self.n_workers,
            self.standbys,
            self.workers,
            self._calls.call_stats(),
            self._streams.stream_stats(),
        )

    async def membership(self) -> AsyncIterator[RankInfo]:
        """Iterate over the changes of the workers from now on, with ``async for``, until the group ends."""
        async for change in self._entered().membership():
            yield change

    async def scale(self, n_workers: int) -> None:
        """Change the number of workers. The last workers leave when their calls and streams are done.

        Workers that die meanwhile are replaced as usual. Cancelling this ends the wait; workers
        leave and come all the same.

        Args:
            n_workers: The new number of workers.

        Raises:
            RoleError: The group has no ``restart``, or was not entered.
            TypeError, ValueError: ``n_workers`` is above ``max_workers``, or ``placement`` fails for a new worker.
            WorkerDied: The group has ended: a crash loop.
            QueueClosed: The group was closed.
        """
        check_int("n_workers", n_workers, minimum=1)
        most = self._settings.max_workers
        if n_workers > most:
            raise ValueError(f"n_workers must be at most max_workers, which is {most}, not {n_workers}")
        check_placement(self._settings.placement, range(self.n_workers, n_workers))
        if not self._session.replaces:
            raise RoleError("a group can be scaled if it has restart=Restart(...), and was entered")
        await self._session.scale(n_workers)

    async def restart(self, rank: int, timeout: float | None = None) -> None:
        """Kill a worker, for example a stalled or stopped one, and wait until its replacement is ready.

        The worker gets SIGABRT, so that its standard error has the stacks of its threads, and SIGKILL 2 s later if it
        still runs. Its calls in flight raise `WorkerDied`. The replacement comes without delay, and the restart does
        not count against the restart policy; failed starts of the replacement do. For a worker that is being replaced
        already, this only waits. Cancelling this ends the wait; the worker is replaced all the same.

        Args:
            rank: The worker.
            timeout: Seconds; None waits for ever. After a `TimeoutError` the replacement continues, and another call
                waits for the same one.

        Raises:
            RoleError: The group has no ``restart``, or was not entered.
            ValueError: There is no worker of this rank.
            TimeoutError: The replacement took too long; the text says how far it is.
            WorkerDied: The group has ended: a crash loop.
            QueueClosed: The group was closed, or was made smaller.
        """
        self._check_rank("rank", rank)
        check_timeout("timeout", timeout)
        if not self._entered().replaces:
            raise RoleError("a worker can be restarted if the group has restart=Restart(...)")
        await self._session.restart(rank, timeout)

    async def join_first(self) -> AioshmError | None:
        """Wait until a worker has exited, also while there are no calls; return the error of later calls.

        With ``restart`` this waits for a crash loop. Returns None if the group was closed. Cancelling this changes
        nothing.
        """
        async for _ in self._session.membership():
            pass
        error = self._session.failure
        if error is None or isinstance(error, QueueClosed):
            return None
        return copy_error(error)

    # Starting and closing

    async def __aenter__(self) -> Self:
        if self._session.is_open or self._closed:
            raise RoleError("a group can be entered only once")
        try:
            with naming_limits(f"{self!r}"):
                self._session.open()
                await self._session.start()
        except BaseException:
            await self._stop(0)
            raise
        return self

    async def aclose(self) -> None:
        """Let the workers exit by themselves, then stop all others; waiting calls raise `QueueClosed`. Idempotent.

        Cancelling this kills the workers. After the death of one, all others are stopped immediately: they may wait for
        the dead one.
        """
        if self._pid != os.getpid():  # a forked child's copy: the workers are the parent's
            self._closed = True
        if not self._closed:
            patience = self._settings.shutdown_timeout
            if self._session.failure is not None:
                patience = 0
            await self._stop(patience)

    async def _stop(self, patience: float) -> None:
        self._closed = True
        if self._session.is_open:
            self._session.processes.forget()
        self._session.end(EndClosed("the group of workers was closed"))
        if self._session.is_open:
            await self._session.stop(patience)

    def __repr__(self) -> str:
        return f"<WorkerGroup of {self.n_workers} {self._settings.name} processes{', closed' * self._closed}>"


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
