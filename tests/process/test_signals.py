"""Signals to children: only a process that runs gets one, and only one that handles it is asked for its stacks."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import eventually

from aioshm.process import progress
from aioshm.process.child import Child
from aioshm.process.progress import BUSY, STACK_SIGNAL
from aioshm.process.stacks import NOT_INSTALLED
from aioshm.process.stalls import culprit

LONG_S = 100


def hang() -> None:
    progress.own().enter(BUSY)
    time.sleep(LONG_S)


def hang_without_the_handler() -> None:
    progress.own()
    faulthandler.unregister(STACK_SIGNAL)
    hang()


def hang_in_another_program() -> None:
    progress.own().enter(BUSY)
    os.execvp("sleep", ["sleep", str(LONG_S)])


def started(target: Callable[[], None]) -> Child:
    child = Child(target, "child")
    child.start()
    assert child.progress is not None
    cell = child.progress
    eventually(lambda: cell.read().phase == BUSY)
    return child


def test_process_is_not_reaped_while_a_signal_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    child = started(hang)
    pid = child.pid
    kill = os.kill
    reaped: list[bool] = []

    def exit_before_the_signal(pid: int, number: int) -> None:
        kill(pid, signal.SIGKILL)
        reaper = threading.Thread(target=lambda: eventually(lambda: child.exitcode is not None))
        reaper.start()
        reaper.join(0.1)
        reaped.append(not Path(f"/proc/{pid}").exists())

    monkeypatch.setattr(os, "kill", exit_before_the_signal)
    child.end("for a test")
    monkeypatch.undo()
    child.join()
    assert reaped == [False], f"pid {pid} may be another process's by now"
    assert (child.exitcode, child.reason) == (-signal.SIGKILL, "for a test")
    child.release()


def test_process_that_has_exited_by_itself_was_not_ended() -> None:
    child = Child(time.time, "child")
    child.end("before its start")
    child.start()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    child.end("for a test")
    assert (child.exitcode, child.reason) == (0, "")
    child.release()


@pytest.mark.parametrize("way", [hang_without_the_handler, hang_in_another_program])
def test_process_without_the_handler_is_not_asked_for_its_stacks(
    way: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioshm.process.stalls.stacks_of", lambda pid: ((), NOT_INSTALLED))
    child = started(way)
    if way is hang_in_another_program:
        eventually(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "sleep\n")
    found = culprit(child)
    assert child.exitcode is None
    assert (found.line, found.hint) == (None, NOT_INSTALLED)
    child.kill()
    child.join()
    assert culprit(child).process.state == "gone"
    child.release()
