"""Children forked from a process with ends: they end at once, and the parent's ends go on; see ``forking.py``."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forking import KINDS

HERE = Path(__file__).parent
LOOPS = ("asyncio", "uvloop")
HOW = ("exit", "aclose", "del", "inside", "exit-mp", "aclose-mp")


@functools.cache
def forked(kind: str, *hows: str) -> dict[str, dict[str, Any]]:
    """Return what came of all these ways on both loops: they share an interpreter that has imported everything."""
    done = subprocess.run(
        [sys.executable, str(HERE / "forking.py"), kind, *map("-".join, itertools.product(LOOPS, hows))],
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done
    return {result["case"]: result for result in map(json.loads, done.stdout.splitlines())}


def check(result: dict[str, Any]) -> None:
    said = result["said"]
    assert any(line.startswith("the child is done within") and line.endswith("True") for line in said), result
    assert "the child ended with 0" in said, result
    assert "the parent goes on" in said, result
    assert result["code"] == 0, result


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", ["remote", "events"])
def test_a_child_that_closes_what_it_has_inherited(kind: str, loop: str) -> None:
    check(forked(kind, "aclose")[f"{loop}-aclose"])


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_end_and_of_ending(kind: str, loop: str, how: str) -> None:
    check(forked(kind, *HOW)[f"{loop}-{how}"])
