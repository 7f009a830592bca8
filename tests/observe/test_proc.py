from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import eventually

from aioshm.observe import proc
from aioshm.observe.proc import (
    GONE,
    NoProc,
    check_proc,
    is_own_process,
    parse_command,
    parse_inner_pid,
    parse_stat,
    process_info,
    system_call,
    wait_channel,
)
from aioshm.observe.scan import find_segments

STAT = "77 (a (bad) name) {} 1 77 77 0 -1 4194304 100 0 0 0 250 150 0 0 20 0 1 0 4242 0 0"


@pytest.mark.parametrize(
    ("letter", "state"),
    [("R", "running"), ("S", "sleeping"), ("D", "waiting for a disk"), ("T", "stopped"), ("t", "traced"),
     ("Z", "zombie"), ("X", "gone"), ("I", "sleeping"), ("?", "unknown")],
)  # fmt: skip
def test_stat(letter: str, state: str) -> None:
    assert parse_stat(STAT.format(letter)) == (state, 400 / os.sysconf("SC_CLK_TCK"))


def test_the_innermost_pid() -> None:
    assert parse_inner_pid("Name:\tx\nNSpid:\t4711\t12\t1\nNSpgid:\t1\n", 4711) == 1
    assert parse_inner_pid("Name:\tx\n", 4711) == 4711, "an old kernel does not say"


@pytest.mark.parametrize(
    ("cmdline", "command"),
    [
        (b"/usr/bin/python3\0-m\0server\0", "python3 -m server"),
        (b"python\0-c\0import time\ntime.sleep(1)\0", "python -c import time time.sleep(1)"),
        (b"", ""),
        (b"x\0\x1b[31mred\xff\0", "x ?[31mred\ufffd"),
        (b"x\0" + b"y" * 500, "x " + "y" * 195 + "..."),
    ],
)
def test_command(cmdline: bytes, command: str) -> None:
    assert parse_command(cmdline) == command


@given(st.binary())
def test_any_command(cmdline: bytes) -> None:
    command = parse_command(cmdline)
    assert len(command) <= 200
    assert command.isprintable()


def test_this_process() -> None:
    info = process_info(os.getpid())
    assert (info.pid, info.state) == (os.getpid(), "running")
    assert info.inner_pid > 0
    assert info.cpu_s > 0
    assert "python" in info.command or "pytest" in info.command
    assert is_own_process(os.getpid())


def test_a_process_that_is_stopped_and_then_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        eventually(lambda: process_info(child.pid).state == "sleeping" and "nanosleep" in wait_channel(child.pid))
        if os.uname().machine == "x86_64":
            assert system_call(child.pid) == "clock_nanosleep"
        child.send_signal(signal.SIGSTOP)
        eventually(lambda: process_info(child.pid).state == "stopped")
    finally:
        child.kill()
        child.wait()
    assert process_info(child.pid).state == GONE.state
    assert process_info(child.pid).pid == child.pid
    assert (wait_channel(child.pid), system_call(child.pid)) == ("", "")


def test_process_of_another_user_is_not_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert not is_own_process(os.getpid())
    assert find_segments()[1] > 0, "counted as skipped"


def test_a_system_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(proc, "PROC", tmp_path)
    with pytest.raises(NoProc, match="no /proc on this system"):
        check_proc()
