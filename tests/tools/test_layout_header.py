"""The constants of the ring's C code are those of the Python code."""

from __future__ import annotations

from aioshm.codec import frames
from aioshm.ring import layout
from tools import layout_header


def test_layout_header_in_the_tree_has_the_constants_of_the_python_code() -> None:
    assert layout_header.HEADER.read_text() == layout_header.text(), "run python -m tools.layout_header"


def test_kind_of_overflowing_messages_is_that_of_the_frames() -> None:
    assert layout.OVERFLOW_KIND == frames.OVERFLOW
