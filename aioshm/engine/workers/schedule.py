"""Decides which call may be sent to which worker, and when. No I/O, no clock.

A call of one worker is sent immediately, behind the worker's present calls. A call of any worker goes to the worker
that has been idle longest; waiting calls of any worker are served in order. While such calls wait, a new call of one
worker queues behind them: otherwise a worker that gets its own calls again and again would never be idle for them. A
worker with a stream is not idle either, but a stream may last for ever. So a call of that worker does not queue behind
the calls of any worker. A worker without progress is not idle.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aioshm.engine.workers.rank import Rank
from aioshm.errors import AioshmError, EndClosed, RemoteFailure, WorkerError, copy_error


@dataclass(slots=True, eq=False)
class Call:
    """A call of one worker, of any, or of all, until its caller has the result."""

    method: str
    wanted: int | None = None  # the worker's rank; None: any, or all
    stream: bool = False
    of_all: bool = False
    order: int = 0  # position in the queue of calls, from 1 on; 0: not queued
    worker: Rank | None = None  # the worker that the call may be sent to
    incarnation: int = 0  # of that worker
    number: int = 0
    sending: asyncio.Timeout | None = None  # while the call waits for room in a queue
    sent: bool = False
    missing: set[int] = field(default_factory=set)  # ranks that have not answered yet
    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, RemoteFailure] = field(default_factory=dict)
    items: deque[Any] = field(default_factory=deque)  # of a stream, not taken by the caller yet
    taken: int = 0  # items taken since the worker last got credit for more
    failure: AioshmError | None = None  # of a call that failed outside of the method
    done: bool = False  # whether the caller has nothing more to wait for
    ready: asyncio.Event = field(default_factory=asyncio.Event)  # the caller has to check the call

    @property
    def rank(self) -> int | None:
        """The rank of the call's worker; None: not assigned yet."""
        if self.worker is None:
            return self.wanted
        return self.worker.rank

    @property
    def assigned(self) -> bool:
        """Whether the process that was assigned to the call still has its rank."""
        return self.worker is not None and self.worker.incarnation == self.incarnation

    @property
    def queued(self) -> bool:
        """Whether the call waits for a worker."""
        return self.order > 0 and self.worker is None

    def notify(self) -> None:
        self.ready.set()

    def finish(self) -> None:
        self.done = True
        self.notify()

    def fail(self, failure: AioshmError) -> None:
        """Finish with an error, unless the call is done."""
        if not self.done:
            self.failure = failure
            self.finish()
            if self.sending is not None:
                self.sending.reschedule(0)

    def check(self) -> None:
        if self.failure is not None:
            raise copy_error(self.failure)
        if self.errors:
            raise WorkerError(self.method, dict(sorted(self.errors.items())))


class Schedule:
    """The calls that wait for workers; calls `Call.notify` when a call may be sent."""

    def __init__(self, ranks: Mapping[int, Rank]) -> None:
        self._ranks = ranks
        self._any: deque[Call] = deque()
        self._count = 0

    def ask(self, call: Call) -> None:
        """Queue a call, and assign a worker if one is free. End this with `withdraw` or `answered`."""
        self._count += 1
        call.order = self._count
        call.worker = None
        if call.wanted is None:
            self._any.append(call)
            self._serve_any()
        else:
            worker = self._ranks.get(call.wanted)
            if worker is None:
                call.fail(EndClosed("the group of workers was made smaller"))
                return
            worker.queue.append(call)
            self._serve(worker)

    def withdraw(self, call: Call) -> None:
        """Drop a call that was not sent."""
        call.order = 0
        if call.worker is not None:
            self.answered(call)
            call.worker = None
            return
        for queue in (self._any, *(worker.queue for worker in self._ranks.values())):
            if call in queue:
                queue.remove(call)
        for worker in self._ranks.values():  # other calls may have waited behind the dropped call
            self._serve(worker)

    def answered(self, call: Call) -> None:
        if call.assigned:  # else a dead process had the call
            assert call.worker is not None
            if call.stream:
                call.worker.streams -= 1
            else:
                call.worker.calls -= 1
            self.freed(call.worker)

    def waiting(self) -> list[Call]:
        return [*self._any, *(call for worker in self._ranks.values() for call in worker.queue)]

    def broadcast_begins(self) -> None:
        for worker in self._ranks.values():
            worker.calls += 1

    def broadcast_ends(self, worker: Rank) -> None:
        worker.calls -= 1
        self.freed(worker)

    def freed(self, worker: Rank) -> None:
        """Assign calls to a worker that may be idle now."""
        if worker.idle:
            self._count += 1
            worker.idle_since = self._count
        self._serve(worker)

    def gone(self, worker: Rank) -> None:
        """Drop the calls in flight of a dead process; keep the queued calls."""
        worker.present = False
        worker.incarnation += 1
        worker.calls = 0
        worker.streams = 0

    def done(self, workers: Iterable[Rank]) -> bool:
        """Return whether these workers have neither calls in flight nor queued calls."""
        return not any(worker.calls or worker.streams or worker.queue for worker in workers)

    def _serve(self, worker: Rank) -> None:
        while worker.present:
            if worker.queue and self._precedes(worker.queue[0], worker):
                self._give(worker.queue.popleft(), worker)
            elif self._any and worker.idle:
                self._give(self._any.popleft(), worker)
            else:
                return

    def _precedes(self, call: Call, worker: Rank) -> bool:
        """Return whether a call of this worker comes before the waiting calls of any worker."""
        return not self._any or worker.streams > 0 or worker.leaving or call.order < self._any[0].order

    def _serve_any(self) -> None:
        while self._any:
            idle = [worker for worker in self._ranks.values() if worker.idle]
            if not idle:
                return
            self._give(self._any.popleft(), min(idle, key=lambda worker: worker.idle_since))

    def _give(self, call: Call, worker: Rank) -> None:
        call.worker = worker
        call.incarnation = worker.incarnation
        if call.stream:
            worker.streams += 1
        else:
            worker.calls += 1
        call.notify()
