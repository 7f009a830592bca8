"""Each benchmark runs, reports what it should, and ends its processes; how fast anything is, is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import eventually

from benchmarks.churn import READERS

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 100


def command(benchmark: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{benchmark}", *arguments]


def completed(benchmark: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(benchmark, "--quick", *arguments), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    return done


def run(benchmark: str, *arguments: str) -> Any:
    """Run a benchmark; return its report, whose form is checked."""
    report = json.loads(completed(benchmark, "--json", "-", *arguments).stdout)
    assert report["failures"] == []
    assert report["benchmark"] == benchmark
    assert report["settings"].items() >= {"repeat": 1, "seconds": 0.05, "quick": True}.items()
    for key in ["cpu", "usable_cpus", "system", "python", "loop", "aioshm", "pyzmq", "libzmq", "uvloop", "numpy"]:
        assert report["machine"][key]
    for result in report["results"]:
        assert result["figures"]
        for figure in result["figures"].values():
            assert len(figure["repetitions"]) == 1
            assert figure["min"] <= figure["median"] <= figure["max"]
    for promise in report["promises"]:
        assert isinstance(promise["kept"], bool)
        assert promise.keys() == {"text", "measured", "unit", "bound", "at_least", "spread", "kept"}
    return report


def measured(report: Any) -> set[tuple[str, str, int]]:
    return {(result["case"], result["contestant"], result["readers"]) for result in report["results"]}


def crossed(cases: Iterable[str], contestants: Iterable[str], readers: int = 1) -> set[tuple[str, str, int]]:
    return {(case, contestant, readers) for case in cases for contestant in contestants}


LOOKS = ["nobody looks", "nobody looks, too", "looked at, ten times a second", "looked at, once a second"]
COMPARED = ["aioshm", "aioshm blocking", "zmq.asyncio", "pyzmq"]
STEPS = {(f"step, {n} worker{'s' * (n > 1)}", name, n) for n in (1, 2) for name in ("aioshm", "mp.Pipe")}
MEASURED: dict[str, set[tuple[str, str, int]]] = {
    "throughput --loop asyncio": crossed(["small dict", "1 MiB"], ["aioshm", "zmq.asyncio", "mp.Queue", "mp.Pipe"]),
    "engine_roundtrip --loop asyncio": crossed(["16 tokens", "4,000 tokens"], ["aioshm", "zmq.asyncio"])
    | crossed(["stamps, a request to an engine"], ["aioshm"]),
    "workers": STEPS | crossed(["stamps, a step of a WorkerGroup"], ["aioshm"]),
    "events_publish --loop asyncio": crossed(
        ["burst", "decode loop"], ["ZmqEventPublisher", "ThreadedEventPublisher", "queue + thread + PUB"]
    ),
    "observe": crossed(LOOKS, ["aioshm"]),
    "churn --loop asyncio": crossed(["one comes and one is killed every 50 ms"], ["aioshm"], READERS),
    "compare --only dict pingpong --contestants": crossed(["small dict", "64 B ping-pong"], COMPARED),
}
"""What each command measures, which begins with the name of the benchmark."""

QUICK = {"throughput --loop asyncio"}


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=[] if line in QUICK else pytest.mark.slow) for line in MEASURED]
)
def test_benchmark_measures_each_contestant_and_holds_its_promises_against_figures(line: str) -> None:
    benchmark, *arguments = line.split()
    if arguments[-1:] == ["--contestants"]:
        arguments += COMPARED
    report = run(benchmark, *arguments)
    assert measured(report) == MEASURED[line]
    assert bool(report["promises"]) is (benchmark != "throughput")
    for result in report["results"]:
        assert all(figure["median"] >= 0 for figure in result["figures"].values())


@pytest.mark.slow
def test_defaults_and_compare_measure_a_selection() -> None:
    report = run("defaults", "--only", "dict")
    names = {name for _, name, _ in measured(report)} - {"vLLM"}
    assert names == {"aioshm", "aioshm blocking"}, "nothing is promised against the others"
    report = run("compare", "--only", "loaned", "lease-1m", "memory")
    assert {("1 MiB tensor that waits", "aioshm leased", 1), ("16 MiB, loaned", "aioshm loaned", 1)} <= measured(report)
    kept = {promise["text"]: promise["kept"] for promise in report["promises"]}
    assert [kept[text] for text in kept if "bytes copied of each" in text or "memory of the ring" in text] == [True] * 2


@pytest.mark.slow
def test_compare_prints_a_table_a_file_and_who_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "figures.json"
    names = ["aioshm", "mp.Queue", "mp.Pipe", "iceoryx2 polling"]
    done = completed("compare", "--only", "fanout-2", "5ms", "--contestants", *names, "--json", str(path))
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


def test_its_processes_end_with_it() -> None:
    arguments = ["--seconds", "30", "--contestants", "aioshm", "mp.Pipe"]
    with subprocess.Popen(
        command("throughput", *arguments), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            parent = psutil.Process(process.pid)
            expected = 2 * 2 + 2  # multiprocessing's resource tracker, and what the others are forked from
            eventually(
                lambda: len(parent.children(recursive=True)) == expected, "the start of every process", TIMEOUT_S
            )
            children = parent.children(recursive=True)
            process.kill()
            process.wait(TIMEOUT_S)
            _, alive = psutil.wait_procs(children, TIMEOUT_S)
            assert not alive
        finally:
            process.kill()
