"""The places for remote readers without any I/O: joins, leaves, deaths, replacements, history and traffic."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run
from support import examples

from aioshm.lifeline.protocol import ANY_RANK
from aioshm.queue.membership import Change, ReaderDied, ReaderJoined, ReaderLeft
from aioshm.queue.remote import wire
from aioshm.queue.remote.places import RemotePlaces
from aioshm.queue.remote.window import SendWindow

OWN, EXTRA = (0, 1), (2, 3)
MOST = 12
WHO = st.integers(0, 7)


class Message:
    nbytes = 1


class Places(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["raise", "evict", "hold"]), history=st.integers(0, 6))
    def begin(self, policy: str, history: int) -> None:
        self.policy, self.history = policy, history
        self.window: SendWindow[Message] = SendWindow(MOST, 1000, history)
        ranks = OWN + EXTRA
        self.places = RemotePlaces("q", ranks, frozenset(EXTRA), self.window, self.window.leave, policy, 1.0)
        self.places.tell = self.hear
        self.changes: list[Change] = []
        self.kept_for: dict[int, int] = {}  # by rank, where a held place goes on
        self.there: dict[int, bytes] = {}
        self.count = 0
        for rank in OWN:
            self.join(rank, 0)
        for peer in self.places:
            self.places.proven(peer)
        assert self.places.complete
        self.places.going = True

    def hear(self, change: Change) -> None:
        self.changes.append(change)

    @rule(rank=st.integers(ANY_RANK, 4), history=st.integers(0, 20))
    def join(self, rank: int, history: int) -> None:
        self.count += 1
        identity = b"%d" % self.count
        hello = wire.Hello(1, b"", b"", rank, self.count, "host", proven=False, history=history)
        answer = self.places.answer(hello, identity, 0.0, 0.0)
        vacant = [each for each in OWN + EXTRA if each not in self.there]
        if isinstance(answer, wire.Refused):
            assert rank not in vacant
            assert rank != ANY_RANK or not vacant
            assert answer.full == (rank == ANY_RANK)
            return
        assert isinstance(answer, int), "all have spoken: nobody has to wait"
        assert answer == (vacant[0] if rank == ANY_RANK else rank)
        kept = len(self.window) + len(self.window._past)
        peer = self.places.admit(identity, hello, answer)
        if answer in self.kept_for:
            assert peer.first == self.kept_for.pop(answer), "where the one before had come to"
        else:
            assert peer.first == self.window.seq - min(history, kept, MOST), "as many as there are, and no hole"
        assert self.changes[-1] == ReaderJoined(answer, peer.pid, peer.first)
        self.there[answer] = identity

    @rule(who=WHO, proven=st.booleans())
    def leave(self, who: int, proven: bool) -> None:
        if self.there:
            rank = sorted(self.there)[who % len(self.there)]
            peer = self.places.of_identity(self.there.pop(rank))
            assert peer is not None
            if proven:
                self.places.proven(peer)
            at = self.window.readers[rank]
            self.places.has_left(peer)
            if peer.heir and not peer.proven:
                self.kept_for[rank] = at
            assert self.changes[-1] == ReaderLeft(rank, peer.pid, at)

    @rule(who=WHO)
    def die(self, who: int) -> None:
        if self.there:
            rank = sorted(self.there)[who % len(self.there)]
            identity = self.there.pop(rank)
            peer = self.places.of_identity(identity)
            assert peer is not None
            at, held = self.window.readers[rank], self.policy == "hold"
            self.places.has_died(peer, "silence")
            assert self.changes[-1] == ReaderDied(rank, peer.pid, at, held)
            assert (self.places.trouble is not None) == (self.policy == "raise")
            if held:
                self.kept_for[rank] = at
            back = wire.Hello(1, b"", b"", rank, peer.pid, "host", proven=True, admitted=True)
            answer = self.places.answer(back, identity, 0.0, 0.0)
            assert answer == wire.Refused("silence", evicted=True), "it has missed something"

    @rule(rank=st.sampled_from(OWN + EXTRA))
    def dismiss(self, rank: int) -> None:
        self.places.dismiss(rank)
        self.there.pop(rank, None)
        self.kept_for.pop(rank, None)

    @precondition(lambda self: self.window.room(1, 1))
    @rule(number=st.integers(1, 20))
    def send(self, number: int) -> None:
        for _ in range(number):
            if self.window.room(1, 1):
                self.window.sent(Message())

    @rule(who=WHO, number=st.integers(1, 20))
    def acknowledge(self, who: int, number: int) -> None:
        if self.there:
            rank = sorted(self.there)[who % len(self.there)]
            self.window.acknowledged(rank, min(self.window.seq, self.window.readers[rank] + number))

    @invariant()
    def the_window_counts_on_who_is_there_and_on_what_is_held(self) -> None:
        if not hasattr(self, "window"):
            return
        assert set(self.window.readers) == {*self.there, *self.kept_for}
        assert {rank: self.window.readers[rank] for rank in self.places.held} == self.kept_for
        assert len(self.window) == self.window.backlog() <= MOST
        assert len(self.window._past) <= self.history
        assert self.places.complete
        for info in self.places.readers():
            there = info.rank in self.there
            assert (info.state == "attached", info.state == "held") == (there, info.rank in self.kept_for)
            assert 0 <= info.lag <= MOST


def test_whatever_becomes_of_readers() -> None:
    run(Places, settings=settings(max_examples=examples(150), stateful_step_count=40, deadline=None))
