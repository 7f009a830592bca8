"""``aioshm ls``, ``who`` and ``top`` show engines and workers, and name those without progress."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import eventually

from aioshm.cli.app import run
from aioshm.process import proc, progress
from aioshm.process.manager import Job, ProcessManager
from aioshm.process.progress import BUSY, IDLE, STARTING
from aioshm.process.stacks import NOT_INSTALLED, stacks_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="it looks into /proc")

LONG = f"a worker of {os.getpid()} with a name of many words, which is longer than any line of eighty columns is_3"


PROGRAM = f"""
import sys, time
from aioshm.process import progress
from aioshm.process.manager import Job, ProcessManager
def serve():
    progress.own().enter(progress.BUSY)
    with progress.expect(0.001):
        time.sleep(1000)
if __name__ == "__main__":
    with ProcessManager(serve, [Job({LONG!r})], shutdown_timeout=0) as manager:
        print(manager.processes[0].pid, flush=True)
        sys.stdin.read()
"""


def serve(phase: int, requests: int) -> None:
    async def main() -> None:
        own = progress.own()
        own.note_requests(requests)
        with own.turning():
            own.enter(phase)
            if phase == IDLE:
                await asyncio.sleep(1000)
            hang()

    asyncio.run(main())


def hang() -> None:
    time.sleep(1000)  # HERE


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, Any]]:
    jobs = [Job("EngineCore_0", (BUSY, 4)), Job("EngineCore_1", (IDLE, 0)), Job(LONG, (IDLE, 0))]
    with ProcessManager(serve, jobs, shutdown_timeout=0) as manager:
        for process in manager.processes:
            eventually(lambda p=process: p.progress.read().phase != STARTING, "the first stamp")
        yield {process.name: process for process in manager.processes}


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process within the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: proc.process_info(pid).state == "stopped")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHM_STALL_WARNING_S", "0.3")
    monkeypatch.delenv("COLUMNS", raising=False)


def said(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert run(args) == 0
    return capsys.readouterr().out


def own(text: str, key: str = "processes") -> dict[str, Any]:
    found = json.loads(text)
    assert found["version"] == 1
    return {each["name"]: each for each in found[key] if each["parent"] == os.getpid()}


def test_tables_and_json_show_each_process(processes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    pid = processes["EngineCore_0"].pid
    eventually(lambda: own(said(capsys, "ls", "--json"))["EngineCore_0"]["state"] == "stalled")
    for command in (["ls"], ["top", "--once"]):
        out = said(capsys, *command)
        assert re.search(rf"engine 0 +{pid} +stalled for \S+ \w+ +4 +0", out)
        assert re.search(rf"engine 1 +{processes['EngineCore_1'].pid} +idle +0 +0", out)
        assert re.search(rf"worker 3 +{processes[LONG].pid} +idle +0 +0", out)
        assert LONG in " ".join(out.split())
        assert f"(pid {os.getpid()})" in " ".join(out.split())
        assert [line for line in out.splitlines() if len(line) > 80] == []
    found = own(said(capsys, "ls", "--json"))
    assert set(found) == set(processes)
    assert found[LONG]["rank"] == 3
    assert set(found["EngineCore_0"]) == {
        "name", "kind", "rank", "pid", "parent", "program", "state", "seconds", "waits_for_peers", "requests",
        "steps_per_s",
    }  # fmt: skip


class TestWho:
    def test_stalled_processes_come_first_then_stopped_ones_and_healthy_ones_are_counted(
        self, processes: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "500")
        engine = processes["EngineCore_0"]
        with stopped(processes[LONG].pid):
            eventually(lambda: "EngineCore_0" in own(said(capsys, "who", "--json", "--window", "0.02")))
            found = own(said(capsys, "who", "--json", "--window", "0.02"))
            lines = said(capsys, "who", "--window", "0.02").splitlines()
        assert {name: each["state"] for name, each in found.items()} == {"EngineCore_0": "stalled", LONG: "stopped"}
        assert found["EngineCore_0"]["wait_channel"] == proc.wait_channel(engine.pid)
        assert found["EngineCore_0"]["process"]["state"] == "sleeping"
        named = [line for line in lines if any(f", pid {each} (" in line for each in (engine.pid, processes[LONG].pid))]
        assert re.match(rf"EngineCore_0, pid {engine.pid} \(of .*\): stalled for \S+ \w+, 4 requests$", named[0])
        assert re.match(rf"{LONG}, pid {processes[LONG].pid} \(of .*\): stopped, 0 calls$", named[1])
        assert re.search(r"^healthy: \d+ queues?, (?!0)\d+ process", "\n".join(lines), re.M)

    def test_name_in_several_programs_shows_the_one_without_progress_first(
        self,
        processes: dict[str, Any],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        monkeypatch.setenv("COLUMNS", "500")
        script = tmp_path / "program.py"
        script.write_text(PROGRAM)
        with subprocess.Popen([sys.executable, str(script)], stdin=-1, stdout=-1, text=True) as program:
            assert program.stdout is not None
            pids = [program.stdout.readline().strip(), str(processes[LONG].pid)]
            eventually(lambda: "stalled for" in said(capsys, "who", LONG, "--window", "0.02"))
            out = said(capsys, "who", LONG, "--window", "0.02")
            assert re.findall(rf"^{LONG}, pid (\d+)", out, re.M) == pids
            assert f"\nseveral programs have a {LONG}: aioshm who PID\n" in out
            assert "several programs" not in said(capsys, "who", pids[0], "--window", "0.02")
            program.kill()

    def test_only_frames_around_the_line_are_shown_unless_all_stacks_are_wanted(
        self, processes: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pid = processes["EngineCore_0"].pid
        seen, reason = stacks_of(pid)
        if not seen:
            pytest.skip(reason)
        monkeypatch.setenv("COLUMNS", "500")
        short = said(capsys, "who", str(pid), "--window", "0.02").splitlines()
        whole = said(capsys, "who", str(pid), "--window", "0.02", "--stacks").splitlines()
        frames = [[line for line in lines if line.startswith("    ")] for lines in (short, whole)]
        assert [line.rpartition(" ")[2] for line in frames[0][:2]] == ["hang", "serve.<locals>.main"]
        assert (len(frames[0]), len(frames[1])) == (3, sum(len(stack.frames) for stack in seen))
        assert (short[-1], whole[-1] == short[-1]) == ("the whole stacks of all threads: --stacks", False)
        assert "  aioshm-parent-watch" not in short

    def test_without_py_spy_the_hint_is_there_once(
        self, processes: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("aioshm.process.stacks.stacks_of", lambda pid: ((), NOT_INSTALLED))
        pid = processes["EngineCore_0"].pid
        processes["EngineCore_0"].progress.drop_stacks()
        with stopped(processes[LONG].pid):
            eventually(lambda: f"pid {pid} (" in said(capsys, "who", "--window", "0.02"))
            assert said(capsys, "who", "--window", "0.02").count(NOT_INSTALLED) == 1
        assert said(capsys, "who", str(pid), "--window", "0.02").count(NOT_INSTALLED) == 1

    def test_a_process_is_described_by_name_and_by_pid(
        self, processes: dict[str, Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        pid = processes["EngineCore_1"].pid
        for key, beginning in (
            ("EngineCore_1", rf"EngineCore_1, pid {pid} \(of .*\(pid {os.getpid()}\)\): idle, 0 requests sleeping"),
            (str(pid), rf"pid {pid} \(EngineCore_1 of .*\) has no queue: sleeping.* idle, 0 requests"),
        ):
            out = said(capsys, "who", key, "--window", "0.02")
            assert re.search(beginning, " ".join(out.split()))

    def test_a_wrong_limit_is_one_line(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AIOSHM_STALL_WARNING_S", "soon")
        for command in (["ls"], ["who"], ["top", "--once"]):
            assert run(command) == 2
            assert re.fullmatch("aioshm: .*AIOSHM_STALL_WARNING_S.*\n", capsys.readouterr().err)


def test_export_counts_them(processes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    with stopped(processes[LONG].pid):
        eventually(lambda: not re.search("^aioshm_host_stalled_processes 0", said(capsys, "export", "--once"), re.M))
        counts = dict(re.findall(r"^aioshm_host_(\w+)_processes (\d+)", said(capsys, "export", "--once"), re.M))
    assert int(counts["started"]) >= len(processes), "others may test beside it"
    assert int(counts["stopped"]) >= 1
