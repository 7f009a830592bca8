"""The table of calls in flight: sent to one worker or to all, then answered, cancelled, or failed if a worker dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from aioshm.engine.workers.messages import (
    CALL,
    CANCEL,
    CREDIT,
    FAILURE,
    ITEM,
    STREAM,
    Message,
    Request,
    Undecodable,
    failure_of,
)
from aioshm.engine.workers.rank import Rank
from aioshm.engine.workers.schedule import Call, Schedule
from aioshm.errors import AioshmError, PeerDied, QueueClosed, QueueEmpty, QueueFull, WorkerDied
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
        self._ranks = session.ranks
        self.schedule: Schedule = Schedule(session.ranks)
        self.lock: asyncio.Lock = asyncio.Lock()  # held by the present call of all workers
        self._all_present = asyncio.Event()
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
                await self._broadcast(call, request)
                await self._wait(call)
        finally:
            call.done = True  # later answers are dropped
        call.check()
        return [result for _, result in sorted(call.results.items())]

    async def _broadcast(self, call: Call, request: Request) -> None:
        self._register(call, self._ranks)
        self.schedule.broadcast_begins()
        after = {rank: worker.n_requests for rank, worker in self._ranks.items() if worker.n_requests}
        try:
            await self._enqueue(self.broadcasts, (CALL, call.number, 0, (*request[:-1], after)), call)
        except BaseException:  # no worker has seen it
            self._calls.pop(call.number, None)
            for rank in call.missing:
                self.schedule.broadcast_ends(self._ranks[rank])
            raise
        call.sent = True
        self._last_broadcast = call.number

    async def all_present(self) -> None:
        self._session.check()
        while not self._all_present.is_set():  # another worker may die before this task continues
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
            call.check()  # a stream whose worker has left the group
            await self._get_turn(call)
            worker = call.worker
            if worker is None or not call.assigned:  # the assigned process has died meanwhile
                continue
            self._register(call, (worker.rank,))
            after = self._last_broadcast * (self._last_broadcast > worker.after)
            try:
                await self._enqueue(worker.requests, (kind, call.number, after, tuple(request)), call)
            except (PeerDied, QueueClosed):  # the process is gone, and has not received the call
                if call.assigned:
                    self._session.queue_ended(worker)
                    await self._wait(call)
                continue
            except BaseException:  # its queue has had no room in time
                self.abandon(call)
                raise
            call.sent = True
            if call.assigned:
                worker.n_requests += 1
            else:
                call.fail(WorkerDied(worker.rank, worker.name, None, None, worker.cause))
            return

    async def _enqueue(self, queue: MessageQueue, message: Message, call: Call) -> None:
        """Send a call; wait for room in the queue until the call fails."""
        try:
            queue.enqueue_nowait(message)  # no await if there is room: keeps the order of both queues
            return
        except QueueFull:
            pass
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as call.sending:
                    await queue.enqueue(message)
        finally:
            call.sending = None
        call.check()

    async def _get_turn(self, call: Call) -> None:
        if not (call.queued or call.assigned):  # else an earlier wait has timed out
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
        worker = call.worker
        if worker is not None and call.assigned and call.number in self._calls:
            self._spawn(worker.post((kind, call.number, 0, value)))

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
            if not call.sent:
                text = ": ".join(filter(None, (text, self._session.describe_absent())))
            raise TimeoutError(text) from None

    def _missing_of(self, call: Call) -> str:
        """Name the workers that a call waits for."""
        if call.of_all:
            if call.missing:
                return f"no answer from {self._session.describe(call.missing)}"
            if not self._all_present.is_set():
                return "waits for the replacements of dead workers"
            return "waits for the calls before it"
        if call.rank is None:
            present = [rank for rank, worker in self._ranks.items() if worker.present]
            return f"no idle worker: {self._session.describe(present) or 'all are being restarted'}"
        if self._ranks[call.rank].present:
            return f"no answer from {self._session.describe([call.rank])}"
        return f"no replacement of {self._session.describe([call.rank])}"

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
            self._session.queue_ended(self._ranks[rank])
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
            self.schedule.broadcast_ends(self._ranks[rank])
        else:
            self.schedule.answered(call)

    # Workers come and go

    def add(self, worker: Rank, requests: MessageQueue, replies: MessageQueue) -> None:
        """Start to send calls to a worker that is ready."""
        worker.arrive(requests, replies, self._last_broadcast)
        self._answers.add(worker.rank, replies)
        self._read_answers()
        self.schedule.freed(worker)
        self.note_presence()

    def note_presence(self) -> None:
        """Let calls of all workers pass if all are present, or none will ever be."""
        if self._session.failure is not None or all(worker.present for worker in self._ranks.values()):
            self._all_present.set()
        else:
            self._all_present.clear()

    def died(self, worker: Rank, failure: AioshmError) -> None:
        """Fail calls in flight on a dead worker. Queued calls stay queued for its replacement."""
        rank = worker.rank
        if worker.present:
            worker.present = False
            self._answers.remove(rank)
            with suppress(AioshmError, QueueEmpty):
                while True:  # answers from before the death are valid
                    self._deliver(rank, worker.replies.dequeue_nowait())
            self._spawn(_close(worker.requests, worker.replies))
        self.schedule.gone(worker)
        self.note_presence()
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

    async def drain(self, workers: Iterable[Rank]) -> None:
        """Wait until the present calls of these workers are done."""
        while not self.schedule.done(workers):
            await asyncio.sleep(DRAIN_POLL_S)
            self._session.check()

    def end(self, failure: AioshmError) -> None:
        for call in [*self.schedule.waiting(), *self._calls.values()]:
            call.fail(failure)
        self.note_presence()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Close all queues; the workers end their calls and exit. Idempotent."""
        for worker in self._ranks.values():
            if worker.present:
                worker.present = False
                self._spawn(_close(worker.requests, worker.replies))
        try:
            await self._answers.aclose()
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            await self.broadcasts.aclose()


async def _close(requests: MessageQueue, replies: MessageQueue) -> None:
    try:
        await requests.aclose()
    finally:
        await replies.aclose()
