"""Every number of free descriptors and of free threads, for every kind of end; see ``helpers/starving.py``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from scenes import SCENES
from support import HELPERS

STARTS_PROCESSES = [kind for kind, scene in SCENES.items() if scene.starts_processes]
OTHERS = [kind for kind in SCENES if kind not in STARTS_PROCESSES]
NAMED_S = 25.0  # the limit for the start of processes on a busy machine; the others have timeouts of seconds
PATHS = ":".join(map(str, (HELPERS.parents[1], HELPERS.parent, HELPERS)))

UNNAMED = {"group": 2, "overflow-zmq": 2, "events": 4, "threaded-events": 4}
"""How many numbers may end without the name of the limit, where both ends are in one process and one takes a descriptor
that the other needs to accept it: libzmq drops the connection, or aborts the process (overflow over ZeroMQ).
"""


def starve(resource: str, numbers: dict[str, Sequence[int]]) -> dict[str, list[dict[str, Any]]]:
    """Return the results of each kind, after checks that hold for every kind and number."""
    done = subprocess.run(
        [sys.executable, str(HELPERS / "starving.py"), resource, json.dumps({**numbers}, default=list)],
        env=os.environ | {"PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        timeout=280,
    )
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    unnamed: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in done.stdout.splitlines():
        result = json.loads(line)
        kind = result["kind"]
        results[kind].append(result)
        complaints = done.stderr[-4000:]
        if result["ended"] == -signal.SIGABRT and kind == "overflow-zmq":
            unnamed[kind].append(result)
            continue
        assert result["ended"] == 0, f"{result}\n{complaints}"
        assert not result["behind"], result
        assert result["slow_s"] < NAMED_S, result
        for error in result["errors"]:
            if kind not in STARTS_PROCESSES and not error.startswith("LimitReached") and "RLIMIT" not in error:
                unnamed[kind].append(result)
    assert done.returncode == 0, done.stderr[-4000:]
    assert {*results} == {*numbers}
    for kind, found in unnamed.items():
        assert len(found) <= UNNAMED.get(kind, 0), (kind, found)
    return results


def test_few_descriptors() -> None:
    results = starve("descriptors", {kind: [3, 8] for kind in OTHERS})
    for kind, found in results.items():
        assert "RLIMIT_NOFILE" in found[0]["errors"][0], (kind, found)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kinds", "numbers"), [(OTHERS, range(70)), (STARTS_PROCESSES, range(0, 64, 8))], ids=["ends", "processes"]
)
def test_every_number_of_descriptors(kinds: list[str], numbers: Sequence[int]) -> None:
    for found in starve("descriptors", dict.fromkeys(kinds, numbers)).values():
        assert found[0]["errors"], "nothing was lacking"
        assert not found[-1]["errors"], f"it was never enough: {found[-1]}"


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the limit of threads is a user's: another one is needed")


@needs_root
def test_few_threads() -> None:
    (found,) = starve("threads", {"remote": [0]}).values()
    assert "needs another thread" in found[0]["errors"][0]


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_number_of_threads() -> None:
    for found in starve("threads", dict.fromkeys(OTHERS, range(16))).values():
        assert not found[-1]["errors"], f"it was never enough: {found[-1]}"
