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
from support import HELPERS

HERE = Path(__file__).parent
STARTED = {"coordinator", "workers"}
"""Kinds that start processes, which may lack descriptors, too, and take a second."""

CONNECTED_LATER = {"overflow-zmq", "events", "threaded-events"}
"""Kinds whose ends libzmq connects when both are there: what one end has counted on may be the other's by then.

With two ends in one process, libzmq may abort then, or never connect. No check of aioshm can foresee that.
"""

NAMED_S = 8.0
STARTED_S = 18.0  # on a busy machine


def is_unnamed(line: dict[str, Any]) -> bool:
    return "ended" in line or any("LimitReached" not in error for error in line["errors"])


class Starving:
    """A running ``starving.py``: it imports everything once, for all tests of this file."""

    def __init__(self, complaints: IO[str]) -> None:
        self._complaints = complaints
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "starving.py")],
            env=os.environ | {"PYTHONPATH": f"{HERE.parents[1]}:{HERE.parent}:{HELPERS}"},
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
        named = max((line["left"] for line in lines if line.get("errors") and not is_unnamed(line)), default=-1)
        for line in lines:
            if kind in CONNECTED_LATER and is_unnamed(line) and line["left"] > named:
                continue
            assert "ended" not in line, f"{line}\n{complaints}"
            assert not line["behind"], line
            assert line["slow"] < (STARTED_S if kind in STARTED else NAMED_S), line
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
        ("local", 3),
        ("local", 6),
        ("local", 9),
        ("local", 12),
        ("overflow-zmq", 9),
        ("remote", 10),
        ("remote", 28),
        ("events", 20),
        ("engine", 20),
        ("workers", 9),
    ],
)
def test_few_descriptors(starve: Starving, kind: str, number: int) -> None:
    (line,) = starve(kind, "descriptors", number, number)
    assert line["errors"]
    assert "RLIMIT_NOFILE" in line["errors"][0]


def sweep(starve: Starving, kind: str, resource: str) -> None:
    """Try every number until eight in a row are enough, or every eighth one until four are."""
    step, block = (8, 4) if kind in STARTED else (1, 8)
    for first in range(0, 64, step * block):
        lines = starve(kind, resource, first, first + step * (block - 1), step)
        assert [line["left"] for line in lines] == [*range(first, first + step * block, step)]
        assert first or resource == "threads" or lines[0]["errors"], "nothing was lacking"
        if not any(line.get("errors", "ended") for line in lines):
            return
    assert not lines[-1].get("errors"), "it was never enough"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_descriptors(starve: Starving, kind: str) -> None:
    sweep(starve, kind, "descriptors")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the limit of threads is a user's: another one is needed")


@needs_root
@pytest.mark.parametrize("number", [0, 2])
def test_few_threads(starve: Starving, number: int) -> None:
    (line,) = starve("remote", "threads", number, number)
    assert line["errors"]
    assert "needs another thread" in line["errors"][0]


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in STARTED])
def test_every_number_of_threads(starve: Starving, kind: str) -> None:
    sweep(starve, kind, "threads")
