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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from aioshm.errors import AioshmError, RemoteFailure, WorkerError


@dataclass(slots=True, eq=False)
class Call:
    """A call of one worker, of any, or of all, until its caller has the result."""

    method: str
    wanted: int | None = None  # the worker's rank; None: any, or all
    stream: bool = False
    of_all: bool = False
    order: int = 0  # position in the queue of calls, from 1 on; 0: not queued
    slot: WorkerSlot | None = None  # the worker that the call may be sent to
    number: int = 0
    sent: bool = False
    missing: set[int] = field(default_factory=set)  # ranks that have not answered yet
    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, RemoteFailure] = field(default_factory=dict)
    items: deque[Any] = field(default_factory=deque)  # of a stream, not taken by the caller yet
    taken: int = 0  # items taken since the worker last got credit for more
    failure: Callable[[], AioshmError] | None = None  # of a call that failed outside of the method
    done: bool = False  # whether the caller has nothing more to wait for
    ready: asyncio.Event = field(default_factory=asyncio.Event)  # the caller has to check the call

    @property
    def rank(self) -> int | None:
        """The rank of the call's worker; None: not assigned yet."""
        if self.slot is None:
            return self.wanted
        return self.slot.rank

    @property
    def queued(self) -> bool:
        """Whether the call waits for a worker."""
        return self.order > 0 and self.slot is None

    def notify(self) -> None:
        self.ready.set()

    def finish(self) -> None:
        self.done = True
        self.notify()

    def fail(self, failure: Callable[[], AioshmError]) -> None:
        """Finish with an error, unless the call is done."""
        if not self.done:
            self.failure = failure
            self.finish()

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure()
        if self.errors:
            raise WorkerError(self.method, dict(sorted(self.errors.items())))


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """The calls of one worker process; a replacement process gets a new slot."""

    rank: int
    present: bool = False
    leaving: bool = False
    late: bool = False  # stalled, stopped, or about to be restarted
    calls: int = 0
    streams: int = 0
    idle_since: int = 0
    queue: deque[Call] = field(default_factory=deque)

    @property
    def idle(self) -> bool:
        """Whether a call of any worker may be sent to this worker."""
        return self.present and not (self.leaving or self.late or self.calls or self.streams)


class Schedule:
    """The workers, and the calls that wait for them; calls `Call.notify` when a call may be sent."""

    def __init__(self) -> None:
        self._slots: dict[int, WorkerSlot] = {}
        self._any: deque[Call] = deque()
        self._count = 0

    def ask(self, call: Call) -> None:
        """Queue a call, and assign a worker if one is free. End this with `withdraw` or `answered`."""
        self._count += 1
        call.order = self._count
        call.slot = None
        if call.wanted is None:
            self._any.append(call)
            self._serve_any()
        else:
            slot = self._slot(call.wanted)
            slot.queue.append(call)
            self._serve(slot)

    def withdraw(self, call: Call) -> None:
        """Drop a call that was not sent."""
        call.order = 0
        if call.slot is not None:
            self.answered(call)
            call.slot = None
            return
        queue = self._any
        if call.wanted is not None:
            queue = self._slot(call.wanted).queue
        if call in queue:
            queue.remove(call)
        for slot in self._slots.values():  # other calls may have waited behind the dropped call
            self._serve(slot)

    def answered(self, call: Call) -> None:
        slot = call.slot
        assert slot is not None
        if call.stream:
            slot.streams -= 1
        else:
            slot.calls -= 1
        self._free(slot)

    def waiting(self) -> list[Call]:
        return [*self._any, *(call for slot in self._slots.values() for call in slot.queue)]

    def holds(self, call: Call) -> bool:
        """Return whether the process that was assigned to a call still has its rank."""
        slot = call.slot
        return slot is not None and self._slots.get(slot.rank) is slot

    def broadcast_begins(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._slot(rank).calls += 1

    def broadcast_ends(self, rank: int) -> None:
        slot = self._slot(rank)
        slot.calls -= 1
        self._free(slot)

    def arrived(self, rank: int) -> None:
        slot = self._slot(rank)
        slot.present = True
        slot.leaving = False
        self._free(slot)

    def gone(self, rank: int) -> None:
        """Drop the calls in flight of a dead worker; keep the queued calls."""
        former = self._slot(rank)
        former.present = False
        slot = self._slots[rank] = WorkerSlot(rank)
        slot.leaving = former.leaving
        slot.queue = former.queue
        former.queue = deque()

    def set_leaving(self, rank: int) -> None:
        """Assign no more calls of any worker to a worker."""
        self._slot(rank).leaving = True

    def set_late(self, rank: int, *, late: bool = True) -> None:
        """Pass over a worker that makes no progress; ``late=False``: it makes progress again."""
        slot = self._slot(rank)
        slot.late = late
        self._free(slot)

    def forget(self, rank: int) -> list[Call]:
        """Remove a worker for good; return its queued calls."""
        return list(self._slots.pop(rank, WorkerSlot(rank)).queue)

    def done(self, ranks: Iterable[int]) -> bool:
        """Return whether these workers have neither calls in flight nor queued calls."""
        slots = [self._slot(rank) for rank in ranks]
        return not any(slot.calls or slot.streams or slot.queue for slot in slots)

    def _slot(self, rank: int) -> WorkerSlot:
        slot = self._slots.get(rank)
        if slot is None:
            slot = self._slots[rank] = WorkerSlot(rank)
        return slot

    def _free(self, slot: WorkerSlot) -> None:
        if slot.idle:
            self._count += 1
            slot.idle_since = self._count
        self._serve(slot)

    def _serve(self, slot: WorkerSlot) -> None:
        while slot.present:
            if slot.queue and self._precedes(slot.queue[0], slot):
                self._give(slot.queue.popleft(), slot)
            elif self._any and slot.idle:
                self._give(self._any.popleft(), slot)
            else:
                return

    def _precedes(self, call: Call, slot: WorkerSlot) -> bool:
        """Return whether a call of this worker comes before the waiting calls of any worker."""
        return not self._any or slot.streams > 0 or slot.leaving or call.order < self._any[0].order

    def _serve_any(self) -> None:
        while self._any:
            idle = [slot for slot in self._slots.values() if slot.idle]
            if not idle:
                return
            self._give(self._any.popleft(), min(idle, key=lambda slot: slot.idle_since))

    def _give(self, call: Call, slot: WorkerSlot) -> None:
        call.slot = slot
        if call.stream:
            slot.streams += 1
        else:
            slot.calls += 1
        call.notify()
