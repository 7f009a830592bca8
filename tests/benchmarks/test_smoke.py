"""Each benchmark runs, reports what it should, and ends its processes; how fast anything is, is not looked at."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest
from support import eventually

ReportOn: TypeAlias = Callable[[str, str], Any]

ROOT = Path(__file__).parents[2]
RIVALS = {"aioshm", "zmq.asyncio", "mp.Queue", "mp.Pipe"}
SIZES = {"small dict", "1 MiB"}
TIMEOUT_S = 100

both_loops = pytest.mark.parametrize("loop_name", ["asyncio", pytest.param("uvloop", marks=pytest.mark.slow)])


def command(benchmark: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{benchmark}", *arguments]


def run(benchmark: str, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        command(benchmark, "--quick", *arguments), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def run_json(benchmark: str, *arguments: str) -> Any:
    report = json.loads(run(benchmark, "--json", *arguments))
    assert report["benchmark"] == benchmark
    assert report["settings"] == {"repeat": 1, "seconds": 0.05, "quick": True}
    for key in ["cpu", "usable_cpus", "system", "python", "loop", "aioshm", "pyzmq", "libzmq", "uvloop", "numpy"]:
        assert report["machine"][key]
    for result in report["results"]:
        assert result["figures"]
        for figure in result["figures"].values():
            assert len(figure["repetitions"]) == 1
            assert figure["min"] <= figure["median"] <= figure["max"]
    for promise in report["promises"]:
        assert isinstance(promise["kept"], bool)
        assert promise.keys() == {"promise", "measured", "unit", "bound", "at_least", "kept"}
    return report


@pytest.fixture
def report_on() -> ReportOn:
    """Return the report of a benchmark on a loop."""
    return lambda benchmark, loop_name: run_json(benchmark, "--loop", loop_name)


def measured(report: Any) -> set[tuple[str, str, int]]:
    return {(result["case"], result["contestant"], result["readers"]) for result in report["results"]}


@pytest.mark.slow
@both_loops
def test_engine_roundtrip(report_on: ReportOn, loop_name: str) -> None:
    report = report_on("engine_roundtrip", loop_name)
    prompts = {"16 tokens", "4,000 tokens"}
    names = ("aioshm", "aioshm, blocking", "zmq.asyncio", "aioshm, TCP, CURVE", "aioshm, TCP, secure=False")
    assert measured(report) == {(prompt, name, 1) for prompt in prompts for name in names}
    assert len(report["promises"]) == 2


@pytest.mark.slow
@both_loops
def test_remote(report_on: ReportOn, loop_name: str) -> None:
    report = report_on("remote", loop_name)
    contestants = {"aioshm, secure=False", "aioshm, CURVE", "aioshm leased, secure=False"}
    contestants |= {"bare zmq.asyncio", "bare zmq.asyncio, copy=False"}
    assert measured(report) == {(size, name, 1) for size in ("4 KiB", "4 MiB") for name in contestants}
    assert len(report["promises"]) == 4
    assert [remark.split()[0] for remark in report["remarks"]] == ["CURVE", "CURVE"]


@pytest.mark.slow
@both_loops
def test_startup(report_on: ReportOn, loop_name: str) -> None:
    report = report_on("startup", loop_name)
    assert measured(report) == {("2 engines", name, 1) for name in ("aioshm", "multiprocessing")}
    assert len(report["promises"]) == 1


@pytest.mark.slow
@both_loops
def test_workers(report_on: ReportOn, loop_name: str) -> None:
    report = report_on("workers", loop_name)
    cases = {(f"{what}, {n} worker{'s' * (n > 1)}", n) for what in ("step", "megabyte") for n in (1, 2)}
    assert measured(report) == {(case, name, n) for case, n in cases for name in ("aioshm", "mp.Pipe")}


@pytest.mark.slow
@both_loops
def test_events_publish(report_on: ReportOn, loop_name: str) -> None:
    report = report_on("events_publish", loop_name)
    cases = {
        f"{form}, {load}" for form in ("arrays", "maps") for load in ("burst", "decode loop", "decode loop, 100 us")
    }
    contestants = {"ZmqEventPublisher", "ThreadedEventPublisher", "queue + thread + PUB", "the same, same bytes"}
    assert measured(report) == {(case, name, 1) for case in cases for name in contestants}
    assert len(report["promises"]) == 14


@pytest.mark.slow
@both_loops
def test_events_replay(report_on: ReportOn, loop_name: str) -> None:
    report = report_on("events_replay", loop_name)
    assert measured(report) == {("1,000 batches/s", name, 1) for name in ("nobody replays", "4 slow clients replay")}
    assert len(report["promises"]) == 1


@pytest.mark.slow
@both_loops
def test_strangers(report_on: ReportOn, loop_name: str) -> None:
    report = report_on("strangers", loop_name)
    assert measured(report) == {("4 KiB", "quiet", 1), ("4 KiB", "with strangers", 1)}
    assert len(report["promises"]) == 1
    assert "'received': 0" in report["remarks"][0]


@both_loops
def test_throughput(report_on: ReportOn, loop_name: str) -> None:
    report = report_on("throughput", loop_name)
    assert report["machine"]["loop"] == loop_name
    assert measured(report) == {(size, rival, 1) for size in SIZES for rival in RIVALS}
    assert all(result["figures"]["messages_per_s"]["median"] > 0 for result in report["results"])
    assert len(report["promises"]) == 1


@pytest.mark.slow
def test_fanout() -> None:
    report = run_json("fanout")
    assert measured(report) == {(size, rival, n) for size in SIZES for rival in RIVALS for n in (1, 2)}


@pytest.mark.slow
@both_loops
def test_latency(report_on: ReportOn, loop_name: str) -> None:
    report = report_on("latency", loop_name)
    cases = {"64 B", "parking reader"} | SIZES
    assert measured(report) == {(case, rival, 1) for case in cases for rival in RIVALS}
    for result in report["results"]:
        figures = {name: figure["median"] for name, figure in result["figures"].items()}
        assert 0 < figures["p50_us"] <= figures["p99_us"] <= figures["max_us"]
    assert len(report["promises"]) == 2


@pytest.mark.slow
def test_idle() -> None:
    report = run_json("idle")
    cases = {"idle", "idle after a burst"}
    assert measured(report) == {(case, rival, 1) for case in cases for rival in RIVALS}
    assert len(report["promises"]) == 4


@pytest.mark.slow
def test_fairness() -> None:
    report = run_json("fairness")
    assert measured(report) == {
        ("idle loop", "-", 1),
        ("busy loop, no queue", "-", 1),
        ("saturated reader", "aioshm", 1),
        ("saturated reader", "zmq.asyncio", 1),
        ("reader keeps up", "aioshm", 1),
        ("reader keeps up", "zmq.asyncio", 1),
    }
    assert len(report["promises"]) == 2


@pytest.mark.slow
@both_loops
def test_writer_cost(report_on: ReportOn, loop_name: str) -> None:
    report = report_on("writer_cost", loop_name)
    cases = {"claim, fill, commit", "enqueue"}
    assert measured(report) == {(case, "aioshm", n) for case in cases for n in (1, 4)}
    assert all(result["figures"]["us_per_message"]["median"] > 0 for result in report["results"])
    assert len(report["promises"]) == 2


@pytest.mark.slow
def test_memory() -> None:
    report = run_json("memory")
    cases = {case for case, _, _ in measured(report)}
    assert {"small dict, pickle", "64 B, raw"} <= cases
    assert measured(report) == {(case, f"aioshm {end}", 1) for case in cases for end in ("writer", "reader")}
    assert all(result["figures"]["rss_at_first_kib"]["median"] > 0 for result in report["results"])
    assert len(report["promises"]) == 2


def test_a_table_for_people_and_only_the_rivals_asked_for() -> None:
    text = run("throughput", "--rivals", "aioshm", "zmq.asyncio")
    assert "zmq.asyncio" in text
    assert "mp.Pipe" not in text
    assert "against zmq.asyncio (at least 5x)" in text


@pytest.mark.parametrize(
    ("benchmark", "number"),
    [
        pytest.param("throughput", signal.SIGINT, marks=pytest.mark.slow),
        ("throughput", signal.SIGTERM),
        pytest.param("throughput", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("idle", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_its_processes_end_with_it(benchmark: str, number: signal.Signals) -> None:
    with subprocess.Popen(
        command(benchmark, "--seconds", "30"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            parent = psutil.Process(process.pid)
            expected = len(RIVALS) + 1  # multiprocessing's resource tracker
            eventually(lambda: len(parent.children()) == expected, "the start of every reader", TIMEOUT_S)
            children = parent.children(recursive=True)
            process.send_signal(number)
            process.wait(TIMEOUT_S)
            _, alive = psutil.wait_procs(children, TIMEOUT_S)
            assert not alive
        finally:
            process.kill()
