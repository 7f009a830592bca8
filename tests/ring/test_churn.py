"""Readers that join, leave, are killed and replaced: each receives what its first and its last number say, in order."""

from __future__ import annotations

from typing import ClassVar

import pytest
from churning import KILLED, ROOM, Churn
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from rings import CORES, PORTABLE, Cores, content, put, receive
from support import examples

places = st.integers(0, 7)


class Churning(RuleBasedStateMachine):
    """Any order of joins, leaves, kills, replacements, history and traffic of all sizes, singly and in batches."""

    cores: ClassVar[Cores] = PORTABLE

    @initialize(
        places=st.integers(1, 8), slots=st.integers(1, 6), chunks=st.integers(1, 6), inline_bytes=st.integers(0, 64)
    )
    def create(self, places: int, slots: int, chunks: int, inline_bytes: int) -> None:
        self.churn = Churn(self.cores, places, slots, chunks, inline_bytes)

    def teardown(self) -> None:
        if hasattr(self, "churn"):
            self.churn.close()

    def place(self, number: int) -> int:
        return number % self.churn.layout.n_reader

    @rule(times=st.integers(1, 4), abandoned=st.none() | st.integers(0, ROOM))
    def send(self, times: int, abandoned: int | None) -> None:
        for _ in range(times):
            self.churn.send(abandoned)

    @rule(times=st.integers(1, 3))
    def send_large(self, times: int) -> None:
        for _ in range(times):
            self.churn.send_large()

    @rule(times=st.integers(1, 6))
    def send_many(self, times: int) -> None:
        self.churn.send_many(times)

    @rule(place=places, most=st.integers(1, 6))
    def read_many(self, place: int, most: int) -> None:
        self.churn.read_many(self.place(place), most)

    @rule(place=places)
    def read(self, place: int) -> None:
        self.churn.read(self.place(place))

    @rule(place=places, history=st.integers(0, 8) | st.just(1 << 62))
    def join(self, place: int, history: int) -> None:
        self.churn.join(self.place(place), history)

    @rule(place=places, how=st.sampled_from(KILLED))
    def part(self, place: int, how: str) -> None:
        self.churn.part(self.place(place), how)

    @invariant()
    def flags_are_those_of_the_model(self) -> None:
        if hasattr(self, "churn"):
            self.churn.check()


@pytest.mark.parametrize("kind", [kind for kind in CORES if kind != "ordered"])  # which only fences more
def test_any_order(kind: str) -> None:
    run_state_machine_as_test(
        type(f"{kind}_churn", (Churning,), {"cores": CORES[kind]}),
        settings=settings(
            max_examples=examples(100),
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


@pytest.mark.parametrize("kind", CORES)
class TestHistory:
    def test_spares_the_chunk_of_a_claim(self, kind: str) -> None:
        churn = Churn(CORES[kind], 1, 4, 1, 0)
        put(churn.writer, content(0, ROOM))
        slot = churn.writer.claim(ROOM)
        assert slot is not None
        assert churn.writer.admit(0, 1) == 1, "its chunk is being filled anew"
        slot.body[:1] = b"y"
        slot.header[:8] = (1).to_bytes(8, "little")
        churn.writer.commit()
        churn._start(0, 1)
        reader = churn.readers[0]
        assert reader is not None
        assert receive(reader.end) == b"y"
        churn.close()

    def test_an_error_of_who_is_asked_admits_nobody(self, kind: str) -> None:
        churn = Churn(CORES[kind], 1, 4, 4, 0)
        slot = churn.writer.claim(ROOM)
        assert slot is not None
        slot.header[0] = 2
        churn.writer.commit()
        with pytest.raises(ZeroDivisionError):
            churn.writer.admit(0, 1, lambda seq: 1 // seq)
        churn.check()
        put(churn.writer, b"x")
        assert churn.writer.free(4), "nobody is waited for"
        churn.close()


@pytest.mark.parametrize("kind", CORES)
def test_replacement_of_a_reader_that_copies_learns_of_lost_messages(kind: str) -> None:
    churn = Churn(CORES[kind], 1, 4, 4, ROOM)
    first = churn.writer.admit(0)
    end = CORES[kind].reader(churn.layout, churn.seen_by_readers.view, 0)
    end.start_at(first)
    for number in range(4):
        put(churn.writer, content(number, ROOM))
    assert receive(end) == content(0, ROOM)
    assert put(churn.writer, content(4, ROOM)) is not None, "it had read the oldest"
    assert churn.writer.pass_over(0, churn.writer.blocker())
    end.close()
    assert churn.writer.resume(0, copies=True) == 1
    churn.close()
