"""The calls of a group: queued, sent to one worker or to all, answered, cancelled, or failed if a worker dies.

A call of one worker is sent immediately, behind the worker's present calls. A call of any worker goes to the worker
that has been idle longest; waiting calls of any worker are served in order. While such calls wait, a new call of one
worker queues behind them: otherwise a worker that gets its own calls again and again would never be idle for them. A
worker with a stream is not idle either, but a stream may last for ever. So a call of that worker does not queue behind
the calls of any worker. A worker without progress is not idle.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aioshm.engine.workers.worker import (
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
from aioshm.errors import (
    AioshmError,
    CodecError,
    EndClosed,
    PeerDied,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    RemoteFailure,
    RoleError,
    WorkerError,
    copy_error,
)
from aioshm.queue import MessageQueue, merge

if TYPE_CHECKING:
    from aioshm.engine.workers.processes import Rank, WorkerProcess
    from aioshm.engine.workers.session import Session

SPINS = 3
"""How many short spins a call makes for its answer, with an iteration of the loop after each."""

RETRY_S = 0.01
"""The pause before another attempt to send a message, or a substitute for a message that cannot be sent."""


@dataclass(slots=True, eq=False)
class Call:
    """A call of one worker, of any, or of all, until its caller has the result."""

    method: str
    request: Request
    wanted: int | None = None  # the worker's rank; None: any, or all
    rank: int | None = None  # of the worker with the call
    stream: bool = False
    of_all: bool = False
    order: int = 0  # when the call was queued, by a counter; 0: never
    number: int = 0  # 0: not sent yet
    missing: set[int] = field(default_factory=set)  # ranks that have not answered yet
    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, RemoteFailure] = field(default_factory=dict)
    items: deque[Any] = field(default_factory=deque)  # of a stream, not taken by the caller yet
    taken: int = 0  # items taken since the worker last got credit for more
    failure: Exception | None = None  # of a call that failed outside of the method
    done: bool = False  # whether the caller has nothing more to wait for
    ready: asyncio.Event = field(default_factory=asyncio.Event)  # there are new items, or the call is done

    def finish(self, failure: Exception | None = None) -> None:
        """Wake the caller, with this failure if any; ignored if the call is done."""
        if not self.done:
            self.done = True
            self.failure = failure
            self.ready.set()

    def check(self) -> None:
        """Raise the failure or the errors of the call."""
        if self.failure is not None:
            raise self.failure
        if self.errors:
            raise WorkerError(self.method, dict(sorted(self.errors.items())))


class CallTable:
    """Queues calls, sends calls, and delivers answers; on the loop of the group."""

    def __init__(self, session: Session, broadcasts: MessageQueue) -> None:
        self._session = session
        self.broadcasts = broadcasts
        self._ranks: dict[int, Rank] = session.ranks
        self.lock: asyncio.Lock = asyncio.Lock()  # held by the present call of all workers
        self._settled = asyncio.Event()  # all workers are present, and have answered the last call of all
        self._last_of_all: Call | None = None
        self._any: deque[Call] = deque()  # calls of any worker, not sent yet
        self._sent: dict[int, Call] = {}  # by number, not answered yet
        self._number = 0
        self._count = 0
        self._answers = merge({}, errors="yield")
        self._reading: asyncio.Task[None] | None = None

    # Callers

    async def call_all(self, call: Call, timeout: float | None) -> list[Any]:
        """Call all workers after earlier calls of all are answered; return the results by rank."""
        try:
            async with self._within(timeout, call), self.lock:
                await self.settled()
                wanted = call.request.reply_rank
                if wanted is not None and wanted not in self._ranks:
                    raise EndClosed("the group of workers was made smaller")
                await self._broadcast(call)
                await self._wait(call)
        finally:
            call.done = True  # later answers are dropped
        call.check()
        return [result for _, result in sorted(call.results.items())]

    async def _broadcast(self, call: Call) -> None:
        """Send a call of all workers, then register the call: sending may fail. For ``after`` see `Message`."""
        while True:
            after = {rank.rank: rank.last_call for rank in self._ranks.values() if rank.last_call}
            try:
                self.broadcasts.enqueue_nowait((CALL, self._number + 1, after, tuple(call.request)))
                break
            except QueueFull:
                await asyncio.sleep(RETRY_S)
                await self.settled()  # a worker may have died
        self._register(call, self._ranks.values())
        self._last_of_all = call
        self.update()

    async def settled(self) -> None:
        """Wait until all workers are present, and have answered the last call of all."""
        self._session.check()
        while not self._settled.is_set():  # a worker may die before this task continues
            await self._settled.wait()
        self._session.check()

    async def call(self, call: Call, timeout: float | None) -> Any:
        """Send a call to one worker, and return the result."""
        try:
            async with self._within(timeout, call):
                self._ask(call)
                await self._wait(call)
        finally:
            self.abandon(call)
        call.check()
        return next(iter(call.results.values()))

    async def next_item(self, call: Call, timeout: float | None) -> Any:
        """Start the stream at the first call; return the next item, or raise StopAsyncIteration at the end."""
        if not (call.items or call.done):
            async with self._within(timeout, call):
                if not call.order:
                    self._ask(call)
                await self._wait(call)
        if not call.items:
            call.check()
            raise StopAsyncIteration
        item = call.items.popleft()
        if not (call.items or call.done):
            call.ready.clear()
        call.taken += 1
        if call.taken == max(1, call.request.prefetch // 2):
            self._notify(call, CREDIT, call.taken)
            call.taken = 0
        return item

    def abandon(self, call: Call) -> None:
        """Forget a call whose caller has left: drop a queued call, cancel a sent one in the worker."""
        call.items.clear()
        if call.done:
            return
        call.done = True
        if call.number:
            self._notify(call, CANCEL)
        elif call.order:
            for queue in (self._any, *(rank.queue for rank in self._ranks.values())):
                if call in queue:
                    queue.remove(call)
            self._serve_all()  # other calls may have waited behind the dropped call

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
            if not call.number:
                text = ": ".join(filter(None, (text, self._session.describe_absent())))
            raise TimeoutError(text) from None

    def _missing_of(self, call: Call) -> str:
        """Name the workers that a call waits for."""
        if call.missing:
            return f"no answer from {self._session.describe(call.missing)}"
        if call.of_all:
            last = self._last_of_all
            if last is not None and last.missing:
                return f"waits for earlier calls of all workers: no answer from {self._session.describe(last.missing)}"
            if self._settled.is_set():
                return "no turn for a call of all workers"
            return "no replacement of dead workers"
        present = [rank for rank, worker in self._ranks.items() if worker.present]
        if call.wanted is None:
            return f"no idle worker ({self._session.describe(present) or 'all are being restarted'})"
        missing = "answer from" if call.wanted in present else "replacement of"
        return f"no {missing} {self._session.describe([call.wanted])}"

    # Which call is sent to which worker, and when

    def _ask(self, call: Call) -> None:
        """Queue a call of one worker or of any, and send the call if a worker may take one now."""
        if self._session.failure is not None:
            call.finish(copy_error(self._session.failure))
            return
        self._count += 1
        call.order = self._count
        if call.wanted is None:
            self._any.append(call)
            if idle := [rank for rank in self._ranks.values() if rank.idle]:
                self._serve(min(idle, key=lambda rank: rank.idle_since))
        elif call.wanted in self._ranks:
            rank = self._ranks[call.wanted]
            rank.queue.append(call)
            self._serve(rank)
        else:
            call.finish(EndClosed("the group of workers was made smaller"))

    def freed(self, rank: Rank) -> None:
        """Send calls to a worker that may be idle now."""
        if rank.idle:
            self._count += 1
            rank.idle_since = self._count
        self._serve(rank)
        self._read_answers()

    def _serve_all(self) -> None:
        for rank in self._ranks.values():
            self._serve(rank)
        self._read_answers()

    def _serve(self, rank: Rank) -> None:
        while rank.present:
            if rank.queue and self._precedes(rank.queue[0], rank):
                self._send(rank, rank.queue.popleft())
            elif self._any and rank.idle:
                self._send(rank, self._any.popleft())
            else:
                return

    def _precedes(self, call: Call, rank: Rank) -> bool:
        """Return whether a call of this worker comes before the waiting calls of any worker."""
        return not self._any or rank.leaving or call.order < self._any[0].order or rank.has_stream

    def _register(self, call: Call, ranks: Iterable[Rank]) -> None:
        self._number += 1
        call.number = self._number
        self._sent[call.number] = call
        for rank in ranks:
            rank.sent.add(call)
            call.missing.add(rank.rank)

    # Sending

    def _send(self, rank: Rank, call: Call) -> None:
        self._register(call, (rank,))
        call.rank = rank.rank
        last = self._last_of_all
        after = last.number if last is not None and last.number > rank.joined else 0
        rank.last_call = call.number
        self._post(rank, (STREAM if call.stream else CALL, call.number, after, tuple(call.request)), call)

    def _notify(self, call: Call, kind: int, value: Any = None) -> None:
        """Send a message about a call that was sent."""
        for rank in call.missing:
            if self._ranks[rank].present:
                self._post(self._ranks[rank], (kind, call.number, 0, value), call)

    def _post(self, rank: Rank, message: Message, call: Call) -> None:
        """Send a message, or put it in the outbox while there is no room."""
        process = rank.process
        assert process is not None
        if not process.outbox:
            try:
                process.requests.enqueue_nowait(message)
                return
            except RoleError as error:  # in a forked child: the workers are the parent's
                call.finish(error)
                return
            except Exception:  # no room, or an error that recurs in `_flush`
                self._session.spawn(self._flush(rank, process), "aioshm-sends-calls")
        process.outbox.append((message, call))

    async def _flush(self, rank: Rank, process: WorkerProcess) -> None:
        while process.outbox:
            message, call = process.outbox[0]
            try:
                await process.requests.enqueue(message)
                process.outbox.popleft()
            except (PeerDied, QueueClosed):  # the process is ending: `remove` queues the unsent calls again
                process.ended.set()
                return
            except Exception as error:  # the arguments cannot be sent
                kind, number, after, _ = message
                unsent = Undecodable(CodecError(f"{call.method} was not sent"))
                process.outbox[0] = (kind, number, after, unsent), call  # calls of all may wait for the number
                call.finish(error)
                self._drop(rank, call)
                self.freed(rank)
                await asyncio.sleep(RETRY_S)

    # Answers

    def _read_answers(self) -> None:
        if self._sent and (self._reading is None or self._reading.done()):
            self._reading = self._session.spawn(self._read(), "aioshm-reads-answers")

    async def _read(self) -> None:
        """Deliver the messages of all workers while calls are in flight."""
        while self._sent:
            try:
                rank, message = await anext(self._answers)
            except StopAsyncIteration:  # there is no queue, or all have ended
                return
            self._receive(rank, message)

    async def _wait(self, call: Call) -> None:
        """Wait until the caller has to check the call; spin for the answer of a lone call first: a task costs more."""
        spins = SPINS
        try:
            while spins and len(self._sent) == 1 and not call.ready.is_set():
                answer = self._answers.take_soon()
                if answer is None:
                    spins -= 1
                    await asyncio.sleep(0)
                else:
                    self._receive(*answer)
        finally:
            if not call.ready.is_set():  # also when cancelled: later calls may wait for the answers to this one
                self._read_answers()
        await call.ready.wait()

    def _receive(self, number: int, message: Any) -> None:
        """Deliver an answer, or an error of the queue or of one message."""
        rank = self._ranks[number]
        if isinstance(message, tuple):
            self._deliver(rank, *message)
        elif number in self._answers.failed:
            assert rank.process is not None
            rank.process.ended.set()
        else:  # the lost message may have answered any of these calls
            for call in [*rank.sent]:
                call.errors[number] = failure_of(message)
                self._answered(rank, call)

    def _deliver(self, rank: Rank, kind: int, number: int, _: Any, value: Any) -> None:
        call = self._sent.get(number)
        if call is None or rank.rank not in call.missing:
            return
        if isinstance(value, Undecodable):
            call.errors[rank.rank] = failure_of(value.error)
            if kind == ITEM and not call.done:
                call.finish()
                self._notify(call, CANCEL)
        elif kind == FAILURE:
            call.errors[rank.rank] = value
        elif kind == RESULT:
            call.results[rank.rank] = value
        elif not call.done:
            call.items.append(value)
            call.ready.set()
        if kind != ITEM:
            self._answered(rank, call)

    def _answered(self, rank: Rank, call: Call) -> None:
        """End a worker's part of a call, and send the worker's next call."""
        self._drop(rank, call)
        if not call.missing:
            call.finish()
        self.freed(rank)

    def _drop(self, rank: Rank, call: Call) -> None:
        rank.sent.discard(call)
        call.missing.discard(rank.rank)
        if not call.missing:
            self._sent.pop(call.number, None)
            if call.of_all:
                self.update()

    # Workers come and go

    def add(self, rank: Rank) -> None:
        """Start to send calls to a worker that is ready, and to read its answers."""
        assert rank.process is not None
        self._answers.add(rank.rank, rank.process.replies)
        rank.joined = 0 if self._last_of_all is None else self._last_of_all.number
        rank.last_call = 0
        rank.present = True
        rank.enter("running")
        self.update()
        self.freed(rank)

    def update(self) -> None:
        """Let calls of all workers pass if all are present and have answered, or the group has failed."""
        busy = self._last_of_all is not None and self._last_of_all.missing
        if self._session.failure is not None or (not busy and all(rank.present for rank in self._ranks.values())):
            self._settled.set()
        else:
            self._settled.clear()

    def leave(self, rank: Rank) -> None:
        """Send no more calls to the present process of a rank, which is ending."""
        rank.present = False
        self.update()

    def remove(self, rank: Rank, failure: AioshmError) -> None:
        """Fail the calls in flight on a process that has ended; calls that were not sent stay queued."""
        self.leave(rank)
        process = rank.process
        assert process is not None
        self._answers.remove(rank.rank)
        with suppress(AioshmError, QueueEmpty):
            while True:  # answers from before the death are valid
                self._deliver(rank, *process.replies.dequeue_nowait())
        self._session.spawn(process.close(), "aioshm-closes-queues")
        for message, call in reversed(process.outbox):
            if message[0] in (CALL, STREAM) and not call.done:
                self._drop(rank, call)
                call.number = 0
                (self._any if call.wanted is None else rank.queue).appendleft(call)
        for call in [*self._sent.values()]:
            # A call of all fails even after the answer of the dead worker: other workers may wait for that worker.
            if call.of_all or rank.rank in call.missing:
                call.finish(copy_error(failure))
                self._drop(rank, call)
        self._serve_all()

    async def drain(self, ranks: Iterable[Rank]) -> None:
        """Wait until the present calls of these workers are done."""
        while any(rank.sent or rank.queue for rank in ranks):
            await asyncio.sleep(RETRY_S)
            self._session.check()

    def end(self, failure: AioshmError) -> None:
        """Fail all calls; the group has ended."""
        waiting = [*self._any, *(call for rank in self._ranks.values() for call in rank.queue)]
        self._any.clear()
        for rank in self._ranks.values():
            rank.queue.clear()
        for call in [*waiting, *self._sent.values()]:
            call.finish(copy_error(failure))
        self.update()

    async def aclose(self) -> None:
        """Close all queues; the workers end their calls and exit. Idempotent."""
        for rank in self._ranks.values():
            rank.present = False
        processes = [rank.process for rank in self._ranks.values() if rank.process is not None]
        try:
            await self._answers.aclose()
            await asyncio.gather(*(process.close() for process in processes))
        finally:
            await self.broadcasts.aclose()
