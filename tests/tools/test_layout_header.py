"""The constants of the ring's C code are those of the Python code."""

from __future__ import annotations

from tools import layout_header


def test_layout_header_in_the_tree_has_the_constants_of_the_python_code() -> None:
    assert layout_header.HEADER.read_text() == layout_header.text(), "run python -m tools.layout_header"
