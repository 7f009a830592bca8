"""The process of a `WorkerGroup`: creates an object, and serves its calls until the group is closed.

The calls run one by one, in the order of sending. The process reads its queues also while a coroutine method is
awaited: a call may be cancelled meanwhile. Streams run beside the calls: a generator yields an item between calls, an
asynchronous generator also at an ``await``. A generator is ahead of its consumer by a limited number of items.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pickletools import genops
from typing import Any, NamedTuple, TypeAlias, cast

from aioshm.codec import PickleCodec, cannot_decode
from aioshm.config import Options
from aioshm.errors import (
    CODE_ERRORS,
    MAX_TEXT,
    AioshmError,
    CodecError,
    PeerDied,
    QueueClosed,
    QueueEmpty,
    QueueGone,
    RemoteFailure,
    text_of,
)
from aioshm.process import progress
from aioshm.process.progress import BUSY, ENDING, IDLE
from aioshm.process.stopping import TERMINATED, Termination
from aioshm.queue import MessageQueue
from aioshm.queue.ends.writer import Writer

_LINE_BYTES = 1 << 16
_HERE = os.path.dirname(__file__)
_INTS = frozenset({"BININT", "BININT1", "BININT2", "LONG1"})

logger: logging.Logger = logging.getLogger("aioshm.engine")

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
Items: TypeAlias = Iterator[Any] | AsyncIterator[Any]

# The messages

# To the worker
CALL, STREAM, CANCEL, CREDIT = range(4)
# From the worker
RESULT, FAILURE, ITEM = range(4, 7)

# The queues to the worker
BROADCASTS, REQUESTS = range(2)

Message: TypeAlias = tuple[int, int, Any, Any]
"""A kind, the number of a call, ``after``, and a value: a plain tuple, which pickle handles fastest.

A worker answers a call or stream by one result or failure, after any number of items. A call of one worker begins
``after`` the last call of all workers with this number or a lower one; a call of all has the same for each rank with
calls of its own. The value is the fields of a `Request`, a result, an item, a `RemoteFailure`, or the number of further
items wanted (CREDIT); an `Undecodable` if the value cannot be decoded. The answer with number 0 is that of the
constructor.
"""


class Request(NamedTuple):
    """A method to call, with its arguments."""

    method: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    prefetch: int = 0
    reply_rank: int | None = None


class Undecodable(NamedTuple):
    """Stands for a value that could not be decoded."""

    error: CodecError


class MessageCodec(PickleCodec):
    """Pickle, for messages: a message whose value cannot be decoded still names its call."""

    @staticmethod
    def loads(data: bytes) -> Any:
        try:
            return PickleCodec.loads(data)
        except CODE_ERRORS as error:
            return _without_value(data, cannot_decode(error))

    def decode(self, main: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
        try:
            return super().decode(main, buffers)
        except CodecError as error:
            return _without_value(main, error)


def _without_value(pickled: bytes | memoryview, error: CodecError) -> Message:
    """Read the first two fields, both ints, from the pickle's opcodes."""
    fields: Iterator[Any] = (argument for opcode, argument, _ in genops(bytes(pickled)) if opcode.name in _INTS)
    kind, number = islice(fields, 2)
    return kind, number, 0, Undecodable(error)


def failure_of(error: BaseException) -> RemoteFailure:
    """Describe an exception, without the frames of this package that lead to the method."""
    kind = type(error)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    trace = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == _HERE:
        trace = trace.tb_next
    try:
        lines = traceback.format_exception(kind, error, trace or error.__traceback__)
    except Exception:  # such as of a SyntaxError with other fields than CPython's
        lines = traceback.format_tb(trace or error.__traceback__)
    return RemoteFailure(name, text_of(error), "".join(lines)[-MAX_TEXT:])


async def send_line(sock: socket.socket, value: object) -> None:
    """Send a value that JSON can express to the peer at the other end of a socket pair."""
    await asyncio.get_running_loop().sock_sendall(sock, json.dumps(value).encode() + b"\n")


async def receive_line(sock: socket.socket) -> Any:
    """Receive a value; raise EOFError or OSError if the peer has exited."""
    line = b""
    while not line.endswith(b"\n"):
        part = await asyncio.get_running_loop().sock_recv(sock, _LINE_BYTES)
        if not part:
            raise EOFError("the peer has closed its end")
        line += part
    return json.loads(line)


# The process


def run_worker(
    driver: socket.socket,
    construction: bytes,
    sizes: tuple[int, int],
    options: Options,
    loop_factory: LoopFactory | None,
) -> None:
    """Work until the driver closes its queues, or dies.

    When everything is imported, the process sends the handle of its queue of answers. It receives its rank, and the
    handles of the queues with the calls of all workers and of this worker, and creates its object. The first answer is
    that of the constructor.

    ``construction`` is the pickled call of the constructor. ``sizes`` are the bytes of a chunk, and the number of
    chunks, of the queue of answers.
    """
    terminated = False
    driver.setblocking(False)
    try:
        with driver, asyncio.Runner(loop_factory=loop_factory) as runner:
            terminated = runner.run(_work(driver, construction, sizes, options))
    except SystemExit as end:  # in another task: a generator that held up the loop
        terminated = end.code == TERMINATED
        if not terminated:
            raise
    if terminated:  # the exit code names the signal
        for stream in sys.stdout, sys.stderr:
            with suppress(OSError, ValueError, AttributeError):  # the peer is gone; closed; None
                stream.flush()
        signal.raise_signal(signal.SIGTERM)


async def _work(driver: socket.socket, construction: bytes, sizes: tuple[int, int], options: Options) -> bool:
    """Work; return whether SIGTERM has ended the work, once the object was created and is closed."""
    termination = Termination()
    try:
        async with MessageQueue(1, 1, None, *sizes, codec=MessageCodec(), options=options) as replies:
            cast(Writer, replies.end).label(f"{multiprocessing.current_process().name}.answers")
            worker = Worker(construction, replies, termination)
            try:
                await send_line(driver, replies.export_handle().to_json())
                rank, of_all, of_one = await receive_line(driver)
                await _serve(worker, rank, of_all, of_one)
            except (EOFError, ConnectionError, PeerDied, QueueClosed, QueueGone):
                pass  # the group was closed, or the driver has died
            finally:
                progress.own().enter(ENDING)
                await worker.close()
    except (asyncio.CancelledError, SystemExit):
        if not termination.take_back():
            raise
        return True
    finally:
        termination.disarm()
    return False


async def _serve(worker: Worker, rank: int, of_all: str, of_one: str) -> None:
    async with (
        MessageQueue.create_from_handle(of_all, rank, codec=MessageCodec()) as broadcasts,
        MessageQueue.create_from_handle(of_one, 0, codec=MessageCodec()) as requests,
    ):
        for queue in (broadcasts, requests, worker.replies):
            await queue.wait_until_ready()
        failure = await worker.create(rank)
        if failure is not None:
            await worker.replies.enqueue((FAILURE, 0, 0, failure))
            await requests.dequeue(indefinite=True)  # until the driver has the failure, and closes the queue
        with progress.own().turning():
            progress.own().enter(IDLE)  # before the group may count on it: a worker that starts is not judged
            await worker.replies.enqueue((RESULT, 0, 0, None))
            await worker.serve(broadcasts, requests)


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
    """The object that receives the driver's calls, and the server of these calls."""

    def __init__(self, construction: bytes, replies: MessageQueue, termination: Termination) -> None:
        self.replies: MessageQueue = replies
        self._termination = termination
        self._progress = progress.own()
        self._object: Any = None
        self._rank = 0
        self._calls: tuple[deque[Message], deque[Message]] = (deque(), deque())  # not begun yet, of each queue
        self._begun = [0, 0]  # the number of the last call of each queue
        self._busy = False  # whether a task runs the calls
        self._awaited: int | None = None  # the call whose method is awaited
        self._tasks: dict[int, asyncio.Task[None]] = {}  # send the items of streams, or await a method
        self._credits: dict[int, asyncio.Semaphore] = {}  # how many items each stream may yield
        self._group = asyncio.TaskGroup()
        self._ending = False
        self._construction: Any = None
        self._failure: RemoteFailure | None = None
        try:
            self._construction = pickle.loads(construction)
        except (Exception, asyncio.CancelledError) as error:
            self._failure = failure_of(error)

    @property
    def _stops(self) -> bool:
        """Whether the worker is ending: cancellations come from this, and not from callers."""
        return self._ending or self._termination.came

    async def create(self, rank: int) -> RemoteFailure | None:
        """Create the object; return the exception."""
        self._rank = rank
        if self._failure is not None:
            return self._failure
        constructor, args, kwargs = self._construction
        self._construction = None
        try:
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

    async def close(self) -> None:
        """Call the object's method ``close``, uninterrupted by SIGTERM."""
        self._termination.ignored = not self._termination.came
        await _close(getattr(self._object, "close", None))

    async def serve(self, broadcasts: MessageQueue, requests: MessageQueue) -> None:
        """Serve the calls of all workers, and the calls of this worker, until the driver closes a queue, or dies."""
        try:
            async with self._group:
                self._group.create_task(self._read(BROADCASTS, broadcasts))
                self._group.create_task(self._read(REQUESTS, requests))
        except* (PeerDied, QueueClosed):
            pass

    async def _read(self, source: int, queue: MessageQueue) -> None:
        try:
            while True:
                self._take(source, await queue.dequeue(indefinite=True))
                with suppress(QueueEmpty):  # the next messages may cancel a call that would begin here
                    while source == REQUESTS:
                        self._take(source, queue.dequeue_nowait())
                if not self._busy:
                    self._busy = True
                    await self._advance()
        finally:
            self._ending = True

    def _take(self, source: int, message: Message) -> None:
        kind, number, _, value = message
        calls = self._calls[source]
        if kind == CREDIT:
            for _ in range(value * (number in self._credits)):
                self._credits[number].release()
        elif kind != CANCEL:
            calls.append(message)
        else:
            for index, call in enumerate(calls):
                if call[1] == number:
                    calls[index] = CANCEL, number, call[2], None
                    return
            # A task created just now begins first, and can answer then.
            asyncio.get_running_loop().call_soon(self._interrupt, number)

    def _next_call(self) -> Message | None:
        """Return the next call in the order of sending; of kind CANCEL for a cancelled one; None: not arrived yet."""
        for source, calls in enumerate(self._calls):
            if calls:
                _, number, after, _ = calls[0]
                if isinstance(after, dict):
                    after = after.get(self._rank, 0)
                if after <= self._begun[1 - source]:
                    self._begun[source] = number
                    return calls.popleft()
        return None

    def _interrupt(self, number: int) -> None:
        if number in self._tasks:
            self._tasks[number].cancel()

    async def _advance(self) -> None:
        """Run the queued calls, up to the first whose result has to be awaited: its task continues."""
        while (call := self._next_call()) is not None:
            kind, number, _, value = call
            if kind == CANCEL:
                await self._reply(RESULT, number, None)
                continue
            try:
                if isinstance(value, Undecodable):
                    raise value.error
                request = Request(*value)
                result = self._call(request)
            except (Exception, asyncio.CancelledError) as error:  # the latter from the method
                await self._reply(FAILURE, number, failure_of(error))
                continue
            if inspect.isawaitable(result):
                self._tasks[number] = self._group.create_task(self._await_result(kind, number, request, result))
                return
            await self._answer(kind, number, request, result)
        self._busy = False

    async def _await_result(self, kind: int, number: int, request: Request, result: Awaitable[Any]) -> None:
        """Await the result of a coroutine method, and answer; then continue with the queued calls."""
        task = self._tasks[number]
        self._awaited = number
        self._progress.task = task
        self._progress.enter(BUSY)
        failure: RemoteFailure | None = None
        try:
            value = await result
        except (Exception, asyncio.CancelledError) as error:  # the latter from the method, or by `_interrupt`
            if self._stops:
                raise
            failure = failure_of(error)
        finally:
            self._awaited = None
            self._progress.enter(IDLE)
            del self._tasks[number]
            while task.cancelling() and not self._stops:  # only the method was cancelled
                task.uncancel()
        if failure is None:
            await self._answer(kind, number, request, value)
        else:
            await self._reply(FAILURE, number, failure)
        await self._advance()

    async def _answer(self, kind: int, number: int, request: Request, result: Any) -> None:
        """Send the result of a method, or begin to send the items of a stream."""
        if kind == STREAM:
            self._credits[number] = asyncio.Semaphore(request.prefetch)
            self._tasks[number] = self._group.create_task(self._send_items(number, result))
        else:
            wanted = request.reply_rank in (None, self._rank)
            await self._reply(RESULT, number, result if wanted else None)

    async def _reply(self, kind: int, number: int, value: Any) -> None:
        try:
            await self.replies.enqueue((kind, number, 0, value))
        except (PeerDied, QueueClosed):
            raise
        except AioshmError as error:  # the value cannot be encoded, is too large, or memory is short
            await self.replies.enqueue((FAILURE, number, 0, failure_of(error)))

    def _call(self, request: Request) -> Any:
        """Call a method, or a function with the object; the result may be awaitable."""
        if isinstance(request.method, str):
            method = getattr(self._object, request.method)
            return self._run_plain(method, *request.args, **request.kwargs)
        return self._run_plain(request.method, self._object, *request.args, **request.kwargs)

    def _run_plain(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the user's, which may hold up the loop for long: SIGTERM interrupts it."""
        if self._awaited is None:  # else an item of a stream would count as progress of the coroutine method
            self._progress.enter(BUSY)
        self._termination.interrupts = True
        try:
            return function(*args, **kwargs)
        finally:
            self._termination.interrupts = False
            if self._awaited is None:
                self._progress.enter(IDLE)
            self._termination.raise_again()

    async def _send_items(self, number: int, result: Any) -> None:
        items: Items | None = None
        failure: RemoteFailure | None = None
        try:
            items = _items_of(result)
            while (item := await self._next_item(number, items)) is not None:
                await self.replies.enqueue((ITEM, number, 0, item[0]))
                if isinstance(items, Iterator):
                    await asyncio.sleep(0)  # calls run between two items
        except (Exception, asyncio.CancelledError) as error:
            failure = failure_of(error)
        try:
            await _close(getattr(items, "aclose", None) or getattr(items, "close", None))
        except (Exception, asyncio.CancelledError) as error:
            if not self._stops:
                logger.warning("a stream's generator has raised while it was closed: %s", failure_of(error))
        del self._tasks[number], self._credits[number]
        if not self._stops:
            await self._reply(RESULT if failure is None else FAILURE, number, failure)

    async def _next_item(self, number: int, items: Items) -> tuple[Any] | None:
        await self._credits[number].acquire()
        try:
            if isinstance(items, Iterator):
                return (self._run_plain(next, items),)
            return (await anext(items),)
        except (StopIteration, StopAsyncIteration):
            return None


def _items_of(result: Any) -> Items:
    if hasattr(result, "__aiter__"):
        return cast(AsyncIterator[Any], aiter(result))
    if hasattr(result, "__iter__"):
        return cast(Iterator[Any], iter(result))
    raise TypeError(f"the result of a streamed method must be iterable, not {type(result).__qualname__}")


async def _close(close: object) -> None:
    """Call a method ``close``, if there is one."""
    if callable(close):
        closing = close()
        if inspect.isawaitable(closing):
            await closing
