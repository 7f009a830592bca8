"""The comparison runs with whatever is installed, says what is missing, and ends its processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.compare.cases import CPU_BOUNDS, SMALL
from benchmarks.compare.install_vllm import DEVICES, extract, pinned
from benchmarks.compare.measure import cadences
from benchmarks.compare.promises import PROMISES, hold
from benchmarks.framework.loops import Heard, Order
from benchmarks.framework.report import Report
from benchmarks.framework.stage import Stage

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60
HERE = ["aioshm", "aioshm blocking", "zmq.asyncio", "pyzmq"]

without_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is not None, reason="matplotlib is installed")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.compare", *arguments]


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command("--quick", *arguments), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def measured(report: Any) -> set[tuple[str, str, int]]:
    return {(result["case"], result["contestant"], result["readers"]) for result in report["results"]}


@pytest.mark.slow
def test_streams_and_round_trips_as_json() -> None:
    done = run("--only", "dict", "pingpong", "--contestants", *HERE, "--json", "-")
    report = json.loads(done.stdout)
    assert report["settings"]["failures"] == []
    assert measured(report) == {(case, name, 1) for case in ("small dict", "64 B ping-pong") for name in HERE}
    for result in report["results"]:
        assert all(figure["median"] > 0 for figure in result["figures"].values())
    promises = {promise["promise"]: promise for promise in report["promises"]}
    assert "small dict: messages/s of aioshm against zmq.asyncio (at least 8x)" in promises
    assert len(promises) == 3  # and two of round trips


@pytest.mark.slow
def test_a_table_a_file_and_who_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "figures.json"
    names = ["aioshm", "mp.Queue", "mp.Pipe", "iceoryx2 polling"]
    done = run("--only", "fanout-2", "cadence", "--contestants", *names, "--json", str(path))
    report = json.loads(path.read_text())
    assert str(path) in done.stderr
    assert any(row.split()[:4] == ["small", "dict", "2", "aioshm"] for row in done.stdout.splitlines())
    assert "every 5 ms" in done.stdout
    assert "reader cpu, %" in done.stdout
    assert "not measured: every 5 ms: p50 of aioshm against vLLM (at most 1x)" in done.stdout
    assert {("small dict", "aioshm", 2), ("every 20 ms", "mp.Pipe", 1)} <= measured(report)
    if find_spec("iceoryx2") is None:
        hint = "missing: iceoryx2 polling (iceoryx2 is not installed; `make bench-rivals` gets it)"
        assert hint in done.stderr
        assert hint in report["settings"]["missing"]


@without_matplotlib
def test_a_plot_without_matplotlib_says_how_to_get_it(tmp_path: Path) -> None:
    done = run("--only", "dict", "--plot", str(tmp_path / "plot.svg"), code=2)
    assert "make bench-rivals" in done.stderr
    assert not done.stdout


class Listening:
    """What a stage does at a cadence, without its processes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.orders: list[tuple[int, int, int, int]] = []

    async def perform(self, write: Order, read: Order) -> tuple[None, list[Heard]]:
        sent, period_s, seed = write.args
        warm_up, count = read.args
        assert sent == warm_up + count
        self.orders.append((round(period_s * 1e3), warm_up, count, seed))
        return None, [Heard([1.0] * count, 1.0)]


def test_bounded_cadences_are_listened_to_for_long_and_with_other_gaps_each_time() -> None:
    report, stages = Report("compare", {}, {}), [Listening("aioshm"), Listening("vLLM")]
    for _ in range(3):
        for stage in stages:
            asyncio.run(cadences(report, quick=False, stage=cast("Stage", stage)))
    assert stages[0].orders == stages[1].orders, "the same for everybody"
    counts = {period_ms: count for period_ms, _, count, _ in stages[0].orders}
    assert min(counts[period_ms] for period_ms in CPU_BOUNDS) >= 300
    assert counts[50] < 50, "where nothing is promised, a repetition stays short"
    assert all(4 * warm_up >= count - 3 for _, warm_up, count, _ in stages[0].orders)
    assert [seed for period_ms, *_, seed in stages[0].orders if period_ms == 20] == [0, 1, 2]


def test_a_missed_promise_is_an_exit_code() -> None:
    report = Report("compare", {}, {})
    report.result(SMALL, "aioshm").add(messages_per_s=10.0)
    report.result(SMALL, "vLLM").add(messages_per_s=2.0)
    unheld = hold(report)
    assert [promise.kept for promise in report.promises] == [False]
    assert len(unheld) == len(PROMISES) - 1


def test_only_a_few_files_come_out_of_vllm_s_wheel(tmp_path: Path) -> None:
    wheel, target = tmp_path / "vllm.whl", tmp_path / "packages"
    queue, arena = f"{DEVICES}/shm_broadcast.py", f"{DEVICES}/shm_tensor_arena.py"
    metadata = f"{pinned().replace('==', '-')}.dist-info/METADATA"
    kept = [queue, arena, "vllm/distributed/kv_events.py", metadata]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in [*kept, "vllm/__init__.py"]:
            archive.writestr(name, name)
    assert sorted(extract(wheel, target)) == sorted(kept)
    assert (target / queue).read_text() == queue
    assert not (target / "vllm/__init__.py").exists()
