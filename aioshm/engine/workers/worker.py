"""The processes of a `WorkerGroup`: each makes a worker, and serves its calls until the group is closed."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aioshm.config import Options
from aioshm.engine.workers.channel import ControlSocket, Place
from aioshm.engine.workers.messages import MessageCodec, Request, failure_of
from aioshm.engine.workers.serving import Serving
from aioshm.errors import HandleError, PeerDied, QueueClosed, RemoteFailure
from aioshm.process.termination import TERMINATED, Termination
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

    The process sends the driver the handle of the queue of its answers when everything is imported, gets a `Place` and
    the pickled constructor call, and sends the constructor's `RemoteFailure`, or None, and a last message when it has
    attached to its queues.

    Args:
        driver: Connects to the driver.
        _imported: Has the modules of a standby's worker imported.
        sizes: The bytes of a chunk, and the chunks, of the queue of answers.
        options: Of that queue.
        loop_factory: Makes the event loop; None: asyncio's own.
    """
    terminated = False
    try:
        with driver, asyncio.Runner(loop_factory=loop_factory) as runner:
            terminated = runner.run(_work(ControlSocket(driver), sizes, options))
    except SystemExit as end:  # in a task besides: a method that held up the loop
        terminated = end.code == TERMINATED
        if not terminated:
            raise
    if terminated:  # the exit code names the signal
        for stream in sys.stdout, sys.stderr:
            with suppress(OSError, ValueError, AttributeError):  # the other end is gone; closed; None
                stream.flush()
        signal.raise_signal(signal.SIGTERM)


async def _work(driver: ControlSocket, sizes: tuple[int, int], options: Options) -> bool:
    """Work; return whether SIGTERM has ended that, once the object was made and is closed."""
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
            place: Place = await driver.receive()
            failure = await worker.make(place.rank, await driver.receive_pickled())
            await driver.send(failure)
            if failure is not None:
                await driver.receive()  # the driver ends this process
            await _serve_calls(driver, worker, place, replies)
        except (EOFError, OSError, PeerDied, QueueClosed, HandleError):  # the group was closed, or the driver has died
            return
        finally:
            await worker.close()


async def _serve_calls(driver: ControlSocket, worker: Worker, place: Place, replies: MessageQueue) -> None:
    codec = MessageCodec()
    async with (
        MessageQueue.create_from_handle(place.steps, place.rank, codec=codec) as steps,
        MessageQueue.create_from_handle(place.requests, 0, codec=codec) as requests,
    ):
        for queue in steps, requests, replies:
            await queue.wait_until_ready()
        await driver.send("ready")
        await Serving(worker, place.rank, steps, requests, replies).run()


class Worker:
    """The object that the user's methods are called on."""

    def __init__(self, termination: Termination) -> None:
        self._termination = termination
        self._object: Any = None

    @property
    def terminated(self) -> bool:
        """Whether SIGTERM ends the process: a cancellation is not the method's own then."""
        return self._termination.came

    async def make(self, rank: int, construction: bytes | bytearray) -> RemoteFailure | None:
        """Make the object by a pickled call; return the exception, if that raises one."""
        try:
            constructor, args, kwargs = pickle.loads(construction)
            made = constructor(*args, rank=rank, **kwargs)
            self._object = await made if inspect.isawaitable(made) else made
        except (Exception, asyncio.CancelledError) as error:
            return failure_of(error)
        self._termination.arm()  # until now there was nothing to close: the signal itself ended the process
        self._termination.interrupts = True
        return None

    def call(self, request: Request) -> Any:
        """Call a method, or a function with the object; the result may be awaitable."""
        if isinstance(request.method, str):
            return getattr(self._object, request.method)(*request.args, **request.kwargs)
        return request.method(self._object, *request.args, **request.kwargs)

    async def close(self) -> None:
        """Call the object's ``close``, if it has one; SIGTERM does not end that."""
        self._termination.ignored = not self._termination.came
        self._termination.interrupts = False
        close: Callable[[], Any] | None = getattr(self._object, "close", None)
        if callable(close):
            closing = close()
            if inspect.isawaitable(closing):
                await closing
