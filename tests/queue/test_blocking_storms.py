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


@pytest.mark.parametrize("end", ["reader", "writer"])
@pytest.mark.parametrize("codec", ["pickle", "raw"])
def test_a_short_storm(end: str, codec: str) -> None:
    weather(end, "mixed", codec, "local", 150)


@pytest.mark.parametrize("end", ["reader", "writer"])
def test_a_short_storm_without_the_native_core(end: str) -> None:
    weather(end, "mixed", "raw", "local", 100, native=False)


@pytest.mark.parametrize("end", ["reader", "writer"])
def test_a_short_storm_over_the_network(end: str) -> None:
    weather(end, "mixed", "msgpack", "remote", 100)


@pytest.mark.slow
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("how", READS)
def test_storms_while_reading(how: str, native: bool) -> None:
    weather("reader", how, "pickle", "local", 500, native)


@pytest.mark.slow
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("how", WRITES)
def test_storms_while_writing(how: str, native: bool) -> None:
    weather("writer", how, "raw", "local", 500, native)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["pickle", "msgpack", "raw", "slow"])
@pytest.mark.parametrize("where", ["local", "remote"])
@pytest.mark.parametrize("end", ["reader", "writer"])
def test_storms_with_every_codec(end: str, where: str, codec: str) -> None:
    weather(end, "mixed", codec, where, 300)


BUSY = [("reader", "dequeue"), ("reader", "lease"), ("reader", "merge"), ("writer", "enqueue")]


@pytest.mark.parametrize(("end", "how"), BUSY)
def test_interrupts_in_a_busy_stream_lose_nothing(end: str, how: str) -> None:
    weather(end, how, "pickle", "local", 100)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["local", "wide"])
@pytest.mark.parametrize(("end", "how"), BUSY)
def test_two_thousand_interrupts_in_a_busy_stream_lose_nothing(end: str, how: str, where: str) -> None:
    weather(end, how, "pickle", where, 2000)
