"""Children forked from a process with ends: they end at once, and the parent's ends go on; see ``forking.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forking import KINDS

HERE = Path(__file__).parent
HOW = ("exit", "aclose", "del", "inside", "exit-mp", "aclose-mp")


def fork(kind: str, loop: str, how: str) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "forking.py"), kind, loop, how],
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = done.stdout.splitlines()
    assert any(line.startswith("the child is done within") and line.endswith("True") for line in said), done
    assert "the child ended with 0" in said, done
    assert "the parent goes on" in said, done
    assert done.returncode == 0, done


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("kind", ["remote", "events"])
def test_a_child_that_closes_what_it_has_inherited(kind: str, loop: str) -> None:
    fork(kind, loop, "aclose")


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_end_and_of_ending(kind: str, loop: str, how: str) -> None:
    fork(kind, loop, how)
