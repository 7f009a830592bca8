"""Signals whose handlers raise, again and again, in busy streams: no message is lost, doubled or swapped.

``storm_child.py`` has one end on the main thread, where handlers run, the other in a thread.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import HELPERS

SCRIPT = str(HELPERS / "storm_child.py")
SIGNALS = 100
STORMS = [("pickle", "wide", True), ("raw", "local", False), ("msgpack", "remote", True)]


@pytest.mark.parametrize(("codec", "where", "native"), STORMS)
@pytest.mark.parametrize("end", ["reader", "writer"])
def test_storm_loses_nothing(end: str, codec: str, where: str, native: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, end, codec, where, str(SIGNALS)],
        env={**os.environ, "AIOSHM_NATIVE": "1" if native else "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{done.stdout} {done.stderr[-3000:]}"
    messages, interrupts = map(int, done.stdout.split())
    assert messages > 50
    assert interrupts > SIGNALS // 4
