"""Which call has its turn at which worker: every one, once, in order, whatever becomes of workers meanwhile."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aioshm.engine.workers.schedule import Schedule, Ticket

RANKS = (0, 1, 2)


def schedule_of(n_workers: int) -> tuple[Schedule, list[Ticket]]:
    schedule, given_turns = Schedule(), []
    schedule.on_turn = given_turns.append
    for rank in range(n_workers):
        schedule.back(rank)
    return schedule, given_turns


def test_any_is_given_the_one_that_has_been_idle_for_the_longest() -> None:
    schedule, _ = schedule_of(3)
    first = [schedule.ask(None, stream=False) for _ in range(3)]
    assert [ticket.rank for ticket in first] == [0, 1, 2]
    for ticket in (first[1], first[2], first[0]):
        schedule.answered(ticket)
    assert [schedule.ask(None, stream=False).rank for _ in range(3)] == [1, 2, 0]


def test_a_call_of_one_goes_behind_those_that_wait_for_any_unless_a_stream_keeps_it_busy() -> None:
    schedule, _ = schedule_of(2)
    busy = [schedule.ask(0, stream=False), schedule.ask(1, stream=True)]
    waiting = schedule.ask(None, stream=False)
    behind, beside = schedule.ask(0, stream=False), schedule.ask(1, stream=False)
    assert (waiting.rank, behind.rank, beside.rank) == (None, None, 1)
    schedule.answered(busy[0])
    assert (waiting.rank, behind.rank) == (0, 0)


def test_a_turn_is_over_when_the_worker_dies_before_the_call_is_sent() -> None:
    schedule, _ = schedule_of(1)
    ticket = schedule.ask(0, stream=False)
    assert schedule.holds(ticket)
    schedule.gone(0)
    assert not schedule.holds(ticket)
    schedule.back(0)
    assert not schedule.holds(ticket), "the successor has not been asked"
    schedule.forget(0)
    assert not schedule.holds(ticket)


def test_what_an_incarnation_had_to_do_is_not_the_next_one_s() -> None:
    schedule, _ = schedule_of(1)
    lost = schedule.ask(0, stream=False)
    schedule.gone(0)
    waiting = schedule.ask(0, stream=False)
    assert waiting.rank is None
    schedule.back(0)
    schedule.answered(lost)  # late
    assert waiting.rank == 0
    assert not schedule.done([0])
    schedule.answered(waiting)
    assert schedule.done([0])


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["ask", "any", "stream", "answer", "withdraw", "gone", "back", "step", "step ends", "leaves"]),
        st.integers(0, 30),
    ),
    max_size=120,
)


@given(MOVES)
def test_whatever_happens_everybody_has_a_turn_in_the_end(moves: list[tuple[str, int]]) -> None:
    schedule, turns = schedule_of(len(RANKS))
    asked: list[Ticket] = []
    away: set[int] = set()
    for move, number in moves:
        rank = number % len(RANKS)
        open_tickets = [ticket for ticket in asked if ticket.rank is not None]
        waiting: list[Any] = [ticket for ticket in asked if ticket.rank is None]
        if move in ("ask", "any", "stream"):
            asked.append(schedule.ask(None if move == "any" else rank, stream=move == "stream"))
        elif move == "answer" and open_tickets:
            asked.remove(ticket := open_tickets[number % len(open_tickets)])
            schedule.answered(ticket)
        elif move == "withdraw" and waiting:
            asked.remove(ticket := waiting[number % len(waiting)])
            schedule.withdraw(ticket)
        elif move == "gone" and rank not in away:
            away.add(rank)
            schedule.gone(rank)
            asked = [ticket for ticket in asked if ticket.rank != rank]
        elif move == "back" and rank in away:
            away.discard(rank)
            schedule.back(rank)
        elif move == "step":
            schedule.step_begins(set(RANKS) - away)
        elif move == "step ends":
            schedule.step_ends(rank)
        elif move == "leaves":
            schedule.leaves(rank, leaves=number > 15)
        in_order = [ticket.number for ticket in turns if ticket.wanted is None]
        assert in_order == sorted(in_order)  # first come, first served
        for each in RANKS:
            in_order = [ticket.number for ticket in turns if ticket.wanted == each]
            assert in_order == sorted(in_order)
    for rank in RANKS:
        schedule.leaves(rank, leaves=False)
        schedule.step_ends(rank)
        if rank in away:
            schedule.back(rank)
    while asked:
        open_tickets = [ticket for ticket in asked if ticket.rank is not None]
        assert open_tickets, "all wait, and no worker has anything to do"
        asked.remove(open_tickets[0])
        schedule.answered(open_tickets[0])
    assert schedule.done(RANKS)
    assert not schedule.waits_for_any()
    assert len(set(turns)) == len(turns)
