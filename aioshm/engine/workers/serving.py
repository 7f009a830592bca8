"""A worker's calls: taken from two queues, and done one after the other, in the order in which they were sent.

Both queues are read all the time, also while a coroutine method is awaited, because a call may be cancelled meanwhile;
calls wait in a queue here. Streams run beside them: a generator makes its next item between the calls, an asynchronous
one also wherever it awaits something, and neither is ahead of its consumer by more items than agreed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from aioshm.engine.workers.messages import (
    CALL,
    CANCEL,
    CREDIT,
    FAILURE,
    ITEM,
    LEAVE,
    RESULT,
    STREAM,
    Message,
    Request,
    Undecodable,
    failure_of,
)
from aioshm.errors import AioshmError, PeerDied, QueueClosed, QueueEmpty
from aioshm.queue import MessageQueue

if TYPE_CHECKING:
    from aioshm.engine.workers.worker import Worker

logger: logging.Logger = logging.getLogger("aioshm.engine")

Items: TypeAlias = Iterator[Any] | AsyncIterator[Any]


class _Stream:
    """A generator, and how many items it may make."""

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._more = asyncio.Event()
        self.task: asyncio.Task[None]

    def give(self, credit: int) -> None:
        self._credit += credit
        self._more.set()

    async def spend(self) -> None:
        while not self._credit:
            self._more.clear()
            await self._more.wait()
        self._credit -= 1


class Serving:
    """Serves the calls of all workers (steps), and those of this one (requests)."""

    def __init__(
        self, worker: Worker, rank: int, steps: MessageQueue, requests: MessageQueue, replies: MessageQueue
    ) -> None:
        self._worker = worker
        self._rank = rank
        self._steps = steps
        self._requests = requests
        self._replies = replies
        self._queue: deque[Message] = deque()
        self._early: deque[Message] = deque()  # requests that were sent after a step which has not come yet
        self._last_step = 0
        self._n_requests = 0
        self._more_requests = asyncio.Event()
        self._dropped: set[int] = set()  # requests in the queue that were cancelled
        self._streams: dict[int, _Stream] = {}
        self._busy = False  # whether a task does the calls in the queue
        self._working: asyncio.Task[None] | None = None  # awaits the result of a method, and goes on with the queue
        self._awaited: int | None = None  # the call whose method is awaited
        self._main: asyncio.Task[Any] | None = None
        self._failure: Exception | None = None
        self._stopping = False

    async def run(self) -> None:
        """Serve until the driver closes its queues, dies, or ends this worker."""
        self._main = asyncio.current_task()
        reading = self._spawn(self._read_requests())
        try:
            await self._read_steps()
        except (QueueClosed, PeerDied):  # the driver is gone
            pass
        except asyncio.CancelledError:
            if self._failure is None:
                raise
            raise self._failure from None
        finally:
            await self._stop(reading)

    # Reading

    async def _read_steps(self) -> None:
        while True:
            step: Message = await self._steps.dequeue(indefinite=True)
            kind, number, _, value = step
            if kind == LEAVE:
                if self._rank in value:
                    return
                continue
            sent_before = 0 if isinstance(value, Undecodable) else Request(*value).after.get(self._rank, 0)
            while self._n_requests < sent_before:
                self._more_requests.clear()
                await self._more_requests.wait()
            self._last_step = number
            self._queue.append(step)
            while self._early and self._early[0][2] <= number:
                self._queue.append(self._early.popleft())
            await self._go_on()

    async def _read_requests(self) -> None:
        requests = self._requests
        with suppress(QueueClosed, PeerDied):  # the driver is gone: the queue of steps ends, too
            while True:
                self._take(await requests.dequeue(indefinite=True))
                # The next ones may take back a call that would be begun here.
                with suppress(QueueEmpty):
                    while True:
                        self._take(requests.dequeue_nowait())
                await self._go_on()

    def _take(self, message: Message) -> None:
        kind, call, after, value = message
        if kind == CANCEL:
            self._cancel(call)
        elif kind == CREDIT:
            if (stream := self._streams.get(call)) is not None:
                stream.give(value)
        else:
            self._n_requests += 1
            self._more_requests.set()
            (self._early if after > self._last_step else self._queue).append(message)

    def _cancel(self, call: int) -> None:
        if any(number == call for _, number, _, _ in (*self._queue, *self._early)):
            self._dropped.add(call)
        else:  # a task that was made just now begins first, and can answer then
            asyncio.get_running_loop().call_soon(self._interrupt, call)

    def _interrupt(self, call: int) -> None:
        if call == self._awaited:
            assert self._working is not None
            self._working.cancel()
        elif (stream := self._streams.get(call)) is not None:
            stream.task.cancel()

    # Doing calls

    async def _go_on(self) -> None:
        """Do the calls in the queue, unless another task does; a task of its own awaits their results."""
        if self._busy:
            return
        self._busy = True
        begun = await self._advance()
        if begun is not None:
            self._working = self._spawn(self._work(*begun))

    async def _advance(self) -> tuple[Message, Awaitable[Any]] | None:
        """Do the calls in the queue; return the first whose result has to be awaited."""
        while self._queue:
            call = self._queue.popleft()
            _, number, _, value = call
            if number in self._dropped:
                self._dropped.discard(number)
                await self._reply(number, RESULT, None)
                continue
            try:
                if isinstance(value, Undecodable):
                    raise value.error
                result = self._worker.call(Request(*value))
            except (Exception, asyncio.CancelledError) as error:  # the latter from the method
                await self._reply(number, FAILURE, failure_of(error))
                continue
            if inspect.isawaitable(result):
                return call, result
            await self._finish(call, result)
        self._busy = False
        return None

    async def _work(self, call: Message, result: Awaitable[Any]) -> None:
        """Await the result of a method; then go on with the queue."""
        begun: tuple[Message, Awaitable[Any]] | None = call, result
        while begun is not None:
            call, result = begun
            self._awaited = number = call[1]
            try:
                value = await result
            except (Exception, asyncio.CancelledError) as error:  # the latter from the method, or by `_cancel`
                self._awaited = None
                if self._stopping or self._worker.terminated:
                    raise
                await self._reply(number, FAILURE, failure_of(error))
            else:
                self._awaited = None
                await self._finish(call, value)
            begun = await self._advance()

    async def _finish(self, call: Message, result: Any) -> None:
        kind, number, _, value = call
        request = Request(*value)
        if kind == CALL:
            wanted = request.reply_rank in (None, self._rank)
            await self._reply(number, RESULT, result if wanted else None)
            return
        assert kind == STREAM
        try:
            items = _items_of(result)
        except Exception as error:
            await self._reply(number, FAILURE, failure_of(error))
            return
        stream = self._streams[number] = _Stream(request.prefetch)
        stream.task = self._spawn(self._send_items(number, stream, items))

    async def _send_items(self, call: int, stream: _Stream, items: Items) -> None:
        kind, value = RESULT, None
        try:
            while (made := await _next_item(stream, items)) is not None:
                await self._replies.enqueue((ITEM, call, 0, made[0]))
                if isinstance(items, Iterator):
                    await asyncio.sleep(0)  # calls have their turn
        except (Exception, asyncio.CancelledError) as error:
            kind, value = FAILURE, failure_of(error)
        try:
            await _close(items)
        except (Exception, asyncio.CancelledError) as error:
            if not self._stopping:
                logger.warning("a stream's generator has raised while it was closed: %s", failure_of(error))
        del self._streams[call]
        if not self._stopping:
            await self._reply(call, kind, value)

    async def _reply(self, call: int, kind: int, value: Any) -> None:
        try:
            await self._replies.enqueue((kind, call, 0, value))
        except (PeerDied, QueueClosed):
            raise
        except AioshmError as error:  # it cannot be encoded, is too large, or there is no memory for it
            await self._replies.enqueue((FAILURE, call, 0, failure_of(error)))

    # Tasks

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the worker where a task has failed that should not: its calls would never be answered."""
        if task.cancelled() or self._stopping:
            return
        error = task.exception()  # a SystemExit leaves the loop by itself
        if isinstance(error, Exception) and not isinstance(error, (PeerDied, QueueClosed)) and self._main is not None:
            self._failure = error
            self._main.cancel()

    async def _stop(self, reading: asyncio.Task[None]) -> None:
        self._stopping = True
        tasks = [reading, *(stream.task for stream in self._streams.values())]
        if self._working is not None:
            tasks.append(self._working)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _items_of(result: Any) -> Items:
    if hasattr(result, "__aiter__"):
        return cast(AsyncIterator[Any], aiter(result))
    if hasattr(result, "__iter__"):
        return cast(Iterator[Any], iter(result))
    raise TypeError(f"what is streamed must be a generator, or iterable otherwise, not {type(result).__qualname__}")


async def _next_item(stream: _Stream, items: Items) -> tuple[Any] | None:
    await stream.spend()
    try:
        return (next(items) if isinstance(items, Iterator) else await anext(items),)
    except (StopIteration, StopAsyncIteration):
        return None


async def _close(items: Items) -> None:
    close = getattr(items, "aclose" if isinstance(items, AsyncIterator) else "close", None)
    if callable(close):
        closing = close()
        if inspect.isawaitable(closing):
            await closing
