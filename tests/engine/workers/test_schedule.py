"""The schedule assigns every call to a worker once, in order, also when workers die and return."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aioshm.engine.workers.rank import Rank
from aioshm.engine.workers.schedule import Call, Schedule
from aioshm.process.restart import Health, Restart

RANKS = (0, 1, 2)


class Noted(Call):
    """A call that records its assignments."""

    turns: list[Call]

    def notify(self) -> None:
        self.turns.append(self)


class Asked(Schedule):
    """A schedule, and the assigned calls."""

    def __init__(self, n_workers: int) -> None:
        self.ranks = {rank: Rank(rank, f"Worker_{rank}", Restart()) for rank in range(n_workers)}
        super().__init__(self.ranks)
        self.turns: list[Call] = []
        for rank in range(n_workers):
            self.arrive(rank)

    def arrive(self, rank: int) -> None:
        self.ranks[rank].present = True
        self.ranks[rank].leaving = False
        self.note_health(rank, "running")

    def note_health(self, rank: int, health: Health) -> None:
        self.ranks[rank].enter(health)
        self.freed(self.ranks[rank])

    def make(self, wanted: int | None, *, stream: bool = False) -> Call:
        call = Noted("method", wanted, stream=stream)
        call.turns = self.turns
        self.ask(call)
        return call


def turn_of(call: Call) -> int | None:
    return getattr(call.worker, "rank", None)


def test_call_of_one_queues_behind_waiting_calls_of_any_unless_the_worker_has_a_stream() -> None:
    schedule = Asked(2)
    busy = [schedule.make(0), schedule.make(1, stream=True)]
    waiting = schedule.make(None)
    behind = schedule.make(0)
    beside = schedule.make(1)
    assert (turn_of(waiting), turn_of(behind), turn_of(beside)) == (None, None, 1)
    schedule.answered(busy[0])
    assert (turn_of(waiting), turn_of(behind)) == (0, 0)


def test_replacement_does_not_inherit_calls_in_flight() -> None:
    schedule = Asked(1)
    lost = schedule.make(0)
    assert lost.assigned
    schedule.gone(schedule.ranks[0])
    assert not lost.assigned
    waiting = schedule.make(0)
    assert turn_of(waiting) is None
    schedule.arrive(0)
    assert not lost.assigned
    schedule.answered(lost)  # late
    assert turn_of(waiting) == 0
    assert not schedule.done([schedule.ranks[0]])
    schedule.answered(waiting)
    assert schedule.done([schedule.ranks[0]])


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["ask", "any", "stream", "answer", "withdraw", "gone", "back", "step", "step ends", "leaves"]),
        st.integers(0, 30),
    ),
    max_size=120,
)


@given(MOVES)
def test_every_call_is_assigned_once_in_order_after_any_events(moves: list[tuple[str, int]]) -> None:
    schedule = Asked(len(RANKS))
    turns = schedule.turns
    steps = dict.fromkeys(RANKS, 0)
    asked: list[Call] = []
    away: set[int] = set()
    for move, number in moves:
        rank = number % len(RANKS)
        begun = [call for call in asked if turn_of(call) is not None]
        waiting: list[Any] = [call for call in asked if turn_of(call) is None]
        if move in ("ask", "any", "stream"):
            asked.append(schedule.make(None if move == "any" else rank, stream=move == "stream"))
        elif move == "answer" and begun:
            asked.remove(call := begun[number % len(begun)])
            schedule.answered(call)
        elif move == "withdraw" and waiting:
            asked.remove(call := waiting[number % len(waiting)])
            schedule.withdraw(call)
        elif move == "gone" and rank not in away:
            away.add(rank)
            steps[rank] = 0
            schedule.gone(schedule.ranks[rank])
            asked = [call for call in asked if turn_of(call) != rank]
        elif move == "back" and rank in away:
            away.discard(rank)
            schedule.arrive(rank)
        elif move == "step" and not away:
            schedule.broadcast_begins()
            for each in RANKS:
                steps[each] += 1
        elif move == "step ends" and steps[rank]:
            steps[rank] -= 1
            schedule.broadcast_ends(schedule.ranks[rank])
        elif move == "leaves":
            schedule.ranks[rank].leaving = True
        in_order = [call.order for call in turns if call.wanted is None]
        assert in_order == sorted(in_order)  # first come, first served
        for each in RANKS:
            in_order = [call.order for call in turns if call.wanted == each]
            assert in_order == sorted(in_order)
    for rank in RANKS:
        for _ in range(steps[rank]):
            schedule.broadcast_ends(schedule.ranks[rank])
        schedule.arrive(rank)
    while asked:
        begun = [call for call in asked if turn_of(call) is not None]
        assert begun, "all wait, and no worker has anything to do"
        asked.remove(begun[0])
        schedule.answered(begun[0])
    assert schedule.done(schedule.ranks.values())
    assert len(set(turns)) == len(turns)
