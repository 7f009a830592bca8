"""What a worker does once it has calls of its own: it takes steps and requests, and does one after the other.

Requests come through a queue of this worker's own, answers go through another one. Both queues are read all the time,
also while a coroutine method is awaited, because a request may be cancelled meanwhile; what is read waits in line, in
the order in which it was sent. Streams go on beside the line: a generator is asked for its next item between the calls,
an asynchronous one also wherever it awaits something, and neither is ahead of its consumer by more items than agreed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, cast

import msgspec

from aioshm.arguments import MAX_SECONDS
from aioshm.engine.workers.envelope import (
    CANCEL,
    CREDIT,
    FAILURE,
    RESULT,
    STREAM,
    Envelope,
    EnvelopeCodec,
    Undecodable,
)
from aioshm.engine.workers.performing import Leave, Performer, failed, failure_of, hide_frames
from aioshm.engine.workers.streaming import Streams, items_of
from aioshm.errors import AioshmError, CodecError, CorruptSlot, PeerDied, QueueClosed, QueueEmpty
from aioshm.queue import Handle, MessageQueue, merge
from aioshm.queue.ends.reading import ReadingEnd

hide_frames(__file__)

REQUESTS, STEPS = 0, 1


class _Work(NamedTuple):
    """What is in line.

    Attributes:
        call: The number of a request; None: it is a step.
        what: The request, or the step; an exception where it could not be decoded.
        stream: Whether the result is a stream's.
    """

    call: int | None
    what: Any
    stream: bool = False


class Serving:
    """Serves the steps of all workers, and the requests of this one.

    Args:
        performer: Makes the calls.
        rank: The worker's rank.
        steps: The queue of steps.
        answers: Takes the answers to steps.
        taken: How many steps have been taken already.
        requests: The handle of the queue of requests.
        replies: Takes the answers to requests.
    """

    def __init__(
        self,
        performer: Performer,
        rank: int,
        steps: MessageQueue,
        answers: MessageQueue,
        taken: int,
        requests: Handle,
        replies: MessageQueue,
    ) -> None:
        self._performer, self._rank = performer, rank
        self._steps, self._answers, self._taken = steps, answers, taken
        # Requests come whenever there are some: that there are none is no news.
        options = msgspec.structs.replace(requests.options, stall_warning_s=MAX_SECONDS)
        self._requests = MessageQueue.create_from_handle(requests, 0, codec=EnvelopeCodec(), options=options)
        self._source = cast(ReadingEnd, self._requests.end).source
        self._replies = replies
        self._line: deque[_Work] = deque()
        self._early: deque[tuple[int, _Work]] = deque()  # requests that were sent after a step which has not come yet
        self._dropped: set[int] = set()  # requests in line that were cancelled
        self._streams = Streams(replies, self._reply, self._spawn)
        self._working: asyncio.Task[None] | None = None  # awaits what a call has returned, and goes on with the line
        self._awaited: int | None = None  # the number of the request whose method is awaited just now
        self._main: asyncio.Task[Any] | None = None
        self._failure: BaseException | None = None
        self._stopping = False

    async def attach(self) -> bool:
        """Attach to the queue of requests; return whether the driver has not thought better of it."""
        admitting = asyncio.ensure_future(self._replies.wait_until_ready())
        try:
            await self._requests.wait_until_ready()
            await admitting
        except AioshmError:  # the driver lacks something, and has closed it
            await self._requests.aclose()
            return False
        finally:
            admitting.cancel()
        return True

    async def run(self) -> None:
        """Serve until the driver closes its queues, dies, or ends this worker."""
        self._main = asyncio.current_task()
        merged = merge({REQUESTS: self._requests, STEPS: self._steps}, errors="yield")
        try:
            async with self._requests:
                ready = self._source.ready
                async for source, message in merged:
                    if source in merged.failed:  # the driver has died
                        return
                    if source == REQUESTS:
                        self._take(message)
                    else:
                        await self._take_what_was_sent_before()
                        if _ends(message, self._rank):
                            return
                        self._take_step(message)
                    # What has come already is taken first: it may take back a call that would be begun here.
                    if self._working is None and not ready() and (begun := await self._advance()) is not None:
                        self._working = self._spawn(self._work(*begun))
        except (QueueClosed, PeerDied):  # the driver is gone
            pass
        except asyncio.CancelledError:
            if self._failure is None:
                raise
            raise self._failure from None
        finally:
            await merged.aclose()
            await self._stop()

    # Taking what comes

    def _take(self, message: Envelope | Exception) -> None:
        if isinstance(message, Exception):
            raise message
        kind, call, steps, value = message
        if kind == CANCEL:
            self._cancel(call)
        elif kind == CREDIT:
            self._streams.give(call, value)
        else:
            what = value.error if isinstance(value, Undecodable) else value
            work = _Work(call, what, kind == STREAM)
            if steps > self._taken:
                self._early.append((steps, work))
            else:
                self._line.append(work)

    async def _take_what_was_sent_before(self) -> None:
        """Take the requests that were sent before a step that has come; they may have been overlooked just now."""
        requests, source = self._requests, self._source
        while True:
            try:
                message = requests.dequeue_nowait()
            except QueueEmpty:
                if not source.look():
                    return
                message = await requests.dequeue()  # a large one, not all of which has come
            except QueueClosed:
                return
            self._take(message)

    def _take_step(self, step: Any) -> None:
        if isinstance(step, Exception) and not isinstance(step, (CodecError, CorruptSlot)):
            raise step
        self._taken += 1
        self._line.append(_Work(None, step))
        while self._early and self._early[0][0] <= self._taken:
            self._line.append(self._early.popleft()[1])

    def _cancel(self, call: int) -> None:
        if any(work.call == call for work in (*self._line, *(work for _, work in self._early))):
            self._dropped.add(call)
        else:  # a task that was made just now begins first, and can answer then
            asyncio.get_running_loop().call_soon(self._interrupt, call)

    def _interrupt(self, call: int) -> None:
        if call == self._awaited:
            assert self._working is not None
            self._working.cancel()
        else:
            self._streams.cancel(call)

    # Doing what is in line

    async def _advance(self) -> tuple[_Work, Awaitable[Any]] | None:
        """Do what is in line; return what has to be awaited, and what for, as soon as there is something."""
        while self._line:
            work = self._line.popleft()
            if work.call is not None and work.call in self._dropped:
                self._dropped.discard(work.call)
                await self._reply(work.call, RESULT, None)
                continue
            try:
                result = self._begin(work)
            except (Exception, asyncio.CancelledError) as error:  # the latter from the method
                await self._fail(work, error)
                continue
            if inspect.isawaitable(result):
                return work, result
            await self._end(work, result)
        return None

    def _begin(self, work: _Work) -> Any:
        what = work.what
        if isinstance(what, Exception):
            raise what
        if work.call is None:
            return self._performer.begin(what)
        return self._performer.call(what.what, what.args, what.kwargs)

    async def _work(self, work: _Work, result: Awaitable[Any]) -> None:
        """Await what a method has returned; then go on with the line."""
        while True:
            self._awaited = work.call
            try:
                value = await result
            except (Exception, asyncio.CancelledError) as error:  # the latter from the method, or by `_cancel`
                self._awaited = None
                if self._stopping or self._performer.terminated:
                    raise
                await self._fail(work, error)
            else:
                self._awaited = None
                await self._end(work, value)
            begun = await self._advance()
            if begun is None:
                self._working = None
                return
            work, result = begun

    async def _end(self, work: _Work, result: Any) -> None:
        if work.call is None:
            await self._answer(self._performer.done(work.what, result))
        elif not work.stream:
            await self._reply(work.call, RESULT, result)
        else:
            try:
                items = items_of(result)
            except Exception as error:
                await self._fail(work, error)
                return
            self._streams.begin(work.call, items, work.what.items)

    async def _fail(self, work: _Work, error: BaseException) -> None:
        if work.call is None:
            await self._answer(failed(error))
        else:
            await self._reply(work.call, FAILURE, failure_of(error))

    async def _answer(self, answer: tuple[bool, Any]) -> None:
        await send_or_say_why(self._answers, answer, failed)

    async def _reply(self, call: int, kind: int, value: Any) -> None:
        reply = Envelope(kind, call, 0, value)
        await send_or_say_why(self._replies, reply, lambda error: Envelope(FAILURE, call, 0, failure_of(error)))

    # Tasks

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the worker where a task has failed that should not: nobody would be answered any more."""
        if task.cancelled() or self._stopping:
            return
        error = task.exception()
        if error is not None and not isinstance(error, (PeerDied, QueueClosed)) and self._main is not None:
            self._failure = error
            self._main.cancel()

    async def _stop(self) -> None:
        self._stopping = True
        tasks = self._streams.stop()
        if self._working is not None:
            tasks.append(self._working)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _ends(step: Any, rank: int) -> bool:
    """Return whether a step ends the worker."""
    return isinstance(step, tuple) and isinstance(step[0], Leave) and rank in step[0].ranks


async def send_or_say_why(queue: MessageQueue, message: Any, failure: Callable[[AioshmError], Any]) -> None:
    """Send a message, or what is made of the error where it cannot be sent.

    Raises:
        PeerDied, QueueClosed: The driver is gone.
    """
    try:
        await queue.enqueue(message)
    except (PeerDied, QueueClosed):
        raise
    except AioshmError as error:  # it cannot be encoded, is too large, or there is no memory for it
        await queue.enqueue(failure(error))
