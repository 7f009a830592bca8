"""Every example runs, prints what it promises, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _frames(rank: int) -> list[str]:
    return [f"reader {rank}: frame {number} of 25 MB, all {number}" for number in range(5)]


EXPECTED = {
    "events_router.py": ["rank 1 was cleared: now to rank 0", "the conversation goes to rank 1"],
    "loans.py": [*(line for rank in range(2) for line in sorted([f"reader {rank}: 0 bytes copied", *_frames(rank)]))],
    "quickstart.py": ["received {'number': 0}", "received {'number': 1}", "received {'number': 2}"],
    "typed_steps.py": [*(f"step {number} for ann and bob" for number in range(6)), "the sum of all logits is 750000"],
    "two_hosts.py": ["local: 5 steps", "remote: 5 steps", "serving on 127.0.0.1; the remote reader needs handle.json"],
    "decode_steps.py": [
        "scheduler: reader 1 (pid",
        "worker 0: 50 steps, and the loop went on: True",
        "worker 1: 50 steps, and the loop went on: True",
    ],
}

APART = {"hung_engine.py", "pool.py"}
"""Examples that do not end, or write to stderr; they have tests of their own."""


def _run(script: str) -> list[str]:
    # Unbuffered, a line and its end are written one after the other: another process's line may come in between.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, ROOT / "examples" / script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90, check=True)
    assert done.stderr == ""
    return sorted(done.stdout.splitlines())


SLOW = {"decode_steps.py"}  # torch in each of three processes


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
        for name in sorted({path.name for path in (ROOT / "examples").glob("*.py")} - APART)
    ],
)
def test_example(script: str) -> None:
    lines = _run(script)
    assert len(lines) == len(EXPECTED[script])
    for line, beginning in zip(lines, EXPECTED[script], strict=True):
        assert line.startswith(beginning)


def test_the_readme_shows_the_quickstart_as_it_is() -> None:
    assert (ROOT / "examples" / "quickstart.py").read_text() in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_hung_engine() -> None:
    script = ROOT / "examples" / "hung_engine.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=90, check=True)
    bug = next(number for number, line in enumerate(script.read_text().splitlines(), 1) if line.endswith("# the bug"))
    where = re.escape(f"{script}:{bug} in wait_for_ever")
    assert re.search(rf"log: engine 1 \(pid \d+\) is stalled: no progress for \d s: .*{where}\n", done.stdout)
    assert "meanwhile:\n" + "".join(f"  engine 0: request {number}\n" for number in range(4)) in done.stdout
    assert "  engine 0: a request that takes long\n" in done.stdout
    assert "log: engine 0" not in done.stdout
    assert re.search(rf"failed: engine 1 \(pid \d+\) hung for \d+ s at {where}, and was killed\n", done.stdout)
    assert done.stdout.endswith("engine 1: the next request\n")
    assert f'File "{script}", line {bug} in wait_for_ever' in done.stderr
