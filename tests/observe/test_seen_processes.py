"""Engines and workers from outside: their state is read, whatever else has a file of that name."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from support import eventually

from aioshm.observe import find_processes
from aioshm.observe.processes import History, StartedProcess, StartedProcesses, named
from aioshm.process import proc, progress
from aioshm.process.manager import Job, ProcessManager
from aioshm.process.progress import BUSY, FILE_NAME, IDLE, STACK_SIGNAL, STARTING, WAITING, Sample
from aioshm.process.stacks import NOT_INSTALLED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")

WARNING_S = 0.5
SECOND = 10**9


def sample(phase: int = BUSY, steps: int = 1, turns: int = 1, expected_s: float = 0.0, since_s: float = 100) -> Sample:
    return Sample(phase, steps, turns, expected_s, int(since_s * SECOND), 0, False)


class TestHistory:
    @pytest.mark.parametrize("phase", [BUSY, WAITING])
    def test_a_long_step_is_a_stall_at_first_sight(self, phase: int) -> None:
        assert History(60.0).look(sample(phase), 159 * SECOND) == ("busy", 59.0)
        assert History(60.0).look(sample(phase), 161 * SECOND) == ("stalled", 61.0)

    def test_an_announced_time_replaces_the_limit(self) -> None:
        assert History(60.0).look(sample(STARTING), 900 * SECOND)[0] == "starting"
        assert History(60.0).look(sample(expected_s=90.0), 161 * SECOND)[0] == "busy"
        assert History(60.0).look(sample(expected_s=90.0), 191 * SECOND)[0] == "stalled"

    def test_an_idle_process_is_stalled_if_its_loop_stays_quiet_between_two_looks(self) -> None:
        history = History(60.0)
        found = [
            history.look(sample(IDLE, turns=turns), (200 + second) * SECOND) for second, turns in enumerate("1222")
        ]
        assert [state for state, _ in found] == ["idle", "idle", "idle", "stalled"]
        assert found[-1][1] == 2.0

    def test_a_loop_is_unsure_until_it_has_turned(self) -> None:
        history = History(60.0)
        history.look(sample(IDLE, turns=1), 200 * SECOND)
        assert history.is_unsure
        history.look(sample(IDLE, turns=2), 201 * SECOND)
        assert not history.is_unsure
        history.look(sample(BUSY, turns=2), 202 * SECOND)
        assert not history.is_unsure

    def test_an_idle_process_without_a_loop_is_never_stalled(self) -> None:
        history = History(60.0)
        assert [history.look(sample(IDLE, turns=0), s * SECOND)[0] for s in (200, 300, 400)] == ["idle"] * 3

    def test_rate_counts_a_step_once_though_it_begins_and_ends(self) -> None:
        history = History(60.0)
        history.look(sample(steps=100), 200 * SECOND)
        assert history.steps_per_s is None
        history.look(sample(steps=140), 202 * SECOND)
        assert history.steps_per_s == 10.0

    @pytest.mark.parametrize("huge", [0, 1 << 63, (1 << 64) - 1])
    def test_nonsense_is_a_state_and_no_error(self, huge: int) -> None:
        history = History(60.0)
        for phase in range(16):
            state, seconds = history.look(Sample(phase, huge, huge, huge / 1e9, huge, huge, True), 200 * SECOND)
            assert (state != "", seconds >= 0) == (True, True)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("EngineCore_12", ("engine", "EngineCore", 12)),
        ("ApiServer_0", ("API server", "ApiServer", 0)),
        ("DPCoordinator", ("coordinator", "DPCoordinator", -1)),
        ("Model_3", ("worker", "Model", 3)),
        ("my model_standby_1", ("standby", "my model", 1)),
        ("child", ("process", "child", -1)),
        ("", ("process", "", -1)),
    ],
)
def test_a_name_tells_kind_and_rank(name: str, meaning: tuple[str, str, int]) -> None:
    assert named(name) == meaning


# Planted processes


def busy(seconds: float) -> None:
    own = progress.own()
    own.note_requests(4)
    own.enter(BUSY)
    with progress.expect(seconds):
        time.sleep(1000)  # HERE


def blocked_loop() -> None:
    async def main() -> None:
        own = progress.own()
        with own.turning():
            own.enter(IDLE)
            await asyncio.sleep(0.1)
            time.sleep(1000)

    asyncio.run(main())


def idle() -> None:
    async def main() -> None:
        own = progress.own()
        with own.turning():
            own.enter(IDLE)
            await asyncio.sleep(1000)

    asyncio.run(main())


def forking() -> None:
    progress.own().enter(BUSY)
    if not os.fork():
        time.sleep(1000)
    time.sleep(1000)


def supervising() -> None:
    progress.own().enter(IDLE)
    with ProcessManager(idle, [Job("Model_0", ())], shutdown_timeout=0):
        time.sleep(1000)


def own_processes(parent: int | None = None) -> dict[str, StartedProcess]:
    """Return the processes that this process has started, by name; others may test beside it."""
    return {each.name: each for each in find_processes(0.0) if each.parent == (parent or os.getpid())}


def call(target: Callable[..., None], *args: object) -> None:
    target(*args)


@contextmanager
def started(**targets: tuple[object, ...]) -> Iterator[dict[str, Any]]:
    """Run functions with their arguments in processes with these names, once each has stamped its cell."""
    with ProcessManager(call, [Job(name, args) for name, args in targets.items()], shutdown_timeout=0) as manager:
        for process in manager.processes:
            eventually(lambda p=process: p.progress.read().phase != STARTING, "the first stamp")
        yield {process.name: process for process in manager.processes}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHM_STALL_WARNING_S", str(WARNING_S))


def test_each_process_is_found_with_its_state() -> None:
    targets = {
        "EngineCore_0": (busy, 0.001),
        "EngineCore_1": (busy, 1000),
        "EngineCore_2": (blocked_loop,),
        "Model_7": (idle,),
        "Model_standby_0": (idle,),
    }
    with ProcessManager(time.sleep, [Job("other", (1000,)), Job("EngineCore_9", (1000,))], shutdown_timeout=0):
        with started(**targets) as processes:
            os.kill(processes["Model_standby_0"].pid, signal.SIGSTOP)
            expected = {
                "EngineCore_0": "stalled",
                "EngineCore_1": "busy",
                "EngineCore_2": "stalled",
                "EngineCore_9": "starting",
                "Model_7": "idle",
                "Model_standby_0": "stopped",
                "other": "running",
            }
            found: dict[str, StartedProcess] = {}

            def is_as_expected() -> bool:
                found.clear()
                found.update(own_processes())
                return {name: each.state for name, each in found.items()} == expected

            eventually(is_as_expected)
            assert list(found)[:4] == ["EngineCore_0", "EngineCore_1", "EngineCore_2", "EngineCore_9"]
            one = found["EngineCore_0"]
            assert (one.kind, one.rank, one.pid, one.requests) == ("engine", 0, processes["EngineCore_0"].pid, 4)
            assert one.seconds >= WARNING_S
            assert one.program == proc.process_info(os.getpid()).command
    assert own_processes() == {}


def test_forks_of_a_process_and_of_its_supervisor_are_not_taken_for_the_process() -> None:
    with started(EngineCore_0=(forking,)) as processes:
        process = psutil.Process(processes["EngineCore_0"].pid)
        eventually(process.children, "the fork")
        fork = os.fork()
        if not fork:
            time.sleep(60)
            os._exit(0)
        try:
            assert [each.pid for each in find_processes(0.0) if each.parent == os.getpid()] == [process.pid]
            process.kill()
            processes["EngineCore_0"].join()
            assert own_processes() == {}
        finally:
            os.kill(fork, signal.SIGKILL)
            os.waitpid(fork, 0)


def test_workers_of_an_engine_are_shown_with_their_engine() -> None:
    with started(EngineCore_0=(supervising,)) as processes:
        pid = processes["EngineCore_0"].pid
        eventually(lambda: own_processes(pid), "the worker")
        assert own_processes()["EngineCore_0"].pid == pid
        assert own_processes(pid)["Model_0"].program.startswith("EngineCore_0 of ")


@contextmanager
def foreign_file(content: bytes, **options: Any) -> Iterator[int]:
    """Share a file that has the name of a cell with another program; yield its pid."""
    fd = os.memfd_create(FILE_NAME)
    try:
        os.write(fd, content)
        with subprocess.Popen(["sleep", "1000"], pass_fds=[fd], **options) as process:
            try:
                yield process.pid
            finally:
                process.kill()
    finally:
        os.close(fd)


CELL = struct.pack("=10Q", BUSY, *[1] * 9)


def test_file_that_is_not_a_cell_is_passed_over() -> None:
    with ExitStack() as stack:
        for content in (b"", b"\0" * 63, b"\xff" * 64, b"nonsense" * 600):
            stack.enter_context(foreign_file(content))
        pid = stack.enter_context(foreign_file(CELL))
        assert [each.pid for each in find_processes(0.0) if each.parent == os.getpid()] == [pid]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users")
def test_process_of_another_user_is_passed_over() -> None:
    with foreign_file(CELL, user=65534) as pid:
        assert pid not in [each.pid for each in find_processes(0.0)]


def test_without_py_spy_the_stack_is_the_one_that_the_supervisor_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioshm.process.stacks.stacks_of", lambda pid: ((), NOT_INSTALLED))
    lines = Path(__file__).read_text().splitlines()
    number = next(number for number, text in enumerate(lines, 1) if text.endswith("# HERE"))
    with started(EngineCore_0=(busy, 0.001)) as processes:
        cell = processes["EngineCore_0"].progress
        watch = StartedProcesses()

        def seen() -> StartedProcess:
            return next(each for each in watch.look() if each.pid == processes["EngineCore_0"].pid)

        eventually(lambda: seen().state == "stalled")
        report = watch.report(seen())
        assert (report.line, report.hint) == (None, NOT_INSTALLED)
        cell.drop_stacks()
        processes["EngineCore_0"].send_signal(STACK_SIGNAL)
        eventually(lambda: "in busy" in cell.stacks())
        report = watch.report(seen())
        assert str(report.line).endswith(f"{Path(__file__).name}:{number} in busy")
        assert "that its supervisor has read" in report.hint
        later = msgspec.structs.replace(seen(), seconds=-1.0)
        assert watch.report(later).line is None, "written before that stall"
