"""Progress cells: children that hang in every way are named with their line; nobody else is."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support import eventually, until

import aioshm
from aioshm.process import proc, progress, stalls, watch
from aioshm.process.child import Child
from aioshm.process.manager import Job, ProcessManager
from aioshm.process.progress import BUSY, IDLE, Sample
from aioshm.process.restart import Restart
from aioshm.process.stacks import NOT_INSTALLED, ProcessReport, parse_faulthandler, users_line
from aioshm.process.stalls import Judge, ProgressWatch, Watched

pytestmark = pytest.mark.one_loop

WARNING_S = 0.3


def sample(phase: int = BUSY, steps: int = 1, turns: int = 1, expected_s: float = 0.0) -> Sample:
    return Sample(phase, steps, turns, expected_s, 0, 0, False)


# The decision


@pytest.mark.parametrize(
    ("samples", "late"),
    [
        ([sample(turns=turn) for turn in range(4)] + [sample(steps=2)], "..xx."),
        ([sample(IDLE)] * 4 + [sample(IDLE, turns=2)], "..xx."),
        ([sample(IDLE, turns=0)] * 9, "........."),  # without a loop
        ([sample(progress.STARTING)] * 9, "........."),
        ([sample(progress.ENDING)] * 9, "........."),
        ([sample(expected_s=4.0)] * 6, "....xx"),
    ],
)
def test_process_is_late_without_a_step_or_a_turn_of_its_loop(samples: list[Sample], late: str) -> None:
    judge = Judge(2.0)
    assert "".join(".x"[judge.look(1.0, each)] for each in samples) == late
    assert (judge.without_progress_s > 0) is late.endswith("x")


def test_reports_come_at_growing_intervals() -> None:
    judge = Judge(2.0)
    due = []
    for second in range(40):
        judge.look(1.0, sample())
        if judge.report_is_due():
            due.append(second)
    assert due == [2, 4, 8, 16, 32]


# The cell


def test_expected_durations_of_overlapping_blocks_end_with_their_blocks_and_need_no_supervisor() -> None:
    own = progress.Progress()
    own.enter(BUSY)
    first, second = own.expect(600), own.expect(10)
    first.__enter__()
    second.__enter__()
    assert own.read()[:4] == (BUSY, 3, 0, 10.0)
    first.__exit__(None, None, None)
    assert own.read().expected_s == 10
    second.__exit__(None, None, None)
    assert own.read()[:4] == (BUSY, 5, 0, 0.0)
    assert not own.is_watched


def test_expected_durations_leave_the_phase_to_the_thread_of_the_steps() -> None:
    cell = progress.Cell()
    own = progress.Progress(cell.fileno())
    own.enter(BUSY)
    state = os.pread(cell.fileno(), 8, 0)
    with own.expect(600):
        assert os.pread(cell.fileno(), 8, 0) == state, "a thread that was switched out might write an old phase"
    assert own.read().steps == 3
    cell.close()


@pytest.mark.parametrize("seconds", [0, -1, "1", None, True, float("nan")])
def test_expect_refuses_everything_but_seconds(seconds: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="seconds"), aioshm.progress.expect(seconds):
        pass


async def test_signs_of_life_end_with_their_block_and_are_given_once() -> None:
    cell = progress.Cell()
    own = progress.Progress(cell.fileno())
    with own.serving():
        began = own.read()
        assert began[:2] == (IDLE, 1)
        with own.turning(), own.serving():
            pass
        assert own.read() == began
        await until(lambda: own.read().turned_ns > began.turned_ns)
    assert own.read().turned_ns == 0, "a loop that has ended is not late"
    cell.close()
    with progress.Progress().serving():
        pass


async def test_time_of_a_phase_is_known_to_within_a_sign_of_life() -> None:
    own = progress.Progress()
    with own.turning():
        own.enter(BUSY)
        before = time.monotonic_ns()
        assert 0 < own.read().since_ns <= before, "the sign of life before it"
        await until(lambda: own.read().turned_ns > before)
        seen = own.read()
        assert seen.since_ns > before
        await until(lambda: own.read().turned_ns > seen.turned_ns)
        assert own.read().since_ns == seen.since_ns, "the same phase"
        with own.expect(600):
            assert own.read().since_ns > seen.turned_ns, "an announced step is noted at once"


def test_a_forked_child_does_not_write_the_cell_of_its_parent() -> None:
    cell = progress.Cell()
    own = progress.Progress(cell.fileno())
    own.enter(IDLE)
    child = os.fork()
    if not child:
        own.enter(BUSY)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    read = cell.read()
    assert read is not None
    assert read[:2] == (IDLE, 1)
    cell.close()
    assert cell.read() is None


def test_output_of_faulthandler_is_parsed() -> None:
    text = (
        'Thread 0x1 (most recent call first):\n  File "/app/a.py", line 3 in other\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/usr/lib/python3.11/x.py", line 1 in x\n'
        '  File "/app/model.py", line 41 in forward\n'
    )
    first, second = parse_faulthandler(text)
    assert (first.is_main, second.is_main) == (True, False)
    assert str(users_line([second, first])) == "/app/model.py:41 in forward"
    assert parse_faulthandler("") == ()


@pytest.mark.parametrize(
    ("files", "frozen"),
    [
        ({"proc/7/cgroup": "0::/a\n", "sys/fs/cgroup/a/cgroup.events": "populated 1\nfrozen 1\n"}, True),
        ({"proc/7/cgroup": "0::/a\n", "sys/fs/cgroup/a/cgroup.events": "populated 1\nfrozen 0\n"}, False),
        ({"proc/7/cgroup": "6:freezer:/b\n0::/\n", "sys/fs/cgroup/freezer/b/freezer.state": "FROZEN\n"}, True),
        ({"proc/7/cgroup": "6:freezer:/b\n0::/\n", "sys/fs/cgroup/freezer/b/freezer.state": "THAWED\n"}, False),
        ({"proc/7/cgroup": "nonsense\n"}, False),
        ({}, False),
    ],
)
def test_a_frozen_cgroup_is_recognised(tmp_path: Path, files: dict[str, str], frozen: bool) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert proc.is_frozen(7, tmp_path) is frozen


# Children that hang


def hang_with_the_gil_held() -> None:
    while True:  # a signal ends each sleep
        ctypes.PyDLL(None).sleep(60)  # HERE


def hang_with_the_gil_held_in_a_step() -> None:
    progress.own().enter(BUSY)
    hang_with_the_gil_held()


def await_for_ever() -> None:
    async def ask_a_full_pool() -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(threading.Event().wait)
            await asyncio.gather(loop.run_in_executor(pool, print))  # HERE

    async def main() -> None:
        own = progress.own()
        with own.turning():
            own.enter(BUSY)
            await asyncio.wait_for(ask_a_full_pool(), None)

    asyncio.run(main())


@asynccontextmanager
async def watched(
    target: Callable[..., None], *args: object, restart: Restart | None = None
) -> AsyncIterator[tuple[Watched, list[tuple[str, str]]]]:
    changes: list[tuple[str, str]] = []

    def note(found: Watched) -> None:
        changes.append((found.health, found.where))

    async with ProcessManager(target, [Job("child", args)], shutdown_timeout=0) as manager:
        watcher = ProgressWatch(WARNING_S, restart, note)
        try:
            yield watcher.add("engine 7", manager.processes[0]), changes
        finally:
            watcher.close()


def line_of(function: Callable[[], None]) -> str:
    lines = Path(__file__).read_text().splitlines()
    first = function.__code__.co_firstlineno
    number = next(number for number, line in enumerate(lines, 1) if number > first and line.endswith("# HERE"))
    return f"test_progress.py:{number} in {function.__name__}"


def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioshm.process.stalls.stacks_of", lambda pid: ((), NOT_INSTALLED))


async def test_a_hang_is_named_with_its_line_without_py_spy(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_py_spy(monkeypatch)
    async with watched(hang_with_the_gil_held_in_a_step) as (found, changes):
        await until(lambda: line_of(hang_with_the_gil_held) in caplog.text)
        assert found.health == "stalled"
        assert changes[0][0] == "stalled"
        assert f"engine 7 (pid {found.process.pid}) is stalled: no progress for" in caplog.text


async def test_a_step_that_awaits_for_ever_is_named_with_the_line_of_its_coroutine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_py_spy(monkeypatch)
    line = f"{line_of(await_for_ever).partition(' ')[0]} in ask_a_full_pool"
    async with watched(await_for_ever) as (found, _):
        await until(lambda: line in found.where)


async def test_a_process_that_is_stopped_while_its_line_is_found_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def attach_a_debugger(process: Child) -> ProcessReport:
        os.kill(process.pid or 0, signal.SIGSTOP)
        eventually(lambda: proc.process_state(process.pid or 0) in proc.STOPPED_STATES)  # a moment later
        return culprit(process)

    culprit = stalls.culprit
    monkeypatch.setattr(stalls, "culprit", attach_a_debugger)
    async with watched(long_step, 60.0, restart=Restart(hang_s=WARNING_S)) as (found, _):
        await until(lambda: found.ending)
        await until(lambda: not found.ending)
        assert found.process.exitcode is None
        await until(lambda: found.health == "stopped")


def long_step(seconds: float) -> None:
    progress.own().enter(BUSY)
    time.sleep(seconds)


async def test_a_stop_shorter_than_the_limit_does_not_count_for_the_step_that_goes_on() -> None:
    async with watched(long_step, 60.0, restart=Restart(hang_s=2 * WARNING_S)) as (found, changes):
        await until(lambda: found.process.progress.read().phase == BUSY)
        os.kill(found.process.pid, signal.SIGSTOP)
        await asyncio.sleep(0.9 * WARNING_S)
        os.kill(found.process.pid, signal.SIGCONT)
        continued = time.monotonic()
        await until(lambda: found.process.exitcode is not None)
        assert time.monotonic() - continued >= 2 * WARNING_S
        assert {health for health, _ in changes} == {"stalled"}


def wait_for_peers() -> None:
    progress.own().enter(progress.WAITING)
    time.sleep(60)


@asynccontextmanager
async def in_lockstep(*bodies: tuple[Callable[..., None], *tuple[Any, ...]]) -> AsyncIterator[list[Watched]]:
    jobs = [Job(f"peer {number}", body) for number, body in enumerate(bodies)]
    async with ProcessManager(call, jobs, shutdown_timeout=0) as manager:
        for process in manager.processes:
            await until(lambda process=process: process.progress.read().phase in (BUSY, progress.WAITING))
        watcher = ProgressWatch(WARNING_S, Restart(hang_s=3 * WARNING_S), lambda _: None)
        try:
            yield [watcher.add(process.name, process, in_step=True) for process in manager.processes]
        finally:
            watcher.close()


async def test_of_processes_in_lockstep_that_all_wait_the_first_is_ended() -> None:
    async with in_lockstep((wait_for_peers,), (wait_for_peers,)) as found:
        with watch.ProcessWatch([each.process for each in found]) as exits:
            assert len(await exits.next()) == 1


async def test_in_lockstep_nobody_is_ended_while_one_is_stopped_nor_counts_that_time() -> None:
    async with in_lockstep((wait_for_peers,), (long_step, 60.0), (long_step, 60.0)) as found:
        os.kill(found[2].process.pid or 0, signal.SIGSTOP)
        await until(lambda: found[1].judge.without_progress_s > 4 * WARNING_S)
        os.kill(found[2].process.pid or 0, signal.SIGCONT)
        continued = time.monotonic()
        await until(lambda: found[0].process.exitcode != found[1].process.exitcode or found[2].process.exitcode)
        assert time.monotonic() - continued >= 3 * WARNING_S


def expected_step() -> None:
    own = progress.own()
    with own.expect(60):
        own.enter(BUSY)
        time.sleep(60)


async def test_in_lockstep_a_process_that_waits_for_an_expected_step_is_not_ended() -> None:
    async with in_lockstep((wait_for_peers,), (expected_step,)) as found:
        await until(lambda: found[0].judge.without_progress_s > 5 * WARNING_S)
        assert [each.process.exitcode for each in found] == [None, None]
        assert [each.health for each in found] == ["stalled", "running"]


def call(function: Callable[..., None], *args: object) -> None:
    function(*args)
