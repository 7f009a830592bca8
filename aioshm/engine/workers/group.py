"""The workers of one engine: called together through one queue, or one of them through a queue of its own."""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self

from aioshm.arguments import check_int, check_plain, check_seconds, check_timeout
from aioshm.closing import AsyncClosing
from aioshm.config import Options
from aioshm.engine.metering import StreamMeter, meter_of, metered
from aioshm.engine.stats import WorkerGroupStats
from aioshm.engine.workers.messages import Request, method_name
from aioshm.engine.workers.processes import Settings
from aioshm.engine.workers.schedule import Call
from aioshm.engine.workers.session import GroupExit, Session
from aioshm.engine.workers.stream import WorkerStream
from aioshm.engine.workers.worker import LoopFactory
from aioshm.errors import AioshmError, EndClosed, QueueClosed, RoleError
from aioshm.process.limits import naming_limits
from aioshm.process.restart import RankInfo, Restart
from aioshm.process.stopping import SHUTDOWN_TIMEOUT_S
from aioshm.queue.base import MAX_CHUNK_BYTES, MAX_CHUNKS

PREFETCH = 16
"""How many items of a stream are made before any is taken."""


class WorkerGroup(AsyncClosing):
    """Worker processes that are called together, such as the ranks of a tensor-parallel model, or one by one.

        async with WorkerGroup(Worker, 2, kwargs={"model": path}) as group:
            results = await group.broadcast("step", batch)
            text = await group.call_any("tokenize", prompt)

    In each process ``worker(*args, rank=rank, **kwargs)`` makes an object; if that is awaitable, it is awaited. Its
    methods may be coroutines; a worker does one call at a time, in the order in which they were sent: those of all
    workers, when it was their turn, and its own. If it has a method ``close``, that is called when the group is closed.
    Entering the block starts the processes and waits until every worker is made.

    The processes exit with this one, however that happens. If one of them exits while the group is open, each call that
    waits raises `WorkerDied`, and so does every later one: what is left of the group is only good for being closed.
    With ``restart`` only the calls in flight do (`call` and `stream`: those of that worker): a standby or a new process
    takes the rank, is made by ``worker`` anew, and the next call waits for that. Workers that cannot go on without the
    one before, since they share a state or are in the midst of a collective operation, are better off without. An
    exception in a worker is no death: the call raises `WorkerError`, and the group goes on.

    Args:
        worker: Makes a worker. The group pickles it with ``args`` and ``kwargs`` once when it starts, and with
            ``restart`` keeps the result for every replacement: later changes do not count. Pickling holds up the loop
            where the arguments are more than a few MiB or hundreds of thousands of objects.
        n_workers: How many.
        args: For ``worker``.
        kwargs: For ``worker``.
        name: The processes are ``{name}_0`` and so on.
        options: Of all queues between them and this process.
        max_chunk_bytes: Room for one message in each queue's ring, in bytes; larger ones take longer.
        max_chunks: How many messages of that size each ring has room for.
        ready_timeout: Seconds that starting may take, and with ``restart`` each replacement and standby, imports
            included; one that takes longer is killed, and tried again as ``restart`` says. None: as long as it takes.
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
        check_plain("loop_factory", loop_factory)
        if not isinstance(name, str) or not name:
            raise ValueError(f"name must be a string, and not empty, not {name!r}")
        check_int("n_workers", n_workers, minimum=1)
        if check_int("standbys", standbys, minimum=0) and restart is None:
            raise ValueError(f"standbys must be 0 without restart=Restart(...), not {standbys}")
        self._settings = Settings(
            worker=worker,
            args=_arguments(args),
            kwargs=_keywords(kwargs),
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
        )
        self._exit = GroupExit()
        self._streams = StreamMeter()
        self._session: Session | None = None
        self._closed = False
        self._pid = os.getpid()

    @property
    def n_workers(self) -> int:
        """How many workers there are."""
        return self._settings.n_workers if self._session is None else self._session.n_workers

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, by rank; none before they are started."""
        return [] if self._session is None else self._session.processes.pids

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
        long, continues in the workers, and they begin the next one only then; its answers are dropped. Results arrive
        as pickle has them; arrays and tensors of any size are copies of the caller's own.

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
        name = method_name(method)
        if unique_reply_rank is not None:
            self._check_rank("unique_reply_rank", unique_reply_rank)
        check_timeout("timeout", timeout)
        request = Request(method, _arguments(args), _keywords(kwargs), reply_rank=unique_reply_rank)
        results = await self._entered().calls.call_all(Call(name), request, timeout)
        return results if unique_reply_rank is None else results[unique_reply_rank]

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

        A worker does one call at a time, in the order in which they were sent, those of `collective_rpc` included; the
        workers do theirs side by side. Many calls may be under way, from many tasks. Where workers are replaced, the
        call waits for the successor of one that has died before it was sent.

        A call that is cancelled, or takes too long, is not begun any more; if it is under way, a coroutine method is
        cancelled at the ``await`` where it is, another method goes on to its end.

        Args:
            rank: The worker.
            method: The name of the method; or a function that pickle can find in the worker, called with the worker
                before ``args``.
            args: For the method.
            timeout: Seconds, all waits included; None: as long as it takes.
            kwargs: For the method.

        Returns:
            What the method has returned.

        Raises:
            WorkerError: It has raised an exception.
            WorkerDied: The worker has exited before it has answered; or the group has ended.
            CodecError, MessageTooLarge, SharedMemoryError: The arguments cannot be sent.
            TimeoutError: It took too long; the text names the worker.
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

        Where none is, the call waits for one; those that wait are served first come, first served. A worker is idle
        when it has answered all calls, those of `broadcast` included, and has no stream; one that is being replaced is
        not idle, newcomers are.

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
        """Iterate with ``async for`` over what a method of one worker yields.

        The method is a generator, an asynchronous generator, or returns something else that can be iterated over. It is
        called when its turn has come, as by `call`; then the stream goes on beside other calls, which the worker does
        between two items, and while an asynchronous generator awaits something. At most ``prefetch`` items are made
        that nobody has taken.

        Leaving the iteration early, being cancelled in it, or closing it with ``aclose``, closes the worker's
        generator: at the ``yield`` where it is, or, with `asyncio.CancelledError`, at an ``await``. Iterating on raises
        `RequestAborted`: only a finished generator ends without an error.

        Args:
            rank: The worker; None: one that is idle, as for `call_any`.
            method: As for `call`.
            args: For the method.
            timeout: Seconds to wait for each item; None: as long as it takes. `TimeoutError` ends nothing: the item may
                be waited for again, and the call keeps its place among those that wait for the worker.
            prefetch: How many items may be made before any is taken.
            kwargs: For the method.

        Raises what `call` does, when it is iterated over; a generator's exception comes behind the items before it, as
        does the worker's death.
        """
        name = method_name(method)
        if rank is not None:
            self._check_rank("rank", rank)
        check_timeout("timeout", timeout)
        request = Request(method, args, kwargs, check_int("prefetch", prefetch, minimum=1))
        call = Call(name, rank, stream=True)
        return WorkerStream(self._entered().calls, call, request, timeout, self._streams.stream())

    @metered
    async def _call(
        self, rank: int | None, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None
    ) -> Any:
        name = method_name(method)
        check_timeout("timeout", timeout)
        call = Call(name, rank)
        return await self._entered().calls.call(call, Request(method, args, kwargs), timeout)

    def _check_rank(self, name: str, rank: int) -> None:
        most = self._settings.n_workers if self._session is None else self._session.callable
        if check_int(name, rank, minimum=0) >= most:
            raise ValueError(f"{name} must be below {most}, not {rank}")

    def _entered(self) -> Session:
        if self._closed:
            self._exit.check()
        if self._session is None:
            raise RoleError("the group was not entered: use `async with`")
        return self._session

    # Workers come and go

    @property
    def workers(self) -> tuple[RankInfo, ...]:
        """The workers, by rank; none before they are started, or without ``restart``."""
        replacer = None if self._session is None else self._session.replacer
        return () if replacer is None else replacer.workers

    @property
    def standbys(self) -> int:
        """How many standbys can take a rank at once."""
        replacer = None if self._session is None else self._session.replacer
        return 0 if replacer is None else replacer.standbys

    def stats(self) -> WorkerGroupStats:
        """Return what the group has done so far; from any thread."""
        return WorkerGroupStats(
            self._settings.name,
            self.n_workers,
            self.standbys,
            self.workers,
            meter_of(self).stats(),
            self._streams.stats(),
        )

    async def membership(self) -> AsyncIterator[RankInfo]:
        """Iterate over what becomes of the workers from now on, with ``async for``, until the group ends."""
        async for change in self._entered().membership():
            yield change

    async def scale(self, n_workers: int) -> None:
        """Have more workers, or fewer: the last ones go when they are done with the calls and streams they have.

        Workers that die meanwhile are replaced as at any time, and the group gets its size all the same. Cancelling
        this leaves the group as it was as long as those that are to go have something to do; after that they go, and
        newcomers that are being started come.

        Args:
            n_workers: How many there are to be.

        Raises:
            RoleError: The group has no ``restart``, or was not entered.
            ValueError: It is more than ``max_workers``.
            WorkerDied: The group has ended: a crash loop.
            QueueClosed: The group was closed.
        """
        check_int("n_workers", n_workers, minimum=1)
        most = self._settings.max_workers
        if n_workers > most:
            raise ValueError(f"n_workers must be at most max_workers, which is {most}, not {n_workers}")
        session = self._session
        if session is None or session.replacer is None:
            raise RoleError("a group can be scaled that has restart=Restart(...), and was entered")
        await session.scale(n_workers, session.replacer)

    async def join_first(self) -> AioshmError | None:
        """Wait until a worker has exited, also while there are no calls; return what calls raise from then on.

        With ``restart`` it waits for a crash loop. None if the group was closed. Cancelling this changes nothing.
        """
        await self._exit.ended.wait()
        assert self._exit.failure is not None
        error: AioshmError = self._exit.failure()
        return None if isinstance(error, QueueClosed) else error

    # Starting and closing

    async def __aenter__(self) -> Self:
        if self._session is not None or self._closed:
            raise RoleError("a group can be entered only once")
        try:
            with naming_limits(f"{self!r}"):
                self._session = Session(self._settings, self._exit)
                await self._session.start()
        except BaseException:
            await self._stop(0)
            raise
        return self

    async def aclose(self) -> None:
        """Let the workers exit by themselves, then stop what is left; calls that wait raise `QueueClosed`. Idempotent.

        Cancelling this stops them at once, and nothing is left. If one has died, the others are not waited for either:
        they may be waiting for it.
        """
        if self._pid != os.getpid():  # a forked child's copy: the workers are the parent's
            self._closed = True
        if not self._closed:
            await self._stop(0 if self._exit.failure is not None else self._settings.shutdown_timeout)

    async def _stop(self, patience: float) -> None:
        self._closed = True
        closed = functools.partial(EndClosed, "the group of workers was closed")
        if self._session is None:
            self._exit.end(closed)
            return
        self._session.processes.forget()
        self._session.end(closed)
        await self._session.stop(patience)

    def __repr__(self) -> str:
        return f"<WorkerGroup of {self.n_workers} {self._settings.name} processes{', closed' if self._closed else ''}>"


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
