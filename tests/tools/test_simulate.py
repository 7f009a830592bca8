"""The simulation: seeds hold, each is the same each time, and planted bugs are found. In processes of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.simulate.bugs import BUGS

ROOT = Path(__file__).parents[2]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.simulate", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("first", "count"), [(0, 10), pytest.param(20_000, 100, marks=pytest.mark.slow)])
def test_some_seeds(first: int, count: int) -> None:
    done = simulate("--seeds", str(count), "--first", str(first), "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} seeds" in done.stdout


def test_a_seed_is_the_same_each_time() -> None:
    first, second = (simulate("--seed", "7", "--trace").stdout for _ in range(2))
    assert "all holds" in first
    assert first.count("\n") > 20
    assert without_pids(first) == without_pids(second)


def without_pids(text: str) -> list[str]:
    return [word for word in text.replace("(", " ").split() if not word.startswith(("pid=", "pid"))]


@pytest.mark.slow
def test_every_planted_bug_is_found() -> None:
    """By the seed that is known to, or one of the first; `make simulate ARGS=--mutants` looks longer."""
    done = simulate("--mutants", "--seeds", "10", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(BUGS)} of {len(BUGS)} planted bugs found" in done.stdout


def test_a_bug_that_breaks_nothing_is_not_found() -> None:
    done = simulate("--mutant", "relapse", "--seeds", "0")
    assert done.returncode == 1
    assert "NOT FOUND" in done.stdout


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_can_be_planted(bug: object) -> None:
    """The code that it changes is as it was when the bug was thought out."""
    assert isinstance(bug, type(BUGS[0]))
    compile(bug.source(), bug.name, "exec")
