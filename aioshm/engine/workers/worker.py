"""The process of a `WorkerGroup`: creates a worker, and serves its calls until the group is closed."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from aioshm.config import Options
from aioshm.engine.workers.messages import ControlSocket, MessageCodec, Request, failure_of
from aioshm.engine.workers.server import CallServer
from aioshm.errors import PeerDied, QueueClosed, QueueGone, RemoteFailure
from aioshm.process import progress
from aioshm.process.progress import BUSY, ENDING, IDLE
from aioshm.process.stopping import TERMINATED, Termination
from aioshm.queue import MessageQueue

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run_worker(
    driver: socket.socket,
    _imported: object,
    sizes: tuple[int, int],
    options: Options,
    loop_factory: LoopFactory | None,
) -> None:
    """Work until the driver closes its queues, or dies.

    When everything is imported, the process sends the handle of its queue of answers. It receives its rank and the
    pickled constructor call, and sends the constructor's `RemoteFailure`, or None. It receives the handles of the
    queues with the calls of all workers and of this worker, and reports with a last message that it has attached.

    ``_imported`` imports the modules of a standby's worker when it is unpickled. ``sizes`` are the
    bytes of a chunk, and the number of chunks, of the queue of answers.
    """
    terminated = False
    try:
        with driver, asyncio.Runner(loop_factory=loop_factory) as runner:
            terminated = runner.run(_work(ControlSocket(driver), sizes, options))
    except SystemExit as end:  # in another task: a method that held up the loop
        terminated = end.code == TERMINATED
        if not terminated:
            raise
    if terminated:  # the exit code names the signal
        for stream in sys.stdout, sys.stderr:
            with suppress(OSError, ValueError, AttributeError):  # the peer is gone; closed; None
                stream.flush()
        signal.raise_signal(signal.SIGTERM)


async def _work(driver: ControlSocket, sizes: tuple[int, int], options: Options) -> bool:
    """Work; return whether SIGTERM has ended the work, once the object was created and is closed."""
    termination = Termination()
    try:
        await _serve(driver, sizes, options, termination)
    except (asyncio.CancelledError, SystemExit):
        if not termination.take_back():
            raise
        return True
    finally:
        termination.disarm()
    return False


async def _serve(driver: ControlSocket, sizes: tuple[int, int], options: Options, termination: Termination) -> None:
    async with MessageQueue(1, 1, None, *sizes, codec=MessageCodec(), options=options) as replies:
        worker = Worker(termination)
        try:
            await driver.send(replies.export_handle().to_json())
            rank, construction = await driver.receive()
            await driver.send(await worker.create(rank, construction))
            await _serve_calls(driver, worker, rank, replies)
        except (EOFError, ConnectionError, PeerDied, QueueClosed, QueueGone):
            return  # the group was closed, or the driver has died
        finally:
            progress.own().enter(ENDING)
            await worker.close()


async def _serve_calls(driver: ControlSocket, worker: Worker, rank: int, replies: MessageQueue) -> None:
    of_all, of_one = await driver.receive()  # does not come if the object could not be created
    codec = MessageCodec()
    async with (
        MessageQueue.create_from_handle(of_all, rank, codec=codec) as broadcasts,
        MessageQueue.create_from_handle(of_one, 0, codec=codec) as requests,
    ):
        for queue in (broadcasts, requests, replies):
            await queue.wait_until_ready()
        with progress.own().turning():
            progress.own().enter(IDLE)  # before the group may count on it: a worker that starts is not judged
            await driver.send("ready")
            await CallServer(worker, rank, replies).run(broadcasts, requests)


def takes_rank(constructor: Callable[..., Any]) -> bool:
    """Return whether a callable accepts ``rank`` as a keyword, or does not say what it accepts."""
    try:
        parameters = inspect.signature(constructor).parameters
    except (TypeError, ValueError):
        return True
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return True
    return "rank" in parameters and parameters["rank"].kind is not inspect.Parameter.POSITIONAL_ONLY


class Worker:
    """The object that receives the driver's calls."""

    def __init__(self, termination: Termination) -> None:
        self._termination = termination
        self._object: Any = None
        self._progress = progress.own()
        self._awaits = False  # whether a coroutine method runs

    @property
    def terminated(self) -> bool:
        """Whether SIGTERM ends the process, and cancels the running method."""
        return self._termination.came

    async def create(self, rank: int, construction: bytes) -> RemoteFailure | None:
        """Create the object by a pickled call; return the exception of the call."""
        try:
            constructor, args, kwargs = pickle.loads(construction)
            if takes_rank(constructor):
                kwargs = {**kwargs, "rank": rank}
            created = constructor(*args, **kwargs)
            if inspect.isawaitable(created):
                created = await created
            self._object = created
        except (Exception, asyncio.CancelledError) as error:
            return failure_of(error)
        self._termination.arm()  # until now there was nothing to close: the signal itself ended the process
        return None

    def call(self, request: Request) -> Any:
        """Call a method, or a function with the object; the result may be awaitable."""
        if isinstance(request.method, str):
            method = getattr(self._object, request.method)
            return self.run_plain(method, *request.args, **request.kwargs)
        return self.run_plain(request.method, self._object, *request.args, **request.kwargs)

    def run_plain(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the user's, which may hold up the loop for long: SIGTERM interrupts it."""
        if not self._awaits:  # else an item of a stream would count as progress of the coroutine method
            self._progress.enter(BUSY)
        self._termination.interrupts = True
        try:
            return function(*args, **kwargs)
        finally:
            self._termination.interrupts = False
            if not self._awaits:
                self._progress.enter(IDLE)
            self._termination.raise_again()

    async def finish(self, result: Awaitable[Any]) -> Any:
        """Await the result of a coroutine method."""
        self._awaits = True
        self._progress.task = asyncio.current_task()
        self._progress.enter(BUSY)
        try:
            return await result
        finally:
            self._awaits = False
            self._progress.enter(IDLE)

    async def close(self) -> None:
        """Call the object's method ``close``, uninterrupted by SIGTERM."""
        self._termination.ignored = not self._termination.came
        close: Callable[[], Any] | None = getattr(self._object, "close", None)
        if callable(close):
            closing = close()
            if inspect.isawaitable(closing):
                await closing
