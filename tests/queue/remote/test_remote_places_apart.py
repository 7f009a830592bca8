"""Readers on another host that are killed and replaced, where the machine allows network namespaces."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from nursery import nursery, runs_of
from support import HELPERS, eventually
from two_hosts import two_hosts

KILLS = 8
WINDOW = 200  # of the writer in places_child.py
MOST_BETWEEN = 40


def test_readers_killed_and_replaced_under_traffic_lose_one_message_each_at_most(tmp_path: Path) -> None:
    chance = random.Random(KILLS)
    stop = tmp_path / "stop"
    with two_hosts() as hosts:
        arguments = ["write", hosts.addresses[0], "1.0", "hold", str(stop)]
        command = [*hosts.enter(0), sys.executable, "-W", "error", str(HELPERS / "places_child.py"), *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            try:
                assert writer.stdout is not None
                with nursery(writer.stdout.readline(), 0, tmp_path / "journal", hosts.enter(1)) as readers:
                    pid = readers.start()
                    eventually(readers.count, "traffic")
                    for _ in range(KILLS):
                        wanted = readers.count() + chance.randrange(MOST_BETWEEN)
                        eventually(lambda wanted=wanted: readers.count() >= wanted, f"traffic up to message {wanted}")
                        os.kill(pid, signal.SIGKILL)
                        pid = readers.start()  # before the writer can have noticed
                    wanted = readers.count() + 1
                    eventually(lambda: readers.count() >= wanted, "traffic to the last reader")
                    stop.touch()
                    sent = int(writer.communicate(timeout=30)[0])
                    eventually(lambda: readers.lines()[-1][1] == sent - 1, "the last message")
                    runs = runs_of(readers.lines())
            finally:
                writer.kill()
    following = 0
    for run in runs:
        assert run[0] <= following + 1 + KILLS + 1 - len(runs), "at most one message is lost for each death"
        assert following - run[0] <= WINDOW, "acknowledged messages came again"
        following = max(following, run[-1] + 1)
    lost = set(range(sent)) - {number for run in runs for number in run}
    assert len(lost) <= KILLS, sorted(lost)
    assert len(runs) > KILLS // 2, "under traffic"
