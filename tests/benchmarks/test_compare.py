"""The comparison runs with whatever is installed, says what is missing, and ends its processes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60
HERE = ["aioshm", "aioshm blocking", "zmq.asyncio", "pyzmq"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.compare", "--quick", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done


def measured(report: Any) -> set[tuple[str, str, int]]:
    return {(result["case"], result["contestant"], result["readers"]) for result in report["results"]}


@pytest.mark.slow
def test_streams_and_round_trips_as_json() -> None:
    done = run("--only", "dict", "pingpong", "--contestants", *HERE, "--json", "-")
    report = json.loads(done.stdout)
    assert report["failures"] == []
    assert measured(report) == {(case, name, 1) for case in ("small dict", "64 B ping-pong") for name in HERE}
    for result in report["results"]:
        assert all(figure["median"] > 0 for figure in result["figures"].values())
    [promise] = report["promises"]
    assert promise["text"] == "small dict: messages/s of aioshm blocking against aioshm (at least 0.95x)"
    assert "not measured: small dict: messages/s of aioshm against vLLM (at least 7x)" in report["remarks"]


@pytest.mark.slow
def test_arrays_that_are_loaned_leases_and_memory() -> None:
    report = json.loads(run("--only", "loaned", "lease-1m", "memory", "--json", "-").stdout)
    assert report["failures"] == []
    assert {("1 MiB tensor that waits", "aioshm leased", 1), ("16 MiB, loaned", "aioshm loaned", 1)} <= measured(report)
    kept = {promise["text"]: promise["kept"] for promise in report["promises"]}
    [copied] = [text for text in kept if "bytes copied of each" in text]
    [resident] = [text for text in kept if "memory of the ring" in text]
    assert kept[copied]
    assert kept[resident]


@pytest.mark.slow
def test_a_table_a_file_and_who_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "figures.json"
    names = ["aioshm", "mp.Queue", "mp.Pipe", "iceoryx2 polling"]
    done = run("--only", "fanout-2", "5ms", "--contestants", *names, "--json", str(path))
    report = json.loads(path.read_text())
    assert str(path) in done.stderr
    assert any(row.split()[:4] == ["small", "dict", "2", "aioshm"] for row in done.stdout.splitlines())
    assert "every 5 ms" in done.stdout
    assert "reader cpu, %" in done.stdout
    assert "not measured: every 5 ms: p50 of aioshm against vLLM (at most 1x)" in done.stdout
    assert {("small dict", "aioshm", 2), ("every 5 ms", "mp.Pipe", 1)} <= measured(report)
    if find_spec("iceoryx2") is None:
        hint = "missing: iceoryx2 polling (iceoryx2 is not installed; `make bench-rivals` gets it)"
        assert hint in done.stderr
        assert hint in report["settings"]["missing"]
