"""Each benchmark runs, reports what it should, and ends its processes; how fast anything is, is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
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


def run(benchmark: str, *arguments: str, loop: str = "uvloop") -> Any:
    """Run a benchmark; return its report, whose form is checked."""
    report = json.loads(completed(benchmark, "--json", "-", "--loop", loop, *arguments).stdout)
    assert report["failures"] == []
    assert report["benchmark"] == benchmark
    assert report["settings"].items() >= {"repeat": 1, "seconds": 0.05, "quick": True}.items()
    for key in ["cpu", "usable_cpus", "system", "python", "loop", "aioshm", "pyzmq", "libzmq", "uvloop", "numpy"]:
        assert report["machine"][key]
    assert report["machine"]["loop"] == loop
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


@pytest.mark.slow
def test_engine_roundtrip() -> None:
    report = run("engine_roundtrip", loop="asyncio")
    prompts = {"16 tokens", "4,000 tokens"}
    names = ("aioshm", "zmq.asyncio")
    stamps = {("stamps, a request to an engine", "aioshm", 1)}
    assert measured(report) == {(prompt, name, 1) for prompt in prompts for name in names} | stamps
    assert [promise["bound"] for promise in report["promises"]] == [1.01, 1.15, 1.15]


@pytest.mark.slow
def test_workers() -> None:
    report = run("workers")
    cases = {(f"step, {n} worker{'s' * (n > 1)}", n) for n in (1, 2)}
    stamps = {("stamps, a step of a WorkerGroup", "aioshm", 1)}
    assert measured(report) == {(case, name, n) for case, n in cases for name in ("aioshm", "mp.Pipe")} | stamps
    p50 = {
        found["contestant"]: found["figures"]["p50_us"]["median"]
        for found in report["results"]
        if "step, 2" in found["case"]
    }
    [of_stamps, promise] = report["promises"]
    assert of_stamps["bound"] == 1.01
    assert promise["text"].startswith("a step of a WorkerGroup with 2 workers")
    assert promise["bound"] == 1
    assert promise["measured"] == pytest.approx(p50["aioshm"] / p50["mp.Pipe"])


@pytest.mark.slow
def test_events_publish() -> None:
    report = run("events_publish", loop="asyncio")
    contestants = {"ZmqEventPublisher", "ThreadedEventPublisher", "queue + thread + PUB"}
    assert measured(report) == {(load, name, 1) for load in ("burst", "decode loop") for name in contestants}
    assert len(report["promises"]) == 2


def test_throughput() -> None:
    report = run("throughput", loop="asyncio")
    rivals = ("aioshm", "zmq.asyncio", "mp.Queue", "mp.Pipe")
    assert measured(report) == {(size, rival, 1) for size in ("small dict", "1 MiB") for rival in rivals}
    assert all(result["figures"]["messages_per_s"]["median"] > 0 for result in report["results"])


@pytest.mark.slow
def test_observe() -> None:
    report = run("observe")
    parts = {"nobody looks", "nobody looks, too", "looked at, ten times a second", "looked at, once a second"}
    assert measured(report) == {(part, "aioshm", 1) for part in parts}
    figures = {result["case"]: result["figures"] for result in report["results"]}
    assert figures["looked at, once a second"]["scraped_lines"]["median"] > 20
    quiet, often = (
        figures[case]["observers_cpu_percent"] for case in ("nobody looks", "looked at, ten times a second")
    )
    assert quiet["median"] < often["median"], "they look in some parts, and are stopped in the others"
    assert figures["nobody looks"]["messages_per_s"]["max"] > 0
    assert len(report["promises"]) == 1
    assert any("at one look a second" in remark for remark in report["remarks"])


@pytest.mark.slow
def test_churn() -> None:
    report = run("churn", loop="asyncio")
    assert measured(report) == {("one comes and one is killed every 50 ms", "aioshm", READERS)}
    [result] = report["results"]
    figures = {name: figure["median"] for name, figure in result["figures"].items()}
    assert 0 < figures["pause_p50_us"] <= figures["pause_p99_us"]
    assert 0 < figures["join_p50_ms"] <= figures["join_p99_ms"]
    assert figures["noticed_p99_ms"] > 0, "each death was noticed"
    assert len(report["promises"]) == 2


@pytest.mark.slow
def test_defaults() -> None:
    report = run("defaults", "--only", "dict")
    names = {name for _, name, _ in measured(report)} - {"vLLM"}
    assert names == {"aioshm", "aioshm blocking"}, "nothing is promised against the others"
    [blocking] = [promise for promise in report["promises"] if "aioshm blocking against aioshm" in promise["text"]]
    assert blocking["at_least"]
    assert blocking["kept"] == (blocking["measured"] >= blocking["bound"])


@pytest.mark.slow
def test_compare_streams_and_round_trips_as_json() -> None:
    names = ["aioshm", "aioshm blocking", "zmq.asyncio", "pyzmq"]
    report = run("compare", "--only", "dict", "pingpong", "--contestants", *names)
    assert measured(report) == {(case, name, 1) for case in ("small dict", "64 B ping-pong") for name in names}
    for result in report["results"]:
        assert all(figure["median"] > 0 for figure in result["figures"].values())
    [promise] = report["promises"]
    assert promise["text"] == "small dict: messages/s of aioshm blocking against aioshm (at least 0.95x)"
    assert "not measured: small dict: messages/s of aioshm against vLLM (at least 7x)" in report["remarks"]


@pytest.mark.slow
def test_compare_arrays_that_are_loaned_leases_and_memory() -> None:
    report = run("compare", "--only", "loaned", "lease-1m", "memory")
    assert {("1 MiB tensor that waits", "aioshm leased", 1), ("16 MiB, loaned", "aioshm loaned", 1)} <= measured(report)
    kept = {promise["text"]: promise["kept"] for promise in report["promises"]}
    [copied] = [text for text in kept if "bytes copied of each" in text]
    [resident] = [text for text in kept if "memory of the ring" in text]
    assert kept[copied]
    assert kept[resident]


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
