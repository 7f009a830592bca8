"""A worker's server: takes calls from two queues, and runs them one by one, in the order of sending.

The server reads both queues all the time, also while a coroutine method is awaited: a call may be cancelled meanwhile.
Streams run beside the calls: a generator yields an item between calls, an asynchronous generator also at an ``await``.
A generator is ahead of its consumer by a limited number of items.
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

BROADCASTS, REQUESTS = range(2)


class CallOrder:
    """Restores the order in which the driver sent calls through two queues. No I/O."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._queued: tuple[deque[Message], deque[Message]] = (deque(), deque())
        self._last_broadcast = 0
        self._n_requests = 0

    def add(self, source: int, message: Message) -> None:
        self._queued[source].append(message)

    def cancel(self, number: int) -> bool:
        """Cancel a queued call; return whether it was queued."""
        requests = self._queued[REQUESTS]
        for index, (_, call, after, _) in enumerate(requests):
            if call == number:
                requests[index] = (CANCEL, number, after, None)
                return True
        return False

    def next(self) -> Message | None:
        """Return the next call; of kind CANCEL for a cancelled call; None: not arrived yet."""
        broadcasts, requests = self._queued
        if requests and requests[0][2] <= self._last_broadcast:
            self._n_requests += 1
            return requests.popleft()
        if broadcasts and self._sent_before(broadcasts[0]) <= self._n_requests:
            self._last_broadcast = broadcasts[0][1]
            return broadcasts.popleft()
        return None

    def _sent_before(self, broadcast: Message) -> int:
        """Return how many requests of this worker the driver sent before a broadcast."""
        value = broadcast[3]
        if isinstance(value, Undecodable):
            return 0
        return Request(*value).after.get(self._rank, 0)


class CallServer:
    """Serves the calls of all workers (broadcasts), and the calls of this worker (requests)."""

    def __init__(self, worker: Worker, rank: int, replies: MessageQueue) -> None:
        self._worker = worker
        self._rank = rank
        self._replies = replies
        self._order = CallOrder(rank)
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._credits: dict[int, asyncio.Semaphore] = {}  # how many items each stream may yield
        self._busy = False  # whether a task runs the queued calls
        self._running: asyncio.Task[None] | None = None  # awaits the result of a method, and continues with the queue
        self._awaited: int | None = None  # the call of the awaited method
        self._tasks: set[asyncio.Task[None]] = set()
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done: the server stops

    async def run(self, broadcasts: MessageQueue, requests: MessageQueue) -> None:
        """Serve until the driver closes a queue, or dies."""
        self._spawn(self._read(BROADCASTS, broadcasts))
        self._spawn(self._read(REQUESTS, requests))
        try:
            await self._end  # a cancellation cancels the future
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, source: int, queue: MessageQueue) -> None:
        while True:
            self._take(source, await queue.dequeue(indefinite=True))
            # The next requests may cancel a call that would begin here.
            with suppress(QueueEmpty):
                while source == REQUESTS:
                    self._take(source, queue.dequeue_nowait())
            await self._run_queued()

    def _take(self, source: int, message: Message) -> None:
        kind, number, _, value = message
        if kind == CANCEL:
            if not self._order.cancel(number):  # a task created just now begins first, and can answer then
                asyncio.get_running_loop().call_soon(self._interrupt, number)
        elif kind == CREDIT:
            if number in self._credits:
                for _ in range(value):
                    self._credits[number].release()
        else:
            self._order.add(source, message)

    def _interrupt(self, number: int) -> None:
        if number == self._awaited:
            assert self._running is not None
            self._running.cancel()
        elif number in self._streams:
            self._streams[number].cancel()

    # Running calls

    async def _run_queued(self) -> None:
        """Run the queued calls, unless another task does; a new task awaits their results."""
        if self._busy:
            return
        self._busy = True
        begun = await self._advance()
        if begun is not None:
            self._running = self._spawn(self._run(*begun))

    async def _advance(self) -> tuple[Message, Awaitable[Any]] | None:
        """Run the queued calls; return the first whose result has to be awaited."""
        while (call := self._order.next()) is not None:
            kind, number, _, value = call
            if kind == CANCEL:
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

    async def _run(self, call: Message, result: Awaitable[Any]) -> None:
        """Await the result of a method; then continue with the queue."""
        begun: tuple[Message, Awaitable[Any]] | None = call, result
        while begun is not None:
            call, result = begun
            self._awaited = number = call[1]
            try:
                value = await self._worker.finish(result)
            except (Exception, asyncio.CancelledError) as error:  # the latter from the method, or by `_interrupt`
                self._awaited = None
                if self._end.done() or self._worker.terminated:
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
        self._credits[number] = asyncio.Semaphore(request.prefetch)
        self._streams[number] = self._spawn(self._send_items(number, items))

    async def _next_item(self, call: int, items: Items) -> tuple[Any] | None:
        await self._credits[call].acquire()
        try:
            if isinstance(items, Iterator):
                return (self._worker.run_plain(next, items),)
            return (await anext(items),)
        except (StopIteration, StopAsyncIteration):
            return None

    async def _send_items(self, call: int, items: Items) -> None:
        kind = RESULT
        value = None
        try:
            while (item := await self._next_item(call, items)) is not None:
                await self._replies.enqueue((ITEM, call, 0, item[0]))
                if isinstance(items, Iterator):
                    await asyncio.sleep(0)  # calls run between two items
        except (Exception, asyncio.CancelledError) as error:
            kind = FAILURE
            value = failure_of(error)
        try:
            await _close(items)
        except (Exception, asyncio.CancelledError) as error:
            if not self._end.done():
                logger.warning("a stream's generator has raised while it was closed: %s", failure_of(error))
        del self._streams[call], self._credits[call]
        if not self._end.done():
            await self._reply(call, kind, value)

    async def _reply(self, call: int, kind: int, value: Any) -> None:
        try:
            await self._replies.enqueue((kind, call, 0, value))
        except (PeerDied, QueueClosed):
            raise
        except AioshmError as error:  # the value cannot be encoded, is too large, or memory is short
            await self._replies.enqueue((FAILURE, call, 0, failure_of(error)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        """End the server if a task has failed: its calls would never be answered."""
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if self._end.done():
            return
        if isinstance(error, (PeerDied, QueueClosed)):  # the driver is gone, or dismisses this worker
            self._end.set_result(None)
        elif isinstance(error, Exception):  # a SystemExit leaves the loop by itself
            self._end.set_exception(error)


def _items_of(result: Any) -> Items:
    if hasattr(result, "__aiter__"):
        return cast(AsyncIterator[Any], aiter(result))
    if hasattr(result, "__iter__"):
        return cast(Iterator[Any], iter(result))
    raise TypeError(f"the result of a streamed method must be iterable, not {type(result).__qualname__}")


async def _close(items: Items) -> None:
    close = getattr(items, "aclose", None) or getattr(items, "close", None)
    if callable(close):
        closing = close()
        if inspect.isawaitable(closing):
            await closing
