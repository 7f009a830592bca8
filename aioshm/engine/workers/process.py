"""What runs in each process of a `WorkerGroup`: takes steps from one queue, answers each of them into another.

The first message makes the worker, every other one calls a method of it. Each message gets exactly one answer, in
order, whatever it was: so an answer's number says what it answers, also where the message could not be decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

from aioshm.config import Options
from aioshm.engine.workers.envelope import EnvelopeCodec
from aioshm.engine.workers.performing import Leave, Performer, Step, failed
from aioshm.engine.workers.serving import Serving, send_or_say_why
from aioshm.errors import CodecError, CorruptSlot, PeerDied, QueueClosed
from aioshm.queue import Handle, MessageQueue

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


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


def run_worker(
    driver: Connection,
    _imported: object,
    chunk_bytes: int,
    chunks: int,
    options: Options,
    loop_factory: LoopFactory | None,
) -> None:
    """Work until the driver closes its queue, or dies; what a `WorkerGroup` starts.

    The driver is told the handle of this worker's queue when everything is imported, and the outcome of
    ``construction``, if there is one, when it has said which worker this is (`Place`).

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
        answers = MessageQueue(1, 1, None, chunk_bytes, chunks, options=options)
        try:
            driver.send(answers.export_handle().to_json())
            place: Place = driver.recv()
        except (EOFError, OSError):  # the group was closed before it needed this one
            answers.end.gate.discard()
            return
        runner.run(_work(place, driver, answers, chunk_bytes, chunks, options))


async def _work(
    place: Place, driver: Connection, answers: MessageQueue, chunk_bytes: int, chunks: int, options: Options
) -> None:
    rank, handle, construction = place
    async with answers, MessageQueue.create_from_handle(handle, rank) as steps:
        if construction is not None:
            await steps.wait_until_ready()
        performer = Performer(rank)
        try:
            if construction is not None:
                outcome = await performer.answer(construction)
                try:
                    driver.send(outcome)
                except OSError:  # the group was closed, or the driver has died
                    return
            taken, requests = await _serve_steps(performer, rank, driver, steps, answers, 0)
            while requests is not None:
                replies = MessageQueue(1, 1, None, chunk_bytes, chunks, codec=EnvelopeCodec(), options=options)
                async with replies:
                    try:
                        driver.send(replies.export_handle().to_json())
                    except OSError:  # the group was closed, or the driver has died
                        return
                    serving = Serving(performer, rank, steps, answers, taken, requests, replies)
                    if await serving.attach():
                        await serving.run()
                        return
                taken, requests = await _serve_steps(performer, rank, driver, steps, answers, taken)
        finally:
            await performer.close()


async def _serve_steps(
    performer: Performer, rank: int, driver: Connection, steps: MessageQueue, answers: MessageQueue, taken: int
) -> tuple[int, Handle | None]:
    """Serve the steps of all workers.

    Returns:
        How many were taken, those before included, and the handle of the queue of this worker's requests once the
        driver has sent that; None: the driver has closed its queue, has died, or ends this worker.
    """
    call = _FirstCall(driver)
    try:
        while call.handle is None:
            try:
                call.interrupts = True
                step = await steps.dequeue(indefinite=True)
            except (QueueClosed, PeerDied):  # the driver: it has closed the group, or this process dies with it
                return taken, None
            except (CodecError, CorruptSlot) as error:
                answer = failed(error)
            except asyncio.CancelledError:
                if not call.came():
                    raise
                break
            else:
                call.interrupts = False
                if isinstance(step[0], Leave) and rank in step[0].ranks:
                    return taken, None
                answer = await performer.answer(step)
            call.interrupts = False
            taken += 1
            try:
                await send_or_say_why(answers, answer, failed)
            except PeerDied:
                return taken, None
        return taken, call.handle
    finally:
        call.close()


class _FirstCall:
    """What tells of the first call of this worker alone: the handle of a queue, in the pipe to the driver.

    Attributes:
        handle: The handle, once it has come.
        interrupts: Whether its coming cancels the task that has made this.
    """

    def __init__(self, driver: Connection) -> None:
        self.handle: Handle | None = None
        self.interrupts = False
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._cancelled = False
        self._loop.add_reader(driver.fileno(), self._receive)

    def _receive(self) -> None:
        self.close()
        try:
            self.handle = self._driver.recv()
        except (EOFError, OSError):  # the driver closes the group, or has died: its queue tells
            return
        if self.interrupts and self._task is not None:
            self._cancelled = True
            self._task.cancel()

    def came(self) -> bool:
        """Return whether a cancellation was this one's, and no more than that."""
        assert self._task is not None
        return self._cancelled and self._task.uncancel() == 0

    def close(self) -> None:
        """Watch the pipe no more. Idempotent."""
        self._loop.remove_reader(self._driver.fileno())
