"""Values of MessagePack are counted as msgspec decodes them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshm.codec.msgpack import count_values

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=300)
    | st.builds(msgspec.msgpack.Ext, st.integers(0, 127), st.binary(max_size=20))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.integers(0, 99), inner, max_size=20),
    max_leaves=30,
)


def count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + count(item) for item in value.values())
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


@given(VALUES)
def test_count_equals_that_of_the_decoded_values(value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    assert count_values(data, 1 << 20) == count(value)
    assert count_values(memoryview(data), count(value)) == count(value)


@pytest.mark.parametrize("size", [0, 15, 16, 255, 256, 65_535, 65_536])
def test_lengths_of_every_width_are_stepped_over(size: int) -> None:
    for value in ("x" * size, b"x" * size, msgspec.msgpack.Ext(1, b"x" * size)):
        assert count_values(msgspec.msgpack.encode([value, 1]), 10) == 3
    for values in ([1] * size, dict.fromkeys(range(size), 1)):
        assert count_values(msgspec.msgpack.encode(values), 1 << 20) == count(values)


def test_counting_ends_above_the_most() -> None:
    assert count_values(b"\xc0" * 1000, 10) == 11
