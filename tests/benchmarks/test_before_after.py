"""The comparison of two trees in slices tells what is slower, what is not, and what it cannot tell."""

from __future__ import annotations

import random
import subprocess
import sys
from math import log
from pathlib import Path

import pytest

from benchmarks.before_after import estimate, judge

ROOT = Path(__file__).parents[2]


def lives_of(speed: float, noise: float, lives: int = 6, rounds: int = 10) -> list[list[float]]:
    chance = random.Random(lives)
    return [[log(speed) + chance.gauss(0, noise) for _ in range(rounds)] for _ in range(lives)]


@pytest.mark.parametrize("speed", [0.9, 1.0, 1.2])
def test_the_interval_has_the_speed(speed: float) -> None:
    found, low, high = estimate(lives_of(speed, 0.02))
    assert low < found < high
    assert low < speed < high
    assert high / low < 1.03


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.9, 0.96, "slower"), (0.9, 0.98, "not told"), (0.96, 1.2, "not told"), (0.98, 1.0, "not slower")],
)
def test_what_an_interval_tells(low: float, high: float, verdict: str) -> None:
    assert judge(low, high, 3, (0.98, 1.02)) == verdict


@pytest.mark.slow
def test_a_tree_against_itself() -> None:
    command = [sys.executable, "-m", "benchmarks.before_after", str(ROOT), str(ROOT), "--quick", "--only", "pingpong"]
    done = subprocess.run(
        [*command, "--contestants", "aioshm"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert "64 B ping-pong  1        aioshm" in done.stdout
    assert "cases that are slower by more than 3%" in done.stdout


def test_what_is_no_tree_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.before_after", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "is no checkout with a .venv of its own" in done.stderr
