"""The litmus tests of the fences, and the explorer that runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from verify.litmus import TESTS, examine, parse

CLASSIC = Path(__file__).parent / "classic"
"""Tests of the explorer, with outcomes that are known from the literature."""
FILES = [*sorted(TESTS.glob("*.litmus")), *sorted(CLASSIC.glob("*.litmus"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_litmus_test_says_is_what_is_found(path: Path) -> None:
    test = parse(path)
    assert test.about
    assert [words for ok, words in examine(test) if not ok] == []


def test_every_test_of_the_code_removes_a_fence_that_matters() -> None:
    for path in TESTS.glob("*.litmus"):
        assert any("bad outcome shown" in words for _, words in examine(parse(path))), path.stem


def test_a_line_that_is_no_step_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.litmus"
    path.write_text("thread:\nx = y rlx\nforbidden: 0:r0=0\n")
    with pytest.raises(ValueError, match="no step of a litmus test"):
        parse(path)
