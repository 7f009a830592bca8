"""What runs in each process of a `WorkerGroup`: takes steps from one queue, answers each of them into another.

The first message makes the worker, every other one calls a method of it. Each message gets exactly one answer, in
order, whatever it was: so an answer's number says what it answers, also where the message could not be decoded.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from aioshm.config import Options
from aioshm.errors import AioshmError, CodecError, CorruptSlot, PeerDied, QueueClosed, RemoteFailure
from aioshm.queue import Handle, MessageQueue

Step = tuple[Any, tuple[Any, ...], dict[str, Any], int | None]
"""What to call, with what, and the one rank whose result is wanted; None: every rank's."""

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

MAX_TEXT = 1 << 14
"""How many characters are told of an exception, and of its traceback's end."""


class Place(NamedTuple):
    """What the driver tells a process that is to be a worker.

    Attributes:
        rank: Which worker it is.
        steps: The driver's queue.
        construction: Makes the worker, in the place of one that has died; None: the queue's first message does.
    """

    rank: int
    steps: Handle
    construction: Step | None


class Leave(NamedTuple):
    """What is called in a step that ends some of the workers, who do not answer it.

    Attributes:
        ranks: Theirs.
    """

    ranks: frozenset[int]


def run_worker(
    driver: Connection,
    _imported: object,
    chunk_bytes: int,
    chunks: int,
    options: Options,
    loop_factory: LoopFactory | None,
) -> None:
    """Work until the driver closes its queue, or dies; what a `WorkerGroup` starts.

    The driver is told True when everything is imported, gets to know the handle of this worker's queue when it has said
    which worker this is (`Place`), and the outcome of ``construction``, if there is one.

    Args:
        driver: A pipe to the driver.
        _imported: Has the modules of a standby's worker imported.
        chunk_bytes: For this worker's queue, in bytes.
        chunks: For this worker's queue.
        options: For this worker's queue.
        loop_factory: Makes the event loop; None: asyncio's own.
    """
    with driver, asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.get_loop()
        try:
            driver.send(True)
            place: Place = driver.recv()
        except (EOFError, OSError):  # the group was closed before it needed this one
            return
        runner.run(_work(place, driver, MessageQueue(1, 1, None, chunk_bytes, chunks, options=options)))


async def _work(place: Place, driver: Connection, answers: MessageQueue) -> None:
    rank, handle, construction = place
    async with answers, MessageQueue.create_from_handle(handle, rank) as steps:
        if construction is not None:
            await steps.wait_until_ready()
        driver.send(answers.export_handle().to_json())
        worker = _Worker(rank)
        try:
            if construction is not None:
                driver.send(await worker.answer(construction))
            driver.close()
            while True:
                try:
                    step = await steps.dequeue(indefinite=True)
                except (QueueClosed, PeerDied):  # the driver: it has closed the group, or this process dies with it
                    break
                except (CodecError, CorruptSlot) as error:
                    answer = _failure(error)
                else:
                    if isinstance(step[0], Leave) and rank in step[0].ranks:
                        break
                    answer = await worker.answer(step)
                try:
                    await answers.enqueue(answer)
                except PeerDied:
                    break
                except AioshmError as error:  # it cannot be encoded, is too large, or there is no memory for it
                    await answers.enqueue(_failure(error))
        finally:
            await worker.close()


class _Worker:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._object: Any = None
        self._made = False

    async def answer(self, step: Step) -> tuple[bool, Any]:
        """Do a step; return whether that went well, and the result or a `RemoteFailure`."""
        try:
            result = await self._perform(step)
        except (Exception, asyncio.CancelledError) as error:  # the latter from the method: nobody cancels this task
            return _failure(error)
        return True, result

    async def _perform(self, step: Step) -> Any:
        what, args, kwargs, wanted = step
        if not self._made:
            made = what(*args, rank=self._rank, **kwargs)
            self._object = await made if inspect.isawaitable(made) else made
            self._made = True
            return None
        if isinstance(what, Leave):
            return None
        result = (
            getattr(self._object, what)(*args, **kwargs)
            if isinstance(what, str)
            else what(self._object, *args, **kwargs)
        )
        if inspect.isawaitable(result):
            result = await result
        return result if wanted is None or wanted == self._rank else None

    async def close(self) -> None:
        close: Callable[[], Any] | None = getattr(self._object, "close", None)
        if callable(close):
            closing = close()
            if inspect.isawaitable(closing):
                await closing


def _failure(error: BaseException) -> tuple[bool, RemoteFailure]:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # how it came to be called is nobody's concern
    lines = traceback.format_exception(kind, error, trace or error.__traceback__)
    try:
        text = str(error)
    except Exception as broken:
        text = f"its text cannot be told: {type(broken).__name__}"
    return False, RemoteFailure(name, text[:MAX_TEXT], "".join(lines)[-MAX_TEXT:])
