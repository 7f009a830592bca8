"""What is there on every platform, tried on this one as it is and without what only Linux has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BASICS = Path(__file__).with_name("basics.py")


@pytest.mark.parametrize(
    ("arguments", "native"),
    [
        pytest.param(["--like-macos"], "1", id="like macOS"),
        pytest.param([], "0", id="without the native core", marks=pytest.mark.slow),
    ],
)
def test_basics(arguments: list[str], native: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", BASICS, *arguments],
        env={**os.environ, "AIOSHM_NATIVE": native},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("darwin" if arguments else sys.platform)
    assert ("backing='named', lifeline='directory'" in lines[0]) == bool(arguments)
    done_once = [line.partition(":")[0] for line in lines[1:]]
    assert (len(done_once), done_once[0], done_once[-1]) == (9, "one_loop", "events")
