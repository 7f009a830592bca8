"""A supervisor that is killed at any moment of a restart, or interrupted twice, or ended, leaves nothing behind."""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from select import select
from subprocess import DEVNULL, PIPE, Popen

import killed_supervisor as moments
import pytest
from managed import marked
from support import eventually

pytestmark = [
    pytest.mark.usefixtures("runtime_dir"),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc"),
]

GONE_S = 2.0  # at most, on a machine that has nothing else to do
PATIENCE_S = 60.0
MOMENTS = int(os.environ.get("AIOSHM_TEST_MOMENTS", "4"))
PROCESSES = 3  # at least, in each tree: a supervisor, its resource tracker, and one that it has started


def start(moment: str, mark: str, **environment: str) -> Popen[bytes]:
    env = {**os.environ, "AIOSHM_TEST_DIED": mark, **environment}
    return Popen([sys.executable, moments.__file__, moment], stdout=PIPE, stderr=DEVNULL, bufsize=0, env=env)


def test_supervisor_killed_at_a_moment_of_a_restart_leaves_no_process(tmp_path: Path) -> None:
    """One for each moment, all at once."""
    marks = {moment: str(tmp_path / f"{number}") for number, moment in enumerate(moments.MOMENTS)}
    supervisors = {moment: start(moment, mark) for moment, mark in marks.items()}
    try:
        for moment, supervisor in supervisors.items():
            assert supervisor.stdout is not None
            assert select([supervisor.stdout], [], [], PATIENCE_S)[0], f"{moment} does not come"
            assert supervisor.stdout.read(4) == b"now\n", moment
            assert len(marked(marks[moment])) >= PROCESSES, moment
        for supervisor in supervisors.values():
            supervisor.kill()
        killed = time.monotonic()
        took = dict[str, float]()
        while len(took) < len(marks):
            for moment in marks.keys() - took:
                left = marked(marks[moment])
                assert time.monotonic() - killed < PATIENCE_S, left
                if not left:
                    took[moment] = time.monotonic() - killed
    finally:
        for supervisor in supervisors.values():
            supervisor.kill()
            supervisor.communicate()
    # Others may use this machine.
    assert statistics.median(took.values()) < GONE_S, took
    assert max(took.values()) < 5 * GONE_S, took


@pytest.mark.slow
@pytest.mark.timeout(120 + 15 * MOMENTS)
@pytest.mark.parametrize(("signals", "backing"), [("two interrupts", "memfd"), ("one SIGTERM", "named")])
def test_signals_at_any_moment_leave_nothing(signals: str, backing: str) -> None:
    """``AIOSHM_TEST_MOMENTS`` is the number of moments."""
    rng = random.Random(backing)
    for _ in range(MOMENTS):
        between_s = rng.choice([rng.uniform(0, 0.02), rng.uniform(0, 0.5)])
        with tempfile.TemporaryDirectory() as directory:  # short enough for sockets
            check_signals_leave_nothing(signals, backing, Path(directory), [rng.uniform(0.2, 4), between_s])


def check_signals_leave_nothing(signals: str, backing: str, directory: Path, pauses_s: list[float]) -> None:
    """Send signals to a supervisor that starts; after SIGTERM each worker must have got its close()."""
    mark = str(directory / "mark")
    environment = {"AIOSHM_BACKING": backing, "XDG_RUNTIME_DIR": str(directory)}
    if backing == "named":
        environment["AIOSHM_LIFELINE"] = "directory"
    number = signal.SIGINT
    if signals == "one SIGTERM":
        environment["AIOSHM_TEST_SIGTERM"] = "1"
        number = signal.SIGTERM
        del pauses_s[1]
    with start("none", mark, **environment) as supervisor:
        try:
            for seconds in pauses_s:
                time.sleep(seconds)
                supervisor.send_signal(number)
            supervisor.wait(PATIENCE_S)
        finally:
            supervisor.kill()
    eventually(lambda: not marked(mark), f"the end of what was started {pauses_s} s before the signals")
    sockets = directory / "aioshm"
    assert not sockets.exists() or os.listdir(sockets) == [], pauses_s
    if number == signal.SIGTERM:
        made = {path.name.rpartition("-")[2] for path in directory.glob("mark-made-*")}
        closed = {path.name.rpartition("-")[2] for path in directory.glob("mark-closed-*")}
        assert made == closed, pauses_s
