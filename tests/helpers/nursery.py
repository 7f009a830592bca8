"""Readers that are started one after the other, in the place of one that was killed, and what each wrote down."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

SCRIPT = Path(__file__).with_name("journal_child.py")


class Nursery:
    """A running ``journal_child.py``."""

    def __init__(self, process: subprocess.Popen[str], journal: Path) -> None:
        self._process = process
        self._journal = journal

    def start(self) -> int:
        """Start a reader; return its process id."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def lines(self) -> list[tuple[int, int]]:
        """Return what was written down: which process, and what it received."""
        if not self._journal.exists():
            return []
        whole = self._journal.read_text().rpartition("\n")[0]
        return [(int(pid), int(number)) for pid, number in (line.split() for line in whole.splitlines())]

    def count(self) -> int:
        """Return how many messages were written down."""
        return self._journal.read_bytes().count(b"\n") if self._journal.exists() else 0


@contextmanager
def nursery(handle: str, rank: int, journal: Path) -> Iterator[Nursery]:
    """Give a nursery of readers of one rank to the block, who write down in a journal what they receive."""
    command = [sys.executable, str(SCRIPT), handle, str(rank), str(journal)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Nursery(process, journal)
        finally:
            process.kill()


def runs_of(lines: list[tuple[int, int]]) -> list[list[int]]:
    """Return what each reader received; they come one after the other, and no run has a hole or a message twice."""
    runs = [(pid, [number for _, number in run]) for pid, run in groupby(lines, lambda line: line[0])]
    assert len({pid for pid, _ in runs}) == len(runs), "they come one after the other"
    for pid, run in runs:
        assert run == list(range(run[0], run[-1] + 1)), f"a hole within what {pid} received"
    return [run for _, run in runs]
