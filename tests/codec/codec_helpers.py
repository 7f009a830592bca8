from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)
"""What pickle takes that needs no class of its own."""


class Refuses:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("not today")


def encode(codec: Any, obj: Any) -> tuple[Any, Sequence[memoryview]]:
    """Encode, with the parts of the main part joined; one that is alone is not copied."""
    encoded = codec.encode(obj)
    if type(encoded) is bytes:
        return encoded, ()
    parts, buffers = encoded
    return parts[0] if len(parts) == 1 else b"".join(parts), buffers
