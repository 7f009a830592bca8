"""Decides which call may be sent to which worker, and when. No I/O, no clock.

A call of one worker is sent immediately, behind the worker's present calls. A call of any worker goes to the one that
has been idle longest; waiting calls of any worker are served in order. While such calls wait, a new call of one worker
queues behind them: otherwise a worker that gets its own calls again and again would never be idle for them. A worker
with a stream is not idle either, but a stream may last for ever. So a call of that worker does not queue behind the
calls of any worker.
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
        self.method: str = method  # the name of the method, for error texts
        self.wanted: int | None = wanted  # the worker's rank; None: any, or all
        self.stream: bool = stream
        self.order: int = 0  # lower for calls that were queued earlier
        self.seat: Seat | None = None  # the worker that the call may be sent to
        self.number: int = 0  # identifies the call in messages
        self.sent: bool = False
        self.missing: set[int] = set()  # the ranks that have not answered yet
        self.results: dict[int, Any] = {}
        self.errors: dict[int, RemoteFailure] = {}
        self.items: deque[Any] = deque()  # items of a stream that the caller has not taken
        self.taken: int = 0  # items taken since the worker last got credit for more
        self.failure: Callable[[], AioshmError] | None = None  # set if the call failed outside of the method
        self.done: bool = False  # whether the caller has nothing more to wait for

    @property
    def rank(self) -> int | None:
        """The rank of the worker that has the call, or will get the call."""
        return self.wanted if self.seat is None else self.seat.rank

    def finish(self) -> None:
        """Mark the call as done, and wake the caller."""
        self.done = True
        self.notify()

    def fail(self, failure: Callable[[], AioshmError]) -> None:
        """Finish with an error, unless the call is done."""
        if not self.done:
            self.failure = failure
            self.finish()

    def check(self) -> None:
        """Raise the error of the call, if there is one."""
        if self.failure is not None:
            raise self.failure()
        if self.errors:
            raise WorkerError(self.method, dict(sorted(self.errors.items())))


class Seat:
    """The calls of one worker process; a replacement process gets a new seat."""

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
        """Whether a call of any worker may be sent to this worker."""
        return self.present and not (self.leaving or self.calls or self.streams)


class Schedule:
    """The workers, and the calls that wait for them. Calls `Call.notify` when a call may be sent."""

    def __init__(self) -> None:
        self._seats: dict[int, Seat] = {}
        self._any: deque[Call] = deque()
        self._count = 0

    def ask(self, call: Call) -> None:
        """Queue a call, and assign a worker if one is free. End this with `withdraw` or `answered`."""
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
        for seat in self._seats.values():  # other calls may have waited behind this call
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
        """Return whether the worker process that was assigned to a call is still the present one."""
        seat = call.seat
        return seat is not None and self._seats.get(seat.rank) is seat

    def step_begins(self, ranks: Iterable[int]) -> None:
        """Note that a call of all workers goes to these workers."""
        for rank in ranks:
            self._seat(rank).calls += 1

    def step_ends(self, rank: int) -> None:
        """Note that a worker has finished a call of all workers."""
        seat = self._seat(rank)
        seat.calls -= 1
        self._free(seat)

    def back(self, rank: int) -> None:
        """Note that a new worker of this rank is ready."""
        seat = self._seat(rank)
        seat.present = True
        seat.leaving = False
        self._free(seat)

    def gone(self, rank: int) -> None:
        """Note that the worker of this rank is gone; drop its calls in flight, keep the queued ones."""
        former = self._seat(rank)
        former.present = False
        seat = self._seats[rank] = Seat(rank)
        seat.leaving = former.leaving
        seat.queue, former.queue = former.queue, seat.queue

    def leaves(self, rank: int, *, leaves: bool = True) -> None:
        """Stop giving a worker calls of any worker; ``leaves=False``: start again."""
        seat = self._seat(rank)
        seat.leaving = leaves
        if not leaves:
            self._free(seat)

    def forget(self, rank: int) -> list[Call]:
        """Remove a worker for good; return the calls that have waited for it."""
        seat = self._seats.pop(rank, None)
        return [] if seat is None else list(seat.queue)

    def done(self, ranks: Iterable[int]) -> bool:
        """Return whether these workers have neither calls in flight nor queued calls."""
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
        """Return whether a call of this worker comes before the waiting calls of any worker."""
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
