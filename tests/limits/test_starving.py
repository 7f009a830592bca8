"""Every number of free descriptors and of free threads, for every kind of end; see ``starving.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import pytest
from starved_kinds import KINDS

HERE = Path(__file__).parent
STARTED = {"coordinator", "manager", "worker-group"}
"""Kinds that start processes, which may lack descriptors, too, and take a second."""

NAMED_S = 8.0  # most of it is the limit for the start of processes; the others have a timeout of a second


class Starving:
    """A running ``starving.py``: it imports everything once, for all tests of this file."""

    def __init__(self, complaints: IO[str]) -> None:
        self._complaints = complaints
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "starving.py")],
            env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        )

    def __call__(self, kind: str, resource: str, first: int, last: int, step: int = 1) -> list[dict[str, Any]]:
        """Return what came of these numbers, after a look at what holds for every kind and number."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        already = self._complaints.seek(0, os.SEEK_END)
        print(kind, resource, first, last, step, file=self._process.stdin, flush=True)
        lines = []
        while isinstance(line := json.loads(self._process.stdout.readline() or "-1"), dict):
            lines.append(line)
        self._complaints.seek(already)  # which it has moved by writing
        complaints = self._complaints.read()[-4000:]
        assert line == 0, f"{line} lanes failed, or it ended:\n{complaints}"
        for line in lines:
            assert "ended" not in line, f"{line}\n{complaints}"
            assert not line["behind"], line
            assert line["slow"] < NAMED_S, line
            for error in line["errors"]:
                # Where a process that was started lacks something, that one says so, in its standard error.
                assert "LimitReached" in error or (kind in STARTED and "AioshmError" in error), line
        return sorted(lines, key=lambda line: line["left"])

    def close(self) -> None:
        with self._process:
            self._process.kill()


@pytest.fixture(scope="module")
def starve() -> Iterator[Starving]:
    with tempfile.TemporaryFile("a+") as complaints, closing(Starving(complaints)) as starving:
        yield starving


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("local-writer", 5),
        ("local-writer", 6),
        ("local-reader", 3),
        ("overflow-writer", 9),
        ("overflow-reader", 7),
        ("remote-reader", 8),
        ("remote-reader", 9),
        ("remote-writer", 14),
        ("publisher", 9),
        ("subscriber", 4),
        ("front-end", 12),
        ("manager", 9),
        ("worker-group", 40),
    ],
)
def test_few_descriptors(starve: Starving, kind: str, number: int) -> None:
    (line,) = starve(kind, "descriptors", number, number)
    assert line["errors"]
    assert "RLIMIT_NOFILE" in line["errors"][0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_descriptors(starve: Starving, kind: str) -> None:
    last, step = (48, 4) if kind in STARTED else (40, 1)
    lines = starve(kind, "descriptors", 0, last, step)
    assert lines[0]["errors"], "nothing was lacking"
    assert not lines[-1]["errors"], "it was never enough"
    assert {line["left"] for line in lines} == set(range(0, last + 1, step))


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the limit of threads is a user's: another one is needed")


@needs_root
@pytest.mark.parametrize("number", [0, 2])
def test_few_threads(starve: Starving, number: int) -> None:
    (line,) = starve("remote-writer", "threads", number, number)
    assert line["errors"]
    assert "needs another thread" in line["errors"][0]


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in STARTED])
def test_every_number_of_threads(starve: Starving, kind: str) -> None:
    lines = starve(kind, "threads", 0, 12)
    assert not lines[-1]["errors"], "it was never enough"
