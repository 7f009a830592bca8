"""The example of an engine that hangs: it is named with its line, the other one serves, and it is replaced."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "hung_engine.py"


@pytest.mark.slow
def test_hung_engine() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=90, check=True)
    bug = next(number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1) if line.endswith("# the bug"))
    where = re.escape(f"{SCRIPT}:{bug} in wait_for_ever")
    assert re.search(rf"log: engine 1 \(pid \d+\) is stalled: no progress for \d s: .*{where}\n", done.stdout)
    assert "meanwhile:\n" + "".join(f"  engine 0: request {number}\n" for number in range(4)) in done.stdout
    assert "  engine 0: a request that takes long\n" in done.stdout
    assert "log: engine 0" not in done.stdout
    assert re.search(rf"failed: engine 1 \(pid \d+\) hung for \d+ s at {where}, and was killed\n", done.stdout)
    assert done.stdout.endswith("engine 1: the next request\n")
    assert f'File "{SCRIPT}", line {bug} in wait_for_ever' in done.stderr
