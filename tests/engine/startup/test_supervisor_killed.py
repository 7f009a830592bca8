"""A supervisor that is killed at any moment of a restart, or interrupted twice, or ended, leaves nothing behind."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from select import select

import killed_supervisor as moments
import pytest
from support import eventually

pytestmark = [
    pytest.mark.usefixtures("runtime_dir"),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc"),
]

GONE_S = 2.0  # at most, on a machine that has nothing else to do
PATIENCE_S = 60.0
MOMENTS = int(os.environ.get("AIOSHM_TEST_MOMENTS", "12"))
PARALLEL = int(os.environ.get("AIOSHM_TEST_PARALLEL", "1"))
PROCESSES = 3  # at least, in each tree: a supervisor, its resource tracker, and one that it has started


def trees(marks: Iterable[str]) -> dict[str, list[str]]:
    """Return what the processes run that have inherited these marks, and have not exited, by mark."""
    found: dict[str, list[str]] = {mark: [] for mark in marks}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            for mark in found:
                if f"AIOSHM_TEST_DIED={mark}".encode() in environment:
                    found[mark].append(f"{entry.name}: {command}")
    return found


def seconds_until_gone(which: Iterable[str], directory: Path) -> dict[str, float]:
    """Kill supervisors at these moments, all of them at once; return how long any process of each has lived on."""
    marks = {moment: str(directory / f"{number}") for number, moment in enumerate(which)}
    supervisors = {
        moment: subprocess.Popen(
            [sys.executable, moments.__file__, moment],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "AIOSHM_TEST_DIED": mark},
        )
        for moment, mark in marks.items()
    }
    try:
        for moment, supervisor in supervisors.items():
            assert supervisor.stdout is not None
            assert select([supervisor.stdout], [], [], PATIENCE_S)[0], f"{moment} does not come"
            assert supervisor.stdout.read(4) == b"now\n", moment
        before = trees(marks.values())
        assert all(len(before[mark]) >= PROCESSES for mark in marks.values()), before
        for supervisor in supervisors.values():
            supervisor.kill()
        killed = time.monotonic()
        took = dict[str, float]()
        while len(took) < len(marks):
            left = trees(marks.values())
            now = time.monotonic() - killed
            took |= {moment: now for moment, mark in marks.items() if not left[mark] and moment not in took}
            assert now < PATIENCE_S, left
        return took
    finally:
        for supervisor in supervisors.values():
            supervisor.kill()
            supervisor.communicate()


def check(took: dict[str, float]) -> None:
    """Make sure that nothing has lived on; others may use this machine."""
    assert statistics.median(took.values()) < GONE_S, took
    assert max(took.values()) < 5 * GONE_S, took


def test_while_an_engine_or_the_coordinator_starts(tmp_path: Path) -> None:
    check(seconds_until_gone(["before HELLO", "coordinator: bound"], tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["OF_ENGINES", "OF_COORDINATORS", "OF_GROUPS"])
def test_at_every_moment(which: str, tmp_path: Path) -> None:
    check(seconds_until_gone(getattr(moments, which), tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(120 + 15 * MOMENTS)
@pytest.mark.parametrize("backing", ["memfd", "named"])
@pytest.mark.parametrize("signals", ["two interrupts", "one SIGTERM"])
def test_signals_at_any_moment_leave_nothing(signals: str, backing: str) -> None:
    """``AIOSHM_TEST_MOMENTS`` says how many moments, ``AIOSHM_TEST_PARALLEL`` how many at the same time."""
    rng = random.Random(backing)
    plan = [(rng.uniform(0.2, 6), rng.choice([rng.uniform(0, 0.02), rng.uniform(0, 0.5)])) for _ in range(MOMENTS)]
    with ThreadPoolExecutor(PARALLEL) as pool:
        left = list(pool.map(lambda moment: left_after(signals, backing, *moment), plan))
    assert [each for each in zip(plan, left, strict=True) if each[1]] == []


def left_after(signals: str, backing: str, first: float, second: float) -> list[str]:
    """Send signals to a supervisor that starts; return what is left, and the workers that got no close()."""
    with tempfile.TemporaryDirectory() as directory:
        mark = str(Path(directory, "mark"))
        environment = {**os.environ, "AIOSHM_BACKING": backing, "AIOSHM_TEST_DIED": mark}
        environment["XDG_RUNTIME_DIR"] = directory
        if backing == "named":
            environment["AIOSHM_LIFELINE"] = "directory"
        two = signals == "two interrupts"
        if not two:
            environment["AIOSHM_TEST_SIGTERM"] = "1"
        supervisor = subprocess.Popen(
            [sys.executable, moments.__file__, "none"], stderr=subprocess.DEVNULL, env=environment
        )
        try:
            for seconds in (first, second)[: 1 + two]:
                try:
                    supervisor.wait(seconds)
                except subprocess.TimeoutExpired:
                    supervisor.send_signal(signal.SIGINT if two else signal.SIGTERM)
            supervisor.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return ["the supervisor hangs"]
        finally:
            supervisor.kill()
            supervisor.wait()
        eventually(lambda: not trees([mark])[mark])
        sockets = Path(directory, "aioshm")
        left = os.listdir(sockets) if sockets.exists() else []
        if not two:
            made, closed = (
                {path.name.rpartition("-")[2] for path in Path(directory).glob(f"mark-{what}-*")}
                for what in ("made", "closed")
            )
            left += [f"worker {pid}, which got no close()" for pid in made - closed]
        return left
