"""The table of calls in flight: sent to one worker or to all, then answered, cancelled, or failed if a worker dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from aioshm.arguments import check_timeout
from aioshm.engine.workers.messages import (
    CALL,
    CANCEL,
    CREDIT,
    FAILURE,
    ITEM,
    STREAM,
    Channel,
    Message,
    Request,
    Undecodable,
    failure_of,
)
from aioshm.engine.workers.schedule import Call, Schedule
from aioshm.errors import (
    AioshmError,
    PeerDied,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    RequestAborted,
)
from aioshm.queue import MessageQueue, merge

if TYPE_CHECKING:
    from aioshm.engine.workers.session import Session


DRAIN_POLL_S = 0.01
"""How often `CallTable.drain` checks whether the last calls are done."""


class CallTable:
    """Sends calls, and delivers their answers."""

    def __init__(self, session: Session, broadcasts: MessageQueue) -> None:
        self._session = session
        self.broadcasts = broadcasts
        self.schedule: Schedule = Schedule()
        self.channels: dict[int, Channel] = {}  # of the present workers, by rank
        self.absent: set[int] = set()  # ranks that wait for a replacement
        self.lock: asyncio.Lock = asyncio.Lock()  # held by the present call of all workers
        self._all_present = asyncio.Event()
        self._all_present.set()
        self._calls: dict[int, Call] = {}  # by number: sent, or being sent, and not answered yet
        self._number = 0
        self._last_broadcast = 0
        self._answers = merge({}, errors="yield")
        self._reading: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def sent_to(self, rank: int) -> list[Call]:
        """Return the unanswered calls of a worker."""
        return [call for call in self._calls.values() if call.sent and rank in call.missing]

    # Calls of all workers

    async def call_all(self, call: Call, request: Request, timeout: float | None) -> list[Any]:
        """Call all workers after earlier calls of all are answered; return the results by rank."""
        try:
            async with self._within(timeout, call), self.lock:
                await self.all_present()
                ranks = range(self._session.n_workers)
                await self._broadcast(call, request, ranks)
                await self._wait(call)
        finally:
            call.done = True  # later answers are dropped
        call.check()
        return [call.results.get(rank) for rank in ranks]

    async def _broadcast(self, call: Call, request: Request, ranks: Iterable[int]) -> None:
        self._register(call, ranks)
        self.schedule.broadcast_begins(ranks)
        after = {rank: channel.n_requests for rank, channel in self.channels.items() if channel.n_requests}
        try:
            await self.broadcasts.enqueue((CALL, call.number, 0, (*request[:-1], after)))
        except BaseException as error:  # no worker has seen it
            self._calls.pop(call.number, None)
            for rank in call.missing:
                self.schedule.broadcast_ends(rank)
            if isinstance(error, PeerDied):
                await self._session.lost(error.rank)
            raise
        call.sent = True
        self._last_broadcast = call.number

    async def all_present(self) -> None:
        await self._all_present.wait()
        self._session.check()

    # Calls of one worker

    async def call(self, call: Call, request: Request, timeout: float | None) -> Any:
        """Send ``request`` to the worker that ``call`` wants, and return the result; ``call`` tracks it until then."""
        try:
            async with self._within(timeout, call):
                await self._send(call, CALL, request)
                await self._wait(call)
        finally:
            self.abandon(call)
        call.check()
        return next(iter(call.results.values()))

    async def next_item(self, call: Call, request: Request, timeout: float | None) -> Any:
        """Start the stream at the first call; return the next item, or raise StopAsyncIteration at the end."""
        if not (call.sent and call.ready.is_set()):
            async with self._within(timeout, call):
                if not call.sent:
                    await self._send(call, STREAM, request)
                await self._wait(call)
        if not call.items:
            call.check()
            raise StopAsyncIteration
        item = call.items.popleft()
        if not (call.items or call.done):
            call.ready.clear()
        call.taken += 1
        if call.taken == max(1, request.prefetch // 2) and not call.done:
            self._post(call, CREDIT, call.taken)
            call.taken = 0
        return item

    async def _send(self, call: Call, kind: int, request: Request) -> None:
        """Send a call when the schedule assigns a worker; if the worker dies, send to its replacement."""
        while True:
            self._session.check()
            await self._get_turn(call)
            if not self.schedule.holds(call):  # the assigned worker has died meanwhile
                continue
            assert call.slot is not None
            rank = call.slot.rank
            channel = self.channels[rank]
            self._register(call, (rank,))
            after = self._last_broadcast * (self._last_broadcast > channel.after)
            message = (kind, call.number, after, tuple(request))
            try:
                await channel.send(message)
            except (PeerDied, QueueClosed):  # the worker is gone, and has not received the call
                if channel is self.channels.get(rank):
                    self._session.queue_ended(rank)
                    await self._wait(call)
                continue
            except BaseException:  # its queue has had no room in time
                self.abandon(call)
                raise
            call.sent = True
            return

    async def _get_turn(self, call: Call) -> None:
        if not (call.queued or self.schedule.holds(call)):  # else an earlier wait has timed out
            call.ready.clear()
            self.schedule.ask(call)
        await self._wait(call)
        call.check()
        self._session.check()

    def abandon(self, call: Call) -> None:
        """Abandon a call after its caller has stopped waiting; cancel the call if it was sent."""
        if call.sent:
            if not call.done:
                self._post(call, CANCEL)
            call.done = True
            call.items.clear()
            return
        self._calls.pop(call.number, None)
        if call.order:
            self.schedule.withdraw(call)

    def _post(self, call: Call, kind: int, value: Any = None) -> None:
        channel = self.channels.get(-1 if call.rank is None else call.rank)
        if channel is None or call.number not in self._calls:
            return
        message = (kind, call.number, 0, value)
        with suppress(AioshmError):  # the worker is gone: all its calls fail anyway
            try:
                channel.requests.enqueue_nowait(message)
            except QueueFull:  # of calls that the worker has not read
                self._spawn(channel.post(message))

    @asynccontextmanager
    async def _within(self, timeout: float | None, call: Call) -> AsyncIterator[None]:
        if timeout is None:
            yield
            return
        try:
            async with asyncio.timeout(timeout) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            text = f"{call.method}: {self._missing_of(call)} within {timeout} s"
            if self._session.replacer is not None and not call.sent:
                text = ": ".join(filter(None, (text, self._session.replacer.describe_absent())))
            raise TimeoutError(text) from None

    def _missing_of(self, call: Call) -> str:
        """Name the workers that a call waits for."""
        describe = self._session.processes.describe
        if call.of_all:
            if call.missing:
                return f"no answer from {describe(sorted(call.missing))}"
            if self.absent:
                return "waits for the replacements of dead workers"
            return "waits for the calls before it"
        if call.rank is None:
            return f"no idle worker: {describe(sorted(self.channels)) or 'all are being restarted'}"
        if call.rank in self.channels:
            return f"no answer from {describe([call.rank])}"
        return f"no replacement of {describe([call.rank])}"

    def _register(self, call: Call, ranks: Iterable[int]) -> None:
        self._number += 1
        call.number = self._number
        call.missing = set(ranks)
        call.ready.clear()
        self._calls[call.number] = call

    # Answers

    def _read_answers(self) -> None:
        if self._calls and (self._reading is None or self._reading.done()):
            self._reading = self._session.spawn(self._read(), "aioshm-reads-answers")

    async def _read(self) -> None:
        """Deliver the messages of all workers while calls are in flight."""
        while self._calls:
            try:
                rank, message = await anext(self._answers)
            except StopAsyncIteration:  # there is no queue, or all have ended
                return
            self._receive(rank, message)

    async def _wait(self, call: Call) -> None:
        """Wait until the caller has to check the call; poll briefly for the answer of a lone call first."""
        while len(self._calls) == 1 and not call.ready.is_set():
            answer = self._answers.take_soon()
            if answer is None:
                break
            self._receive(*answer)
        self._read_answers()
        await call.ready.wait()

    def _receive(self, rank: int, message: Any) -> None:
        """Deliver an answer, or an error of the queue or of one message."""
        if isinstance(message, AioshmError) and rank in self._answers.failed:
            self._session.queue_ended(rank)
            return
        if isinstance(message, tuple):
            self._deliver(rank, message)
            return
        for call in self.sent_to(rank):
            call.errors[rank] = failure_of(message)
            self._answered(rank, call)
            if not call.done and not call.missing:
                call.finish()

    def _deliver(self, rank: int, reply: Message) -> None:
        kind, number, _, value = reply
        call = self._calls.get(number)
        if call is None or rank not in call.missing:
            return
        if kind != ITEM:
            self._answered(rank, call)
        if call.done:
            return
        if isinstance(value, Undecodable):
            call.errors[rank] = failure_of(value.error)
            if kind == ITEM:
                self._post(call, CANCEL)
                call.finish()
        elif kind == ITEM:
            call.items.append(value)
            call.notify()
        elif kind == FAILURE:
            call.errors[rank] = value
        else:
            call.results[rank] = value
        if not call.missing:
            call.finish()

    def _answered(self, rank: int, call: Call) -> None:
        call.missing.discard(rank)
        if not call.missing:
            del self._calls[call.number]
        if call.of_all:
            self.schedule.broadcast_ends(rank)
        else:
            self.schedule.answered(call)

    # Workers come and go

    def add(self, rank: int, requests: MessageQueue, replies: MessageQueue) -> None:
        """Start to send calls to a worker that is ready."""
        self.channels[rank] = Channel(requests, replies, self._last_broadcast)
        self._answers.add(rank, replies)
        self._read_answers()
        self.schedule.arrived(rank)

    def mark_absent(self, ranks: Iterable[int]) -> None:
        self.absent.update(ranks)
        if self.absent:
            self._all_present.clear()

    def mark_present(self, ranks: Iterable[int]) -> None:
        self.absent.difference_update(ranks)
        if not self.absent:
            self._all_present.set()

    def died(self, rank: int, failure: Callable[[], AioshmError]) -> None:
        """Fail calls in flight on a dead worker. Queued calls stay queued for its replacement."""
        channel = self.channels.pop(rank, None)
        if channel is not None:
            self._answers.remove(rank)
            with suppress(AioshmError, QueueEmpty):
                while True:  # answers from before the death are valid
                    self._deliver(rank, channel.replies.dequeue_nowait())
            self._spawn(channel.aclose())
        self.schedule.gone(rank)
        for call in [*self._calls.values()]:
            # A call of all fails even after the answer of the dead worker: other workers may wait for that worker.
            if not call.of_all and rank not in call.missing:
                continue
            call.missing.discard(rank)
            if not call.missing:
                del self._calls[call.number]
            if call.sent or call.of_all:
                call.fail(failure)
            else:  # not sent yet: `_send` asks for a worker again
                call.notify()

    def forget(self, rank: int, failure: Callable[[], AioshmError]) -> None:
        """Remove a worker for good, and fail its queued calls."""
        self.died(rank, failure)
        for call in self.schedule.forget(rank):
            call.fail(failure)

    async def drain(self, ranks: range) -> None:
        """Send these workers no more calls for any idle worker, and wait until their present calls are done."""
        for rank in ranks:
            self.schedule.set_leaving(rank)
        while not self.schedule.done(ranks):
            await asyncio.sleep(DRAIN_POLL_S)
            self._session.check()

    def end(self, failure: Callable[[], AioshmError]) -> None:
        for call in [*self.schedule.waiting(), *self._calls.values()]:
            call.fail(failure)
        self._all_present.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Close all queues; the workers end their calls and exit. Idempotent."""
        channels = self.channels
        self.channels = {}
        for channel in channels.values():
            self._spawn(channel.aclose())
        try:
            await self._answers.aclose()
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            await self.broadcasts.aclose()


class WorkerStream(AsyncIterator[Any]):
    """The items of a worker's generator, see `WorkerGroup.stream`.

    After a timeout the iteration may continue. Leaving the loop, dropping the stream, `aclose`, and a cancellation
    close the generator; iterating further raises `RequestAborted`.
    """

    def __init__(
        self,
        calls: CallTable,
        call: Call,
        request: Request,
        timeout: float | None,
        metering: AbstractContextManager[Any],
    ) -> None:
        self._calls = calls
        self._call = call
        self._request = request
        self._timeout = timeout
        self._metering = metering
        self._count_item: Callable[[], None] | None = None  # None: before the beginning, and after the end
        self._loop = asyncio.get_running_loop()
        self._left = False
        self._waiting = False

    def __anext__(self) -> Coroutine[Any, Any, Any]:
        return self.next(self._timeout)

    async def next(self, timeout: float | None = None) -> Any:
        """Wait for the next item; raises as the iteration does, see `WorkerGroup.stream`.

        Args:
            timeout: Seconds to wait; None waits for ever.
        """
        check_timeout("timeout", timeout)
        call = self._call
        if self._waiting:
            raise RuntimeError(f"{call.method}: another task waits for an item of this stream")
        if self._left:
            raise self._aborted()
        if self._count_item is None and not call.done:
            self._count_item = self._metering.__enter__()
        self._waiting = True
        try:
            item = await self._calls.next_item(call, self._request, timeout)
        except TimeoutError:
            raise
        except BaseException as error:
            self._end(None if isinstance(error, StopAsyncIteration) else error)
            if self._left and not isinstance(error, asyncio.CancelledError):
                raise self._aborted() from None
            self._left = isinstance(error, asyncio.CancelledError)
            raise
        finally:
            self._waiting = False
        if self._count_item is not None:
            self._count_item()
        return item

    def _aborted(self) -> RequestAborted:
        call = self._call
        text = f"{call.method}: the stream was left before its last item"
        return RequestAborted(text, engine=call.rank, request_id=call.method)

    def _end(self, error: BaseException | None) -> None:
        self._calls.abandon(self._call)
        if self._count_item is not None:
            self._count_item = None
            self._metering.__exit__(None if error is None else type(error), error, None)

    async def aclose(self) -> None:
        """Close the generator unless finished. Idempotent."""
        self._left = self._left or not self._call.done or bool(self._call.items)
        self._end(GeneratorExit())
        self._call.notify()

    def __del__(self) -> None:
        if self._count_item is not None and asyncio._get_running_loop() is self._loop:
            self._end(GeneratorExit())
