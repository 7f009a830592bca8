"""A remote reader that is killed again and again under traffic, its place held.

``python tests/queue/remote_storm.py KILLS [TIMEOUT]``, with ``tests`` on the path, says what came of it on two hosts in
network namespaces, and how long it took: mostly waiting, for a quarter of the timeout each, whether a reader out of
reach connects again.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from nursery import Nursery, nursery, runs_of
from support import eventually

WRITER = Path(__file__).with_name("places_child.py")
WINDOW = 200  # of the writer in that file
MOST_BETWEEN = 40
TIMEOUT_S = 1.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Storm:
    """What came of it.

    Attributes:
        kills: How many readers were killed.
        received: How many of them, and the last one, had received something.
        sent: How many messages were sent.
        lost: Messages that nobody wrote down: what one had taken when it was killed, at most one each.
        again: How many messages came again, which the writer had not been told of; and at most after one death.
        took_s: How long it took.
    """

    kills: int
    received: int
    sent: int
    lost: int
    again: tuple[int, int]
    took_s: float


def storm(
    kills: int,
    folder: Path,
    address: str = LOOPBACK,
    inside: tuple[list[str], list[str]] = ([], []),
    timeout_s: float = TIMEOUT_S,
) -> Storm:
    """Kill so many readers at random points under traffic, each time replaced; check what each received.

    Args:
        kills: How many.
        folder: Where what they received is written down.
        address: The writer's.
        inside: What runs the command that follows it on the writer's host, and on the readers'.
        timeout_s: The queue's ``remote_timeout``.
    """
    chance, journal, stop = random.Random(kills), folder / "journal", folder / "stop"
    began = monotonic()
    with ExitStack() as stack:
        arguments = ["write", address, str(timeout_s), "hold", str(stop)]
        command = [*inside[0], sys.executable, "-W", "error", str(WRITER), *arguments]
        writer = stack.enter_context(_ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
        assert writer.stdout is not None
        readers: Nursery = stack.enter_context(nursery(writer.stdout.readline(), 0, journal, inside[1]))
        pid = readers.start()
        eventually(readers.count, "traffic")
        for _ in range(kills):
            wanted = readers.count() + chance.randrange(MOST_BETWEEN)
            eventually(lambda wanted=wanted: readers.count() >= wanted, f"traffic up to message {wanted}")
            os.kill(pid, signal.SIGKILL)
            pid = readers.start()  # before anybody can have noticed
        wanted = readers.count() + 1
        eventually(lambda: readers.count() >= wanted, "traffic to the last one")
        stop.touch()
        sent = int(writer.communicate(timeout=30)[0])
        eventually(lambda: readers.lines()[-1][1] == sent - 1, "the last message")
    took_s, runs = monotonic() - began, runs_of(readers.lines())
    again, following, silent = [0], 0, kills + 1 - len(runs)
    for run in runs:
        assert run[0] <= following + 1 + silent, f"at most one for each death before message {run[0]}"
        again.append(max(0, following - run[0]))
        following = max(following, run[-1] + 1)
    lost = set(range(sent)) - {number for run in runs for number in run}
    assert len(lost) <= kills, f"at most one each of {kills}: {sorted(lost)}"
    assert max(again) <= WINDOW, "what the writer had been told of came again"
    return Storm(kills, len(runs), sent, len(lost), (sum(again), max(again)), took_s)


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    with process:
        try:
            yield process
        finally:
            process.kill()


if __name__ == "__main__":
    from two_hosts import two_hosts

    with tempfile.TemporaryDirectory() as folder, two_hosts() as hosts:
        timeout_s = float(sys.argv[2]) if len(sys.argv) > 2 else TIMEOUT_S
        print(storm(int(sys.argv[1]), Path(folder), hosts.addresses[0], (hosts.enter(0), hosts.enter(1)), timeout_s))
