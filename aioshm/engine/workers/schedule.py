"""Which call may be sent to which worker, and when: no I/O, no clock.

A call of one worker is sent immediately, behind those that the worker has already. A call of any worker is given to the
one that has been idle longest; those that wait are served first come, first served. A call of one worker that is made
while they wait goes behind them, if calls keep the worker from being idle: otherwise a worker that is called again and
again would never be. A worker with a stream is not idle, but its stream may take as long as it likes, and keeps nobody
from calling the worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from aioshm.engine.workers.inbox import Waiter
from aioshm.errors import AioshmError, RemoteFailure, WorkerError


class Call(Waiter):
    """A call of one worker, of any, or of all, until its caller has the result."""

    __slots__ = (
        "done",
        "errors",
        "failure",
        "items",
        "method",
        "missing",
        "number",
        "order",
        "results",
        "seat",
        "sent",
        "stream",
        "taken",
        "wanted",
    )

    def __init__(self, method: str, wanted: int | None = None, *, stream: bool = False) -> None:
        super().__init__()
        self.method: str = method  # its name, for people
        self.wanted: int | None = wanted  # the worker's rank; None: any, or all
        self.stream: bool = stream
        self.order: int = 0  # its place among the calls that have asked for a turn
        self.seat: Seat | None = None  # the worker that it may be sent to
        self.number: int = 0  # in messages
        self.sent: bool = False
        self.missing: set[int] = set()  # the ranks that have not answered
        self.results: dict[int, Any] = {}
        self.errors: dict[int, RemoteFailure] = {}
        self.items: deque[Any] = deque()  # of a stream, that were not taken
        self.taken: int = 0  # items, since the worker was allowed to make further ones
        self.failure: Callable[[], AioshmError] | None = None  # if something else than the method has failed
        self.done: bool = False  # whether there is nothing more to come for the caller

    @property
    def rank(self) -> int | None:
        """The worker that has it, or is to have it."""
        return self.wanted if self.seat is None else self.seat.rank

    def finish(self) -> None:
        """Wake the caller: there is nothing more to come."""
        self.done = True
        self.notify()

    def fail(self, failure: Callable[[], AioshmError]) -> None:
        """Finish with an error, unless it is finished."""
        if not self.done:
            self.failure = failure
            self.finish()

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.failure is not None:
            raise self.failure()
        if self.errors:
            raise WorkerError(self.method, dict(sorted(self.errors.items())))


class Seat:
    """The work of one worker process; its replacement has a seat of its own."""

    __slots__ = ("calls", "idle_since", "leaving", "present", "queue", "rank", "streams")

    def __init__(self, rank: int) -> None:
        self.rank: int = rank
        self.present: bool = False
        self.leaving: bool = False
        self.calls: int = 0
        self.streams: int = 0
        self.idle_since: int = 0
        self.queue: deque[Call] = deque()

    @property
    def idle(self) -> bool:
        """Whether a call of any worker may be sent to this one."""
        return self.present and not (self.leaving or self.calls or self.streams)


class Schedule:
    """The workers, and the calls that wait for them; `Call.notify` is called when a call may be sent."""

    def __init__(self) -> None:
        self._seats: dict[int, Seat] = {}
        self._any: deque[Call] = deque()
        self._count = 0

    def ask(self, call: Call) -> None:
        """Queue a call, which may be sent immediately; `withdraw` or `answered` ends that."""
        self._count += 1
        call.order = self._count
        call.seat = None
        if call.wanted is None:
            self._any.append(call)
            self._serve_any()
        else:
            seat = self._seat(call.wanted)
            seat.queue.append(call)
            self._serve(seat)

    def withdraw(self, call: Call) -> None:
        """Drop a call that was not sent."""
        if call.seat is not None:
            self.answered(call)
            return
        queue = self._any if call.wanted is None else self._seat(call.wanted).queue
        if call in queue:
            queue.remove(call)
        for seat in self._seats.values():  # others may have waited for this one
            self._serve(seat)

    def answered(self, call: Call) -> None:
        """Note that a worker has finished a call."""
        seat = call.seat
        assert seat is not None
        if call.stream:
            seat.streams -= 1
        else:
            seat.calls -= 1
        self._free(seat)

    def holds(self, call: Call) -> bool:
        """Return whether the worker that a call may be sent to is still there, and not a replacement."""
        seat = call.seat
        return seat is not None and self._seats.get(seat.rank) is seat

    def step_begins(self, ranks: Iterable[int]) -> None:
        """Note that workers have a call of all workers to do."""
        for rank in ranks:
            self._seat(rank).calls += 1

    def step_ends(self, rank: int) -> None:
        """Note that a worker has finished a call of all workers."""
        seat = self._seat(rank)
        seat.calls -= 1
        self._free(seat)

    def back(self, rank: int) -> None:
        """Note that there is a worker of this rank, which has nothing to do yet."""
        seat = self._seat(rank)
        seat.present = True
        seat.leaving = False
        self._free(seat)

    def gone(self, rank: int) -> None:
        """Note that there is no worker of this rank for the time being; its work is forgotten."""
        former = self._seat(rank)
        former.present = False
        seat = self._seats[rank] = Seat(rank)
        seat.leaving = former.leaving
        seat.queue, former.queue = former.queue, seat.queue

    def leaves(self, rank: int, *, leaves: bool = True) -> None:
        """Give a worker no calls of any worker; or do so again."""
        seat = self._seat(rank)
        seat.leaving = leaves
        if not leaves:
            self._free(seat)

    def forget(self, rank: int) -> list[Call]:
        """Remove a worker for good; return the calls that have waited for it."""
        seat = self._seats.pop(rank, None)
        return [] if seat is None else list(seat.queue)

    def done(self, ranks: Iterable[int]) -> bool:
        """Return whether these workers have no call, and nobody waits for one of them."""
        seats = [self._seat(rank) for rank in ranks]
        return not any(seat.calls or seat.streams or seat.queue for seat in seats)

    def _seat(self, rank: int) -> Seat:
        seat = self._seats.get(rank)
        if seat is None:
            seat = self._seats[rank] = Seat(rank)
        return seat

    def _free(self, seat: Seat) -> None:
        if seat.idle:
            self._count += 1
            seat.idle_since = self._count
        self._serve(seat)

    def _serve(self, seat: Seat) -> None:
        while seat.present:
            if seat.queue and self._precedes(seat.queue[0], seat):
                self._give(seat.queue.popleft(), seat)
            elif self._any and seat.idle:
                self._give(self._any.popleft(), seat)
            else:
                return

    def _precedes(self, call: Call, seat: Seat) -> bool:
        """Return whether a worker's own call comes before those of any worker."""
        return not self._any or seat.streams > 0 or seat.leaving or call.order < self._any[0].order

    def _serve_any(self) -> None:
        while self._any:
            idle = [seat for seat in self._seats.values() if seat.idle]
            if not idle:
                return
            self._give(self._any.popleft(), min(idle, key=lambda seat: seat.idle_since))

    def _give(self, call: Call, seat: Seat) -> None:
        call.seat = seat
        if call.stream:
            seat.streams += 1
        else:
            seat.calls += 1
        call.notify()
