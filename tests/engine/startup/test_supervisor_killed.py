"""A supervisor that is killed at any moment of a restart leaves no process, of whatever generation."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("runtime_dir")

GONE_S = 2.0  # at most, on a machine that has nothing else to do
PATIENCE_S = 30.0
MOMENTS = ("before spawn", "before HELLO", "in initialize", "at backoff", "draining")


def tree(mark: str) -> list[str]:
    """Return what the processes run that have inherited this mark, and have not exited."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(f"{entry.name}: {(entry / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}")
            except OSError:
                continue
    return found


def seconds_until_gone(moment: str, directory: Path) -> float:
    """Kill a supervisor at this moment; return how long any process of its has lived after that."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, "AIOSHM_TEST_MARK": mark, "AIOSHM_TEST_DIED": str(directory / mark)}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("killed_supervisor.py")), moment],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"now\n"
        before = tree(mark)
        assert len(before) >= 4  # it, an engine, its worker, the coordinator
        process.kill()
        killed = time.monotonic()
        while left := tree(mark):
            assert time.monotonic() < killed + PATIENCE_S, left
            time.sleep(0.005)
        return time.monotonic() - killed
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    "moment", [*MOMENTS[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in MOMENTS[2:])]
)
def test_at_a_moment(moment: str, tmp_path: Path) -> None:
    assert seconds_until_gone(moment, tmp_path) < 5 * GONE_S  # others may use this machine


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_at_any_moment(tmp_path: Path) -> None:
    seconds = [seconds_until_gone(f"{ms} ms", tmp_path) for ms in (0, 1, 2, 5, 10, 20, 50, 100, 200, 400)]
    assert statistics.median(seconds) < GONE_S, seconds
    assert max(seconds) < 5 * GONE_S, seconds
