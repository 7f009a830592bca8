"""Each kind of stall is named: the process, and the line of the user's code."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planted import line_of
from planting import Planted
from support import eventually, until

from aioshm import MessageQueue
from aioshm.observe import find_queue, who
from aioshm.observe.suspects import Suspect
from aioshm.process.stacks import stacks_of


@pytest.fixture(scope="module")
def spy() -> None:
    """Skip tests with the reason if py-spy cannot read stacks."""
    child = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(100)"], stdout=-1)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        stacks, hint = stacks_of(child.pid)
        if not stacks:
            pytest.skip(hint)
    finally:
        child.kill()
        child.communicate()


def culprit(planted: Planted, pid: int) -> Suspect:
    """Return the suspect of this process, as soon as it is one; it is the only one, or the gravest."""
    found: list[Suspect] = []

    def is_named() -> bool:
        [report] = who(planted.name)
        found[:] = [suspect for suspect in report.suspects if suspect.grave]
        return bool(found) and found[0].pid == pid

    eventually(is_named, f"the verdict that pid {pid} is it")
    return found[0]


def check_line(suspect: Suspect, what: str) -> None:
    assert suspect.hint == ""
    assert suspect.line is not None
    assert (Path(suspect.line.file).name, suspect.line.line) == ("planted.py", line_of(what))


@pytest.mark.usefixtures("spy")
class TestStalls:
    def test_a_slow_reader(self, planted: Planted) -> None:
        _, _, reader = planted.queue("read", "read slowly")
        eventually(lambda: find_queue(planted.name).header.writer.parked)
        eventually(lambda: culprit(planted, reader.pid).kind == "slow")
        eventually(lambda: culprit(planted, reader.pid).hint == "", "a look at it while it works")
        suspect = culprit(planted, reader.pid)
        assert (suspect.side, suspect.rank) == ("reader", 1)
        assert "messages behind" in suspect.text
        check_line(suspect, "slow")

    def test_a_reader_whose_loop_is_blocked(self, planted: Planted) -> None:
        _, _, reader = planted.queue("read", "read and block")
        eventually(lambda: culprit(planted, reader.pid).kind == "blocked")  # it takes the first messages
        suspect = culprit(planted, reader.pid)
        assert (suspect.side, suspect.rank) == ("reader", 1)
        assert "took nothing in the last" in suspect.text
        check_line(suspect, "blocked")


async def test_absent_reader_is_named_and_nothing_is_left_open() -> None:
    async with MessageQueue(2, 2, name="half") as writer, MessageQueue.attach("half", 1):
        waiting = asyncio.create_task(writer.wait_until_ready())
        await until(lambda: writer.stats().readers == 1, "the second reader alone")
        before = os.listdir("/proc/self/fd")
        [report] = who("half", window_s=0.02)
        [suspect] = [each for each in report.suspects if each.kind == "absent"]
        assert (suspect.rank, suspect.pid, suspect.text) == (0, 0, "no process has attached yet")
        assert len(os.listdir("/proc/self/fd")) == len(before)
        waiting.cancel()
