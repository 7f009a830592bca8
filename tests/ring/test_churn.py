"""Readers that join, leave, are killed and replaced: each receives what its first and its last number say, in order."""

from __future__ import annotations

from typing import ClassVar

import pytest
from churning import KILLED, ROOM, Churn
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from rings import CORES, PORTABLE, Cores
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
            max_examples=examples(60),
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
