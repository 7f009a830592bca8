"""A benchmark that is told to end ends its other processes first."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BENCHMARK = """
import asyncio, sys
from benchmarks.framework.harness import main

async def run(settings, report):
    try:
        print("began", flush=True)
        await asyncio.sleep(3600)
    finally:
        print("ending", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print("ended", flush=True)

sys.exit(main("example", None, run, repeat=1, seconds=1))
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_second_sigterm_does_not_break_off_what_the_first_one_began(loop: str) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", BENCHMARK, "--loop", loop]
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "began\n"
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "ending\n"
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate("go on\n", timeout=100)
        finally:
            process.kill()
    assert output == "ended\n"
    assert errors == ""
    assert process.returncode == 128 + signal.SIGTERM
