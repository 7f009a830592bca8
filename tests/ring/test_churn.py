"""Readers that join, leave, are killed and replaced: each receives what its first and its last number say, in order."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
from churning import KILLED, ROOM, Churn, copying
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

    @rule(times=st.integers(1, 4))
    def send(self, times: int) -> None:
        for _ in range(times):
            self.churn.send()

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


@pytest.mark.parametrize("kind", CORES)
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", CORES)
def test_many(kind: str) -> None:
    chance, churns = random.Random(16), 0
    while churns < 100_000:
        churn = Churn(CORES[kind], *(chance.randint(1, most) for most in (8, 6, 6)), chance.randint(0, ROOM))
        for _ in range(5_000):
            churn.at_random(chance)
        churn.check()
        churns += churn.churns
        churn.close()


@pytest.mark.parametrize("kind", CORES)
class TestHistory:
    def test_stops_at_a_chunk_that_another_message_has(self, kind: str) -> None:
        churn = Churn(CORES[kind], 2, 6, 2, 0)
        for number in range(4):
            assert put(churn.writer, content(number, ROOM)) is not None, "nobody reads: chunks go round"
        first = churn.writer.admit(0, 4)
        churn._start(0, first)
        reader = churn.readers[0]
        assert reader is not None
        assert first in (2, 3), "the chunk that became free last is taken first"
        assert [receive(reader.end) for _ in range(first, 4)] == [content(number, ROOM) for number in range(first, 4)]
        churn.close()

    def test_fills_the_ring(self, kind: str) -> None:
        churn = Churn(CORES[kind], 1, 4, 4, ROOM)
        for number in range(7):
            put(churn.writer, content(number, ROOM))
        assert churn.writer.admit(0, 100) == 3
        assert put(churn.writer, b"x") is None, "until the newcomer has read"
        churn._start(0, 3)
        reader = churn.readers[0]
        assert reader is not None
        assert receive(reader.end) == content(3, ROOM)
        assert put(churn.writer, b"x") is not None
        churn.close()

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

    @pytest.mark.parametrize(("gone", "first"), [(None, 0), (lambda _: False, 0), (lambda seq: seq < 2, 2)])
    def test_asks_for_what_lies_elsewhere(self, kind: str, gone: object, first: int) -> None:
        churn = Churn(CORES[kind], 1, 4, 4, 0)
        for number in range(4):
            slot = churn.writer.claim(ROOM)
            assert slot is not None
            slot.header[0] = 2  # and what stands where others name their chunk is not to be believed
            slot.header[32:40] = (1 + number % 2).to_bytes(8, "little")
            churn.writer.commit()
        assert churn.writer.admit(0, 100, gone) == first  # type: ignore[arg-type]
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
def test_a_reader_that_copies_takes_the_place_of_another_one(kind: str) -> None:
    churn = Churn(CORES[kind], 1, 4, 4, ROOM)
    for number in range(3):
        put(churn.writer, content(number, ROOM))
    first = churn.writer.admit(0, 2)
    end = copying(churn, 0)
    end.core.start_at(first)
    assert [receive(end) for _ in range(2)] == [content(1, ROOM), content(2, ROOM)]
    for number in range(3, 6):
        put(churn.writer, content(number, ROOM))
    assert put(churn.writer, b"x") is None
    assert not churn.writer.pass_over(0, churn.writer.core.blocker()), "it had read that"
    assert receive(end) == content(3, ROOM)
    end.close()
    assert churn.writer.resume(0, copies=True) == 4
    churn.close()
