"""Children forked from a process with ends: they end soon, and the parent's ends go on; see ``forking.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scenes import SCENES

LOOPS = ("asyncio", "uvloop")
HOW = ("exit", "aclose", "del", "inside", "exit-mp", "aclose-mp")
KINDS = list(SCENES)
SCRIPT = Path(__file__).with_name("forking.py")
PATHS = ":".join(map(str, (SCRIPT.parents[2], SCRIPT.parents[1])))  # processes are started that import tests


def check_forks(kind: str, *cases: str) -> None:
    """Check all these cases, which share an interpreter that has imported everything."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), kind, *cases],
        env=os.environ | {"PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        timeout=110,
    )
    lines = [
        "the child is done within 5.0 s: True",
        "the child ended with 0",
        "the parent goes on",
        "the parent ended with 0",
    ]
    assert done.stdout.splitlines() == [line for case in cases for line in (case, *lines)], done.stderr


@pytest.mark.parametrize("kind", ["remote", "events"])
def test_child_that_closes_inherited_ends_harms_nobody(kind: str) -> None:
    check_forks(kind, *(f"{loop}-aclose" for loop in LOOPS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_child_that_ends_in_any_way_harms_nobody(kind: str) -> None:
    """Each way is tried on both loops, with half of the kinds on each."""
    check_forks(kind, *(f"{LOOPS[(KINDS.index(kind) + number) % 2]}-{how}" for number, how in enumerate(HOW)))
