"""Signals whose handlers raise, again and again, in busy streams: no message is lost, doubled or swapped.

What is tried runs in ``storm_child.py``: one end on the main thread, where handlers run, the other in a thread.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import HELPERS

SCRIPT = HELPERS / "storm_child.py"

READS = ["dequeue", "next", "many", "nowait", "lease", "read", "broadcast", "mixed"]
WRITES = ["enqueue", "many", "nowait", "broadcast", "block", "mixed"]


def weather(end: str, how: str, codec: str, where: str, signals: int, native: bool = True) -> None:
    """Run one end through a storm."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), end, how, codec, where, str(signals)],
        env={**os.environ, "AIOSHM_NATIVE": "1" if native else "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{done.stdout} {done.stderr[-3000:]}"
    messages, interrupts = map(int, done.stdout.split())
    assert messages > 50
    assert interrupts > signals // 4


SHORT = [
    ("mixed", "raw", "local", True),
    ("mixed", "raw", "local", False),
    ("mixed", "msgpack", "remote", True),
]


@pytest.mark.parametrize(("how", "codec", "where", "native"), SHORT)
@pytest.mark.parametrize("end", ["reader", "writer"])
def test_short_storm_loses_nothing(end: str, how: str, codec: str, where: str, native: bool) -> None:
    weather(end, how, codec, where, 100, native)


BUSY = [("reader", "dequeue"), ("reader", "lease"), ("reader", "merge"), ("writer", "enqueue")]


@pytest.mark.parametrize(("end", "how"), BUSY)
def test_interrupts_in_a_busy_stream_lose_nothing(end: str, how: str) -> None:
    weather(end, how, "pickle", "local", 100)


LONG = [
    *(("reader", how, "pickle", "local", True) for how in READS),
    *(("writer", how, "raw", "local", True) for how in WRITES),
    *((end, "mixed", "pickle", "remote", True) for end in ("reader", "writer")),
    *((end, "mixed", "slow", "local", True) for end in ("reader", "writer")),
    *((end, how, "pickle", "wide", True) for end, how in BUSY),
]


@pytest.mark.slow
@pytest.mark.parametrize(("end", "how", "codec", "where", "native"), LONG)
def test_long_storm_loses_nothing(end: str, how: str, codec: str, where: str, native: bool) -> None:
    weather(end, how, codec, where, 400, native)
