"""The litmus tests of the fences, and the explorer that runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from verify.litmus import TESTS, examine, parse, shows

CLASSIC = Path(__file__).parent / "classic"
FILES = [*sorted(TESTS.glob("*.litmus")), *sorted(CLASSIC.glob("*.litmus"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_litmus_test_says_is_what_is_found(path: Path) -> None:
    test = parse(path)
    assert test.about
    assert [words for ok, words in examine(test) if not ok] == []


@pytest.mark.parametrize(
    ("name", "c11", "x86"),
    [
        ("mp", False, False),
        ("mp-relaxed", True, False),
        ("sb", True, True),
        ("sb-fences", False, False),
        ("lb", True, False),
        ("lb-release", False, False),
        ("iriw", True, False),
        ("iriw-fences", False, False),
    ],
)
def test_the_explorer_knows_the_classic_tests(name: str, c11: bool, x86: bool) -> None:
    test = parse(CLASSIC / f"{name}.litmus")
    assert (shows(test, "c11"), shows(test, "x86")) == (c11, x86)


def test_every_test_of_the_code_removes_a_fence_that_matters() -> None:
    for path in TESTS.glob("*.litmus"):
        assert any("bad outcome shown" in words for _, words in examine(parse(path))), path.stem


def test_a_line_that_is_no_step_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.litmus"
    path.write_text("thread:\nx = y rlx\nforbidden: 0:r0=0\n")
    with pytest.raises(ValueError, match="no step of a litmus test"):
        parse(path)
