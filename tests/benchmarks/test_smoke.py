"""Each benchmark runs, reports what it should, and ends its processes; how fast anything is, is not looked at."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from shutil import which
from typing import Any

import psutil
import pytest
from support import eventually

from benchmarks.churn import READERS

ROOT = Path(__file__).parents[2]
RIVALS = {"aioshm", "zmq.asyncio", "mp.Queue", "mp.Pipe"}
SIZES = {"small dict", "1 MiB"}
TIMEOUT_S = 100
HEADER = Path(sysconfig.get_path("include"), "Python.h")
HAVE_COMPILER = HEADER.exists() and which((sysconfig.get_config_var("CC") or "cc").split()[0]) is not None


def on(benchmark: str, *loops: str) -> pytest.MarkDecorator:
    """Give a test the report of a benchmark on each of these loops: in the slow lane, except throughput on one loop.

    The same settings make the loops of every benchmark: one that runs on both is enough.
    """
    cases = [
        pytest.param((benchmark, loop), id=loop, marks=[pytest.mark.slow] * (benchmark != "throughput" or n > 0))
        for n, loop in enumerate(loops)
    ]
    return pytest.mark.parametrize("report", cases, indirect=True)


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
def report(request: pytest.FixtureRequest) -> Any:
    benchmark, loop = request.param
    found = run_json(benchmark, "--loop", loop)
    assert found["machine"]["loop"] == loop
    return found


def measured(report: Any) -> set[tuple[str, str, int]]:
    return {(result["case"], result["contestant"], result["readers"]) for result in report["results"]}


@on("engine_roundtrip", "asyncio")
def test_engine_roundtrip(report: Any) -> None:
    prompts = {"16 tokens", "4,000 tokens"}
    names = ("aioshm", "aioshm, blocking", "zmq.asyncio", "aioshm, TCP, CURVE", "aioshm, TCP, secure=False")
    assert measured(report) == {(prompt, name, 1) for prompt in prompts for name in names}
    assert len(report["promises"]) == 2


@on("remote", "uvloop")
def test_remote(report: Any) -> None:
    contestants = {"aioshm, secure=False", "aioshm, CURVE", "aioshm leased, secure=False"}
    contestants |= {"bare zmq.asyncio", "bare zmq.asyncio, copy=False"}
    assert measured(report) == {(size, name, 1) for size in ("4 KiB", "4 MiB") for name in contestants}
    assert len(report["promises"]) == 4
    assert [remark.split()[0] for remark in report["remarks"]] == ["CURVE", "CURVE"]


@on("loans", "uvloop")
def test_loans(report: Any) -> None:
    sizes, faces = ("64 B, loaned", "64 KiB, loaned", "16 MiB, loaned"), ("aioshm", "aioshm blocking")
    assert measured(report) == {(size, name, 1) for size in sizes for name in faces}
    assert len(report["promises"]) == len(faces), "nothing is copied of 16 MiB"


@on("leases", "uvloop")
def test_leases(report: Any) -> None:
    small, large = {"small dict", "small dict, msgpack"}, {"1 MiB", "1 MiB, msgpack"}
    large |= {f"{size}{kind}" for size in ("4 KiB", "1 MiB") for kind in (", raw", " tensor")} | {"4 KiB array"}
    ways = ("", " leased", " iterated", " leases iterated")
    names = {f"aioshm{face}{way}" for face in ("", " blocking") for way in ways}
    assert measured(report) == {(case, name, 1) for case in small | large for name in names}
    view = sum(name.startswith("1 MiB") for name in large)
    assert len(report["promises"]) == len(small) + 2 * len(large) + 4 * view


@on("overflow", "uvloop")
def test_overflow(report: Any) -> None:
    assert measured(report) == {("1 MiB", name, 1) for name in ("overflow segments", "overflow over ZeroMQ")}
    assert len(report["remarks"]) == 1


@on("startup", "asyncio")
def test_startup(report: Any) -> None:
    assert measured(report) == {("2 engines", name, 1) for name in ("aioshm", "multiprocessing")}
    assert len(report["promises"]) == 1


@on("workers", "uvloop")
def test_workers(report: Any) -> None:
    cases = {(f"{what}, {n} worker{'s' * (n > 1)}", n) for what in ("step", "megabyte") for n in (1, 2)}
    assert measured(report) == {(case, name, n) for case, n in cases for name in ("aioshm", "aioshm call", "mp.Pipe")}
    p50 = {
        found["contestant"]: found["figures"]["p50_us"]["median"]
        for found in report["results"]
        if "step, 2" in found["case"]
    }
    [promise] = report["promises"]
    assert promise["promise"].startswith("a step of a WorkerGroup with 2 workers")
    assert promise["bound"] == 1
    assert promise["measured"] == pytest.approx(p50["aioshm"] / p50["mp.Pipe"])


@on("events_publish", "asyncio")
def test_events_publish(report: Any) -> None:
    cases = {
        f"{form}, {load}" for form in ("arrays", "maps") for load in ("burst", "decode loop", "decode loop, 100 us")
    }
    contestants = {"ZmqEventPublisher", "ThreadedEventPublisher", "queue + thread + PUB", "the same, same bytes"}
    assert measured(report) == {(case, name, 1) for case in cases for name in contestants}
    assert len(report["promises"]) == 14


@on("events_replay", "uvloop")
def test_events_replay(report: Any) -> None:
    assert measured(report) == {("1,000 batches/s", name, 1) for name in ("nobody replays", "4 slow clients replay")}
    assert len(report["promises"]) == 1


@on("strangers", "asyncio")
def test_strangers(report: Any) -> None:
    assert measured(report) == {("4 KiB", "quiet", 1), ("4 KiB", "with strangers", 1)}
    assert len(report["promises"]) == 1
    assert "'received': 0" in report["remarks"][0]


@on("throughput", "asyncio", "uvloop")
def test_throughput(report: Any) -> None:
    assert measured(report) == {(size, rival, 1) for size in SIZES for rival in RIVALS}
    assert all(result["figures"]["messages_per_s"]["median"] > 0 for result in report["results"])
    assert len(report["promises"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["uvloop"])
def test_survival(loop: str) -> None:
    done = subprocess.run(  # an engine whose worker is killed says so, with a traceback
        command("survival", "--seconds", "5", "--kills", "4", "--json", "--loop", loop),
        cwd=ROOT,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {"next call, standby", "next call, cold", "next call, standby, 4 MiB"} < {
        result["case"] for result in report["results"]
    }
    result, outages, stopped = report["results"][3:]
    assert result["figures"]["completed"]["median"] > 0
    assert result["figures"]["killed"]["median"] > 0
    assert outages["figures"]["back_p50_ms"]["median"] > 0
    assert outages["figures"]["share"]["median"] > 0
    assert stopped["figures"]["kept_mib"]["median"] > 0
    counted = [promise for promise in report["promises"] if promise["unit"] == ""]
    assert len(counted) == 10
    assert [promise for promise in counted if not promise["kept"]] == [], done.stderr


@on("observe", "uvloop")
def test_observe(report: Any) -> None:
    parts = {"nobody looks", "nobody looks, too", "looked at, ten times a second", "looked at, once a second"}
    assert measured(report) == {(part, "aioshm", 1) for part in parts}
    figures = {result["case"]: result["figures"] for result in report["results"]}
    assert figures["looked at, once a second"]["scraped_lines"]["median"] > 20
    quiet, often = (
        figures[case]["observers_cpu_percent"] for case in ("nobody looks", "looked at, ten times a second")
    )
    assert quiet["median"] < often["median"], "they look in some parts, and are stopped in the others"
    assert figures["nobody looks"]["messages_per_s"]["max"] > 0
    assert len(report["promises"]) == 2
    assert any("at one look a second" in remark for remark in report["remarks"])


@on("churn", "asyncio")
def test_churn(report: Any) -> None:
    places = {("2 readers in one process", f"{places} places", 2) for places in (2, 256)}
    cases = {"nobody comes or goes", "one comes and one is killed every 50 ms"}
    assert measured(report) == places | {(case, "aioshm", READERS) for case in cases}
    churn = next(result["figures"] for result in report["results"] if "killed" in result["case"])
    assert 0 < churn["still_p50_us"]["median"] <= churn["still_max_us"]["median"]
    assert 0 < churn["noticed_p50_ms"]["median"] <= churn["noticed_p99_ms"]["median"], "each death was noticed"
    assert 0 < churn["join_running_p50_ms"]["median"] <= churn["join_p50_ms"]["median"]
    assert len(report["promises"]) == 5


@pytest.mark.slow
def test_defaults() -> None:
    report = run_json("defaults", "--only", "4k", "fanout-2")
    kept = {promise["promise"]: promise for promise in report["promises"]}
    assert [line for line in kept if "against the best sized ring" in line]
    blocking = next(promise for line, promise in kept.items() if "aioshm blocking against aioshm" in line)
    assert blocking["at_least"]
    assert blocking["kept"] == (blocking["measured"] >= blocking["bound"])
    assert any("control" in remark for remark in report["remarks"])


@on("fanout", "uvloop")
def test_fanout(report: Any) -> None:
    assert measured(report) == {(size, rival, n) for size in SIZES for rival in RIVALS for n in (1, 2)}


@on("latency", "uvloop")
def test_latency(report: Any) -> None:
    cases = {"64 B", "parking reader"} | SIZES
    assert measured(report) == {(case, rival, 1) for case in cases for rival in RIVALS}
    for result in report["results"]:
        figures = {name: figure["median"] for name, figure in result["figures"].items()}
        assert 0 < figures["p50_us"] <= figures["p99_us"] <= figures["max_us"]
    assert len(report["promises"]) == 2


@on("idle", "uvloop")
def test_idle(report: Any) -> None:
    cases = {"idle", "idle after a burst"}
    assert measured(report) == {(case, rival, 1) for case in cases for rival in RIVALS}
    assert len(report["promises"]) == 4


@on("fairness", "asyncio")
def test_fairness(report: Any) -> None:
    assert measured(report) == {
        ("idle loop", "-", 1),
        ("busy loop, no queue", "-", 1),
        ("saturated reader", "aioshm", 1),
        ("saturated reader", "zmq.asyncio", 1),
        ("reader keeps up", "aioshm", 1),
        ("reader keeps up", "zmq.asyncio", 1),
    }
    assert len(report["promises"]) == 2


@on("writer_cost", "asyncio")
def test_writer_cost(report: Any) -> None:
    cases = {"claim, fill, commit", "enqueue"}
    assert measured(report) == {(case, "aioshm", n) for case in cases for n in (1, 4)}
    assert all(result["figures"]["us_per_message"]["median"] > 0 for result in report["results"])
    assert len(report["promises"]) == 2


@on("memory", "uvloop")
def test_memory(report: Any) -> None:
    cases = {case for case, _, _ in measured(report)}
    assert {"small dict, pickle", "64 B, raw"} <= cases
    assert measured(report) == {(case, f"aioshm {end}", 1) for case in cases for end in ("writer", "reader")}
    assert all(result["figures"]["rss_at_first_kib"]["median"] > 0 for result in report["results"])
    if Path("/proc/self/smaps").exists():
        assert all(100 < result["figures"]["ring_kib"]["median"] <= 6 * 1024 for result in report["results"])
        assert [promise["kept"] for promise in report["promises"] if "ring" in promise["promise"]] == [True, True]
        assert len(report["promises"]) == 4


def test_a_table_for_people_and_only_the_rivals_asked_for() -> None:
    text = run("throughput", "--rivals", "aioshm", "zmq.asyncio", "iceoryx2 polling")
    assert "zmq.asyncio" in text
    assert "mp.Pipe" not in text
    assert "against zmq.asyncio (at least 5x)" in text


@pytest.mark.parametrize(
    ("benchmark", "number"),
    [
        ("throughput", signal.SIGKILL),
        pytest.param("idle", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("compare", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("throughput", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("throughput", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("compare", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_its_processes_end_with_it(benchmark: str, number: signal.Signals) -> None:
    arguments = ["--seconds", "30", "--contestants", "aioshm", "mp.Pipe"]
    with subprocess.Popen(
        command(benchmark, *arguments), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            parent = psutil.Process(process.pid)
            expected = 2 * 2 + 2  # multiprocessing's resource tracker, and what the others are forked from
            eventually(
                lambda: len(parent.children(recursive=True)) == expected, "the start of every process", TIMEOUT_S
            )
            children = parent.children(recursive=True)
            process.send_signal(number)
            process.wait(TIMEOUT_S)
            _, alive = psutil.wait_procs(children, TIMEOUT_S)
            assert not alive
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".venv/bin/python").exists(), reason="this tree has no .venv of its own")
def test_trees_of_the_same_code_are_told_apart_by_nothing_but_noise() -> None:
    folder = str(ROOT)
    report = json.loads(run("trees", folder, folder, "--only", "remote", "--json"))
    found = {(result["case"], result["contestant"]): result["figures"] for result in report["results"]}
    assert ("remote: 4 KiB, messages_per_s", "aioshm, CURVE") in found
    assert len(found) == 2 * 4
    assert all(
        figures["speed"]["median"] == pytest.approx(figures["best_turns"]["median"]) for figures in found.values()
    )
    assert [promise["promise"] for promise in report["promises"]] == [
        "remote: cases that are slower by more than 5% (at most 0)"
    ]


def test_a_tree_without_an_environment_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        command("trees", str(ROOT), str(tmp_path)), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 2
    assert f"{tmp_path} is no checkout" in done.stderr
