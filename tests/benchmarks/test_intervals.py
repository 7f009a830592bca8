from __future__ import annotations

import random

import pytest
from support import examples

from benchmarks.framework.intervals import interval_of, trimmed_mean


def test_stragglers_do_not_decide() -> None:
    assert trimmed_mean([1, 1, 1, 1, 1000]) == 1
    assert trimmed_mean([3.0]) == 3
    with pytest.raises(ValueError, match="needs values"):
        trimmed_mean([])


def test_an_interval_holds_the_truth_nearly_always_and_narrows() -> None:
    source = random.Random(1)
    held, widths = 0, {10: 0.0, 160: 0.0}
    rounds = examples(40)
    for _ in range(rounds):
        for count in widths:
            found = interval_of([source.gauss(5, 1) for _ in range(count)])
            assert found.low <= found.estimate <= found.high
            held += found.low <= 5 <= found.high
            widths[count] += found.high - found.low
    assert held >= 0.85 * 2 * rounds
    assert widths[10] / widths[160] > 3, "with the square root of the repetitions"
