"""What runs in each process of a `WorkerGroup`: takes steps from one queue, answers each of them into another.

The first message makes the worker, every other one calls a method of it. Each message gets exactly one answer, in
order, whatever it was: so an answer's number says what it answers, also where the message could not be decoded.
"""

from __future__ import annotations

import asyncio
import pickle
import signal
import socket
import struct
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from aioshm.config import Options
from aioshm.engine.workers.envelope import EnvelopeCodec
from aioshm.engine.workers.performing import Leave, Performer, failed
from aioshm.engine.workers.serving import Serving, send_or_say_why
from aioshm.errors import CodecError, CorruptSlot, PeerDied, QueueClosed
from aioshm.process.termination import TERMINATED, Termination
from aioshm.queue import Handle, MessageQueue

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

_LENGTH = struct.Struct("!Q")


class Place(NamedTuple):
    """What the driver tells a process that is to be a worker.

    Attributes:
        rank: Which worker it is.
        steps: The driver's queue.
        replaces: Whether it takes the place of one that has died: then the next message is the step that makes it,
            which otherwise is the first of the queue.
    """

    rank: int
    steps: Handle
    replaces: bool


class ControlSocket:
    """Pickled messages between the driver and one worker process, of any size: neither end ever blocks its loop.

    Args:
        sock: This process' end of a pair of stream sockets.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._forgotten = weakref.finalize(self, sock.close)  # a forgotten group warns, its sockets do not, too

    async def send(self, message: object) -> None:
        """Send a message.

        Raises:
            OSError: The peer has exited, or either end is closed.
        """
        await self.send_pickled(pickle.dumps(message))

    async def send_pickled(self, message: bytes) -> None:
        """Send a message that is pickled already. If this is cancelled, close the socket: a part may be sent."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, _LENGTH.pack(len(message)))
        await loop.sock_sendall(self._socket, message)

    async def receive(self) -> Any:
        """Receive the next message.

        Raises:
            EOFError, OSError: The peer has exited, or either end is closed.
        """
        return pickle.loads(await self.receive_pickled())

    async def receive_pickled(self) -> bytearray:
        """Receive the next message as bytes. If this is cancelled, close the socket: a part may be lost."""
        (length,) = _LENGTH.unpack(await self._receive(_LENGTH.size))
        return await self._receive(length)

    async def _receive(self, n_bytes: int) -> bytearray:
        received = bytearray(n_bytes)
        missing = memoryview(received)
        while missing:
            n_received = await asyncio.get_running_loop().sock_recv_into(self._socket, missing)
            if not n_received:
                raise EOFError("the peer has closed its end")
            missing = missing[n_received:]
        return received

    def close(self) -> None:
        """Close this end; who waits at it waits until cancelled. On its loop, or without any. Idempotent."""
        if self._socket.fileno() >= 0:
            loop = asyncio._get_running_loop()
            if loop is not None:
                loop.remove_reader(self._socket)
                loop.remove_writer(self._socket)
            self._forgotten()


def run_worker(
    driver: socket.socket,
    _imported: object,
    chunk_bytes: int,
    chunks: int,
    options: Options,
    loop_factory: LoopFactory | None,
) -> None:
    """Work until the driver closes its queue, or dies; what a `WorkerGroup` starts.

    This sends the driver the handle of this worker's queue when everything is imported; and if it replaces another
    worker (`Place`), how making it went.

    Args:
        driver: Connects to the driver.
        _imported: Has the modules of a standby's worker imported.
        chunk_bytes: For this worker's queue, in bytes.
        chunks: For this worker's queue.
        options: For this worker's queue.
        loop_factory: Makes the event loop; None: asyncio's own.
    """
    terminated = False
    try:
        with driver, asyncio.Runner(loop_factory=loop_factory) as runner:
            terminated = runner.run(_work(ControlSocket(driver), chunk_bytes, chunks, options))
    except SystemExit as end:  # in a task besides: a method that held up the loop
        terminated = end.code == TERMINATED
        if not terminated:
            raise
    if terminated:  # the exit code names the signal
        for stream in sys.stdout, sys.stderr:
            with suppress(OSError, ValueError, AttributeError):  # the other end is gone; closed; None
                stream.flush()
        signal.raise_signal(signal.SIGTERM)


async def _work(driver: ControlSocket, chunk_bytes: int, chunks: int, options: Options) -> bool:
    """Work; return whether SIGTERM has ended that, once the object was made and is closed."""
    termination = Termination()
    try:
        await _serve(driver, chunk_bytes, chunks, options, termination)
    except (asyncio.CancelledError, SystemExit):
        if not termination.take_back():
            raise
        return True
    finally:
        termination.disarm()
    return False


async def _serve(
    driver: ControlSocket, chunk_bytes: int, chunks: int, options: Options, termination: Termination
) -> None:
    answers = MessageQueue(1, 1, None, chunk_bytes, chunks, options=options)
    try:
        await driver.send(answers.export_handle().to_json())
        rank, handle, replaces = await driver.receive()
        construction = await driver.receive_pickled() if replaces else None
    except (EOFError, OSError):  # the group was closed before it needed this one
        answers.end.gate.discard()
        return
    async with answers, MessageQueue.create_from_handle(handle, rank) as steps:
        if construction is not None:
            await steps.wait_until_ready()
        performer = Performer(rank, termination)
        try:
            if construction is not None:
                outcome = await performer.construct(construction)
                construction = None  # its memory is the object's now
                try:
                    await driver.send(outcome)
                except OSError:  # the group was closed, or the driver has died
                    return
            taken, requests = await _serve_steps(performer, rank, driver, steps, answers, 0)
            while requests is not None:
                replies = MessageQueue(1, 1, None, chunk_bytes, chunks, codec=EnvelopeCodec(), options=options)
                async with replies:
                    try:
                        await driver.send(replies.export_handle().to_json())
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
    performer: Performer, rank: int, driver: ControlSocket, steps: MessageQueue, answers: MessageQueue, taken: int
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
    """What tells of the first call of this worker alone: the handle of a queue, from the driver.

    Attributes:
        handle: The handle, once it has come.
        interrupts: Whether its coming cancels the task that has made this.
    """

    def __init__(self, driver: ControlSocket) -> None:
        self.handle: Handle | None = None
        self.interrupts = False
        self._task = asyncio.current_task()
        self._cancelled = False
        self._receiving = asyncio.get_running_loop().create_task(self._receive(driver))

    async def _receive(self, driver: ControlSocket) -> None:
        try:
            self.handle = await driver.receive()
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
        """Wait for it no more. Idempotent."""
        self._receiving.cancel()
