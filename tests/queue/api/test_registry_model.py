"""The reader registry without any I/O: joins, leaves, deaths, replacements, history and traffic, of two transports."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run
from support import examples

from aioshm import HandleError, NoPlaceVacant
from aioshm.lifeline.protocol import ANY_RANK
from aioshm.queue.membership import Change, ReaderDied, ReaderJoined, ReaderLeft
from aioshm.queue.registry import ReaderRegistry, ReaderSlot
from aioshm.queue.remote.window import SendWindow

OWN = {"local": (0,), "remote": (1,)}
EXTRA = (2, 3)
RANKS = (0, 1, *EXTRA)
MOST = 12
WHO = st.integers(0, 7)
KINDS = st.sampled_from(["local", "remote"])


class Message:
    nbytes = 1


class Transport:
    """Readers whose messages a window keeps, and nothing that carries them."""

    def __init__(self, kind: str, window: SendWindow) -> None:
        self.kind = kind
        self.window = window
        self.evicted: list[tuple[int, bool]] = []

    def progress(self, slot: ReaderSlot) -> tuple[int, int]:
        return self.window.readers.get(slot.rank, self.window.seq), self.window.seq

    def condition(self, _: ReaderSlot) -> str:
        return "running"

    def evidence(self, _: ReaderSlot) -> str:
        return "lives"

    def row(self, _: ReaderSlot) -> dict[str, Any]:
        return {}

    def keep(self, slot: ReaderSlot) -> None:
        assert slot.rank in self.window.readers

    def drop(self, slot: ReaderSlot) -> None:
        self.window.leave(slot.rank)

    def evict(self, slot: ReaderSlot, reader: Any, *, dismissed: bool) -> None:
        assert reader is not None
        self.evicted.append((slot.rank, dismissed))
        self.window.leave(slot.rank)


class Readers(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["raise", "evict", "hold"]), history=st.integers(0, 6))
    def begin(self, policy: Any, history: int) -> None:
        self.policy, self.history = policy, history
        self.window = SendWindow(MOST, 1000, history)
        self.transports = {kind: Transport(kind, self.window) for kind in OWN}
        self.registry = ReaderRegistry("q", policy)
        for kind, own in OWN.items():
            self.registry.add(self.transports[kind], own + EXTRA, frozenset(EXTRA))
        self.registry.report = self.hear  # type: ignore[method-assign]
        self.changes: list[Change] = []
        self.there: dict[int, str] = {}  # by rank, of which kind
        self.held: dict[int, tuple[str, int]] = {}  # by rank, of which kind, and where the next one begins
        self.count = 0
        assert self.registry.missing() == ["rank 0", "rank 1"]
        for kind, (rank,) in OWN.items():
            self.join(kind, rank, 0)
            self.registry.proven(self.registry.slots[rank])
        assert self.registry.complete
        self.registry.going = True

    def hear(self, change: Change) -> None:
        self.changes.append(change)

    def vacant(self, kind: str) -> list[int]:
        ranks = [rank for rank in OWN[kind] + EXTRA if rank not in self.there]
        return [rank for rank in ranks if rank not in self.held or self.held[rank][0] == kind]

    @rule(kind=KINDS, rank=st.integers(ANY_RANK, 4), history=st.integers(0, 20))
    def join(self, kind: str, rank: int, history: int) -> None:
        vacant = self.vacant(kind)
        try:
            slot = self.registry.choose(rank, self.transports[kind])
        except NoPlaceVacant:
            assert rank == ANY_RANK
            assert not vacant
            return
        except HandleError:
            assert rank not in vacant
            return
        assert slot.rank == (min(vacant) if rank == ANY_RANK else rank)
        self.count += 1
        kept = len(self.window) + len(self.window._past)
        if slot.rank in self.held:
            first = self.window.readers[slot.rank]
            assert self.held.pop(slot.rank) == (kind, first), "where the one before had come to"
        else:
            first = self.window.join(slot.rank, history)
            assert first == self.window.seq - min(history, kept, MOST), "as many as there are, and no hole"
        transport = self.transports[kind]
        self.registry.attach(slot, transport, object(), pid=self.count, host="host", slow="block", first=first)
        assert self.changes[-1] == ReaderJoined(slot.rank, self.count, first)
        assert slot.trouble is None
        self.there[slot.rank] = kind

    def one_that_goes(self, who: int) -> tuple[ReaderSlot, str]:
        rank = sorted(self.there)[who % len(self.there)]
        return self.registry.slots[rank], self.there.pop(rank)

    @precondition(lambda self: self.there)
    @rule(who=WHO, proven=st.booleans())
    def leave(self, who: int, proven: bool) -> None:
        slot, kind = self.one_that_goes(who)
        if proven:
            self.registry.proven(slot)
        at = self.window.readers[slot.rank]
        if slot.heir and not slot.proven:
            self.held[slot.rank] = kind, at
        self.registry.left(slot)
        assert self.changes[-1] == ReaderLeft(slot.rank, slot.pid, at)

    @precondition(lambda self: self.there)
    @rule(who=WHO)
    def die(self, who: int) -> None:
        slot, kind = self.one_that_goes(who)
        at, held = self.window.readers[slot.rank], self.policy == "hold"
        self.registry.died(slot, "silence")
        assert self.changes[-1] == ReaderDied(slot.rank, slot.pid, at, held)
        assert (slot.trouble is not None) == (self.policy == "raise")
        if held:
            self.held[slot.rank] = kind, at

    @rule(rank=st.sampled_from(RANKS))
    def dismiss(self, rank: int) -> None:
        kind = self.there.pop(rank, None)
        self.held.pop(rank, None)
        self.registry.dismiss(rank)
        assert self.registry.slots[rank].trouble is None
        if kind is not None:
            assert self.transports[kind].evicted[-1] == (rank, True), "it is told"

    @precondition(lambda self: self.window.room(1, 1))
    @rule(number=st.integers(1, 20))
    def send(self, number: int) -> None:
        for _ in range(number):
            if self.window.room(1, 1):
                self.window.sent(Message())

    @precondition(lambda self: self.there)
    @rule(who=WHO, number=st.integers(1, 20))
    def acknowledge(self, who: int, number: int) -> None:
        rank = sorted(self.there)[who % len(self.there)]
        self.window.acknowledged(rank, min(self.window.seq, self.window.readers[rank] + number))

    @invariant()
    def the_window_counts_on_who_is_there_and_on_what_is_held(self) -> None:
        if not hasattr(self, "window"):
            return
        assert set(self.window.readers) == {*self.there, *self.held}
        held = {slot.rank: (slot.transport.kind, self.window.readers[slot.rank]) for slot in self.slots("held")}
        assert held == self.held
        assert {slot.rank for slot in self.slots("attached")} == set(self.there)
        assert self.registry.alive == len(self.there)
        assert self.registry.backlog() == len(self.window) <= MOST
        assert len(self.window._past) <= self.history
        assert self.registry.complete
        for info in self.registry.readers():
            assert 0 <= info.lag <= MOST

    def slots(self, state: str) -> list[ReaderSlot]:
        return [slot for slot in self.registry.slots.values() if slot.state == state]


def test_readers_that_come_and_go_in_any_order() -> None:
    run(Readers, settings=settings(max_examples=examples(80), stateful_step_count=40, deadline=None))
