"""Processes are asked to end, all within one deadline, and nothing of them is left; SIGTERM as the end of a task."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import engine_targets as targets
import psutil
import pytest
import pytest_asyncio
from managed import gone
from support import eventually, until

from aioshm.engine import ashutdown, shutdown
from aioshm.process import stopping
from aioshm.process.child import Child
from aioshm.process.manager import Job, ProcessManager, StderrRelay
from aioshm.process.stopping import TERMINATED, Termination

SPAWN = multiprocessing.get_context("spawn")

Stop = Callable[..., None]


def stop_async(procs: Any, timeout: float = 5) -> None:
    asyncio.run(ashutdown(procs, timeout))


either_way = pytest.mark.parametrize("stop", [shutdown, stop_async])


class Started:
    """Processes that say when they are up."""

    def __init__(self) -> None:
        self.relay = StderrRelay()
        self.processes: list[Child] = []

    def __call__(self, target: Callable[..., object], **kwargs: Any) -> Child:
        name = f"process {len(self.processes)}"
        with self.relay.pipe(name) as stderr:
            child = Child(target, name, kwargs=kwargs, stderr=stderr)
            child.start()
        self.processes.append(child)
        eventually(lambda: self.relay.last_lines(name, 1))
        return child

    def started(self, child: Child) -> int:
        """Return the id of the process that this one has started."""
        return int(self.relay.last_lines(child.name, 1)[0].removeprefix("started "))


@pytest.fixture
def start() -> Iterator[Started]:
    started = Started()
    yield started
    for process in started.processes:
        if process.is_alive():
            process.kill()
        process.join()
        process.release()
    started.relay.close()


def timed(stop: Stop, *args: Any) -> float:
    start = time.monotonic()
    stop(*args)
    return time.monotonic() - start


@either_way
def test_processes_get_sigterm_at_the_same_time_and_share_one_deadline(stop: Stop, start: Started) -> None:
    polite = [start(targets.end_politely, seconds=0.2) for _ in range(3)]
    assert timed(stop, polite) < 3 * 0.2
    stubborn = [start(targets.refuse_to_end) for _ in range(3)]
    polite.append(start(targets.end_politely, seconds=0.01))
    assert 0.4 <= timed(stop, [*stubborn, polite[-1]], 0.4) < 3 * 0.4
    assert [process.exitcode for process in polite] == [7] * 4
    assert [process.exitcode for process in stubborn] == [-signal.SIGKILL] * 3


@pytest.mark.parametrize(("stubborn", "own_group"), [(False, True), (True, False)])
def test_descendants_are_killed(start: Started, stubborn: bool, own_group: bool) -> None:
    process = start(targets.start_another, stubborn=stubborn, own_group=own_group)
    other = start.started(process)
    assert psutil.pid_exists(other)
    shutdown([process], 0.2 if stubborn else 20)
    assert process.exitcode == (-signal.SIGKILL if stubborn else -signal.SIGTERM)
    assert gone(other)


def test_processes_are_stopped_where_proc_does_not_show_processes_of_other_users(
    start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise psutil.AccessDenied(1)

    process = start(targets.refuse_to_end)
    monkeypatch.setattr(psutil.Process, "children", refuse)
    shutdown([process], 0)
    assert process.exitcode == -signal.SIGKILL


@either_way
def test_interrupt_while_processes_are_asked_kills_them(
    stop: Stop, start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_self: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    process = start(targets.refuse_to_end)
    monkeypatch.setattr(stopping._Stopping, "terminate", interrupt)  # both ways call it
    with pytest.raises(KeyboardInterrupt):
        stop([process], 1000)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def test_stopped_process_is_killed(start: Started) -> None:
    process = start(targets.say_and_stay)
    child = psutil.Process(process.pid)
    child.suspend()
    # Not before it has stopped: of two signals that wait for a process which has not run since, SIGTERM is taken first.
    eventually(lambda: child.status() == psutil.STATUS_STOPPED)
    shutdown([process], 0.1)
    assert process.exitcode == -signal.SIGKILL


def test_any_process_of_multiprocessing() -> None:
    running, ended, closed, never = (SPAWN.Process(target=targets.stay) for _ in range(4))
    for process in (running, ended, closed):
        process.start()
    for process in (ended, closed):
        process.kill()
        eventually(lambda process=process: process.exitcode is not None)
    closed.close()
    for _ in range(2):
        shutdown([running, ended, closed, never])
    shutdown([])
    assert running.exitcode == -signal.SIGTERM
    running.close()
    ended.close()


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf")])
def test_bad_timeouts(timeout: float) -> None:
    with pytest.raises(ValueError, match=f"timeout must be a finite number of seconds, at least 0, not {timeout}"):
        shutdown([], timeout)


def test_process_that_cannot_be_killed_is_named(
    start: Started, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = start(targets.say_and_stay)
    monkeypatch.setattr(stopping, "KILLED_S", 0.1)
    monkeypatch.setattr(process, "kill", lambda: None)
    monkeypatch.setattr(process, "terminate", lambda: None)
    with caplog.at_level(logging.ERROR):
        shutdown([process], 0)
    assert f"killed, but not gone after 0.1 s: {process.name} (pid {process.pid})" in caplog.text
    monkeypatch.undo()


async def test_cancelled_shutdown_kills_immediately(start: Started) -> None:
    processes = [start(targets.refuse_to_end), start(targets.start_another, stubborn=True)]
    other = start.started(processes[1])
    task = asyncio.create_task(ashutdown(processes, 60))
    await asyncio.sleep(0.05)  # the loop runs meanwhile
    assert not task.done()
    began = time.monotonic()
    while not task.done():
        for each in asyncio.all_tasks() - {asyncio.current_task()}:  # as `asyncio.run` does at its end
            each.cancel()
        await asyncio.sleep(0)
    assert task.cancelled()
    assert time.monotonic() - began < 5  # instead of 60
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2
    assert gone(other)


def is_default() -> bool:
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest_asyncio.fixture
async def termination() -> AsyncIterator[Termination]:
    """Give the termination of the test's task."""
    assert is_default()
    made = Termination()
    yield made
    made.disarm()
    assert is_default()


def armed(termination: Termination) -> None:
    """Let SIGTERM cancel the calling task."""
    termination._task = asyncio.current_task()
    termination.arm()


async def test_task_that_blocks_the_loop_is_interrupted_once_by_sigterm(termination: Termination) -> None:
    armed(termination)
    termination.interrupts = True
    with pytest.raises(SystemExit) as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == TERMINATED
    termination.interrupts = False
    signal.raise_signal(signal.SIGTERM)
    await asyncio.sleep(0.01)  # no cancellation comes behind either
    assert termination.take_back()


async def test_sigterm_that_is_ignored_leaves_the_next_one_to_the_system(termination: Termination) -> None:
    armed(termination)
    termination.interrupts = True
    termination.ignored = True
    signal.raise_signal(signal.SIGTERM)
    await until(is_default)
    assert not termination.came


@pytest.mark.one_loop
async def test_handler_of_the_program_is_left_alone(termination: Termination) -> None:
    def handler(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, handler)
    try:
        armed(termination)
        assert signal.getsignal(signal.SIGTERM) is handler
        termination.disarm()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_forked_child_is_ended_by_sigterm_and_its_parent_is_not(termination: Termination) -> None:
    armed(termination)
    termination.interrupts = True
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writer, b"!")  # a signal that came before would be lost, as with any handler of Python's
        time.sleep(20)
        os._exit(0)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    await asyncio.sleep(0.01)
    assert not termination.came


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@pytest.mark.slow_on_uvloop
async def test_processes_that_are_discarded_leave_nothing() -> None:
    async with ProcessManager(say, [Job("first", ("hello",))]) as manager:
        process = manager.start_more(Job("standby_0", ("here",)))
        await until(lambda: process.exitcode is not None and manager.last_lines(process.name) == ["here"])
        manager.discard(process)
        with pytest.raises(ValueError, match="name must be the name of a process"):
            manager.last_lines(process.name)
        assert [*manager._jobs] == ["first"]
        assert manager._relay is not None
        assert [*manager._relay._named] == ["first"]
        child = manager.start_more(Job("standby_0", ("again",)))
        await manager.stop(child.name)
        assert [*manager._jobs] == ["first"]
