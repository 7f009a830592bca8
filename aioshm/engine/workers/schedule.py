"""Which call may be sent to which worker, and when: no I/O, no clock.

A call of one worker is sent at once, behind those that the worker has already. A call of any worker is given to the one
that has been idle for the longest; those that wait for one are served first come, first served. A call of one worker
that is made while they wait goes behind them, if it is its calls that keep the worker from being idle: otherwise a
worker that is called again and again would never be. A worker with a stream is not idle, but its stream may go on for
as long as it likes, and keeps nobody from calling it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable


class Ticket:
    """A call's place in line.

    Attributes:
        wanted: The worker's rank; None: any.
        stream: Whether it is the call of a stream.
        rank: The worker that it may be sent to, once it may.
    """

    __slots__ = ("life", "number", "rank", "stream", "wanted")

    def __init__(self, wanted: int | None, number: int, *, stream: bool) -> None:
        self.wanted = wanted
        self.number = number
        self.stream = stream
        self.rank: int | None = None
        self.life = 0  # of the worker, one after the other of its rank


class _Seat:
    """What one worker has to do."""

    __slots__ = ("calls", "idle_since", "leaves", "life", "line", "present", "steps", "streams")

    def __init__(self) -> None:
        self.life = 0
        self.present = False
        self.leaves = False
        self.steps = False
        self.calls = 0
        self.streams = 0
        self.idle_since = 0
        self.line: deque[Ticket] = deque()

    @property
    def idle(self) -> bool:
        return self.present and not (self.leaves or self.steps or self.calls or self.streams)


class Schedule:
    """The workers, and the calls that wait for them.

    Attributes:
        on_turn: Called with each ticket when its call may be sent.
    """

    def __init__(self) -> None:
        self.on_turn: Callable[[Ticket], None] = lambda _ticket: None
        self._seats: dict[int, _Seat] = {}
        self._any: deque[Ticket] = deque()
        self._number = 0

    def ask(self, wanted: int | None, *, stream: bool) -> Ticket:
        """Return the ticket of a call, whose turn it may be at once; `withdraw` or `answered` gives it back.

        Args:
            wanted: The worker's rank; None: any.
            stream: Whether it is the call of a stream.
        """
        self._number += 1
        ticket = Ticket(wanted, self._number, stream=stream)
        if wanted is None:
            self._any.append(ticket)
            self._serve_any()
        else:
            seat = self._seat(wanted)
            seat.line.append(ticket)
            self._serve(wanted, seat)
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Let a call that was not sent have no turn any more."""
        if ticket.rank is not None:
            self.answered(ticket)
            return
        line = self._any if ticket.wanted is None else self._seat(ticket.wanted).line
        if ticket in line:
            line.remove(ticket)
        for rank, seat in self._seats.items():  # others may have waited for this one
            self._serve(rank, seat)

    def answered(self, ticket: Ticket) -> None:
        """Note that a worker is done with a call; what one had to do that is gone is forgotten already."""
        assert ticket.rank is not None
        seat = self._seats.get(ticket.rank)
        if seat is None or seat.life != ticket.life:
            return
        if ticket.stream:
            seat.streams -= 1
        else:
            seat.calls -= 1
        self._free(ticket.rank, seat)

    def holds(self, ticket: Ticket) -> bool:
        """Return whether the worker whose turn a call has got is there still, and not a successor."""
        assert ticket.rank is not None
        seat = self._seats.get(ticket.rank)
        return seat is not None and seat.life == ticket.life

    def back(self, rank: int) -> None:
        """Note that there is a worker of this rank, which has nothing to do yet."""
        seat = self._seat(rank)
        seat.present, seat.leaves = True, False
        self._free(rank, seat)

    def gone(self, rank: int) -> None:
        """Note that there is no worker of this rank for the time being; what it had to do is forgotten."""
        seat = self._seat(rank)
        seat.present = seat.steps = False
        seat.calls = seat.streams = 0
        seat.life += 1

    def leaves(self, rank: int, *, leaves: bool = True) -> None:
        """Give a worker no calls that any other one could have."""
        seat = self._seat(rank)
        seat.leaves = leaves
        if not leaves:
            self._free(rank, seat)

    def forget(self, rank: int) -> list[Ticket]:
        """Have no worker of this rank any more; return the tickets that have waited for it."""
        seat = self._seats.pop(rank, None)
        return [] if seat is None else list(seat.line)

    def step_begins(self, ranks: Iterable[int]) -> None:
        """Note that workers have a step to do."""
        for rank in ranks:
            self._seat(rank).steps = True

    def step_ends(self, rank: int) -> None:
        """Note that a worker is done with all steps."""
        seat = self._seat(rank)
        if seat.steps:
            seat.steps = False
            self._free(rank, seat)

    def done(self, ranks: Iterable[int]) -> bool:
        """Return whether these workers have no call any more, nor anybody waiting."""
        seats = [self._seat(rank) for rank in ranks]
        return not any(seat.calls or seat.streams or seat.line for seat in seats)

    def in_steps(self) -> set[int]:
        """Return the ranks of workers that have a step to do."""
        return {rank for rank, seat in self._seats.items() if seat.steps}

    def waits_for_any(self) -> bool:
        """Return whether a call waits for an idle worker."""
        return bool(self._any)

    def _seat(self, rank: int) -> _Seat:
        seat = self._seats.get(rank)
        if seat is None:
            seat = self._seats[rank] = _Seat()
        return seat

    def _free(self, rank: int, seat: _Seat) -> None:
        if seat.idle:
            self._number += 1
            seat.idle_since = self._number
        self._serve(rank, seat)

    def _serve(self, rank: int, seat: _Seat) -> None:
        """Give turns to those who wait for a worker."""
        while seat.present:
            direct = seat.line[0] if seat.line else None
            if direct is not None and self._goes_on(seat, direct):
                self._give(seat.line.popleft(), rank, seat)
            elif self._any and seat.idle:
                self._give(self._any.popleft(), rank, seat)
            else:
                return

    def _goes_on(self, seat: _Seat, direct: Ticket) -> bool:
        return not self._any or seat.streams > 0 or seat.leaves or direct.number < self._any[0].number

    def _serve_any(self) -> None:
        while self._any:
            idle = [(seat.idle_since, rank) for rank, seat in self._seats.items() if seat.idle]
            if not idle:
                return
            _, rank = min(idle)
            self._give(self._any.popleft(), rank, self._seats[rank])

    def _give(self, ticket: Ticket, rank: int, seat: _Seat) -> None:
        ticket.rank, ticket.life = rank, seat.life
        if ticket.stream:
            seat.streams += 1
        else:
            seat.calls += 1
        self.on_turn(ticket)
