"""Whoever is killed, what it has started is gone at once, and what that has started, too."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from managed import gone
from support import eventually

from aioshm.engine import die_with_parent
from aioshm.process import parent

WITHIN_S = 2.0
"""The promise."""

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own way is Linux'")


class Family:
    """A front end and everything below it, by their roles."""

    def __init__(self, front_end: subprocess.Popen[str]) -> None:
        self.front_end = front_end
        self.pids: dict[str, int] = {}

    def wait_for(self, *roles: str) -> None:
        assert self.front_end.stdout is not None
        while not set(roles) <= set(self.pids):
            line = self.front_end.stdout.readline()
            assert line, f"it ended; there were {self.pids}"
            role, _, pid = line.rpartition(" ")
            self.pids[role] = int(pid)

    def kill(self, role: str) -> None:
        os.kill(self.pids[role], signal.SIGKILL)

    def gone(self, *roles: str) -> bool:
        self.front_end.poll()
        return all(gone(self.pids[role]) for role in roles)


@contextmanager
def family(way: str) -> Iterator[Family]:
    script = Path(__file__).with_name("family.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(script), way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as front_end:
        found = Family(front_end)
        try:
            yield found
        finally:
            front_end.kill()
            for role in [*found.pids]:
                if found.pids[role] and not found.gone(role):
                    found.kill(role)


ROLES = ["front end", "engine", "worker", "helper"]


@pytest.mark.parametrize("level", [0, 2], ids=["front end", "worker"])
def test_what_is_below_goes_along(level: int) -> None:
    with family("tree") as found:
        found.wait_for(*ROLES)
        found.kill(ROLES[level])
        eventually(lambda: found.gone(*ROLES[level:]), f"the end of {ROLES[level:]}", WITHIN_S)
        assert not any(found.gone(role) for role in ROLES[:level])


@pytest.mark.parametrize("way", [pytest.param("engine", marks=on_linux), "slow", "thread"])
def test_engine_goes_along_that_is_stopped_or_still_imports_or_whose_starting_thread_has_ended(way: str) -> None:
    with family(way) as found:
        found.wait_for("front end", "engine", *(["thread"] if way == "thread" else []))
        if way == "engine":
            os.kill(found.pids["engine"], signal.SIGSTOP)
        else:
            time.sleep(0.2)  # the kernel's own way would have ended it with the thread
        assert not found.gone("engine")
        found.kill("front end")
        eventually(lambda: found.gone("engine"), "the end of the engine", WITHIN_S)


def test_program_that_did_not_stop_its_process_ends_and_kills_it() -> None:
    with family("forgotten") as found:
        found.wait_for("engine")
        assert found.front_end.wait(60) == 0
        eventually(lambda: found.gone("engine"), "the end of the engine", WITHIN_S)


# The ways one by one, in processes of other kinds


def _between(method: str, lost: list[str], ends: Connection) -> None:
    """Start a process that depends on this one, in a way of its own, and say which it is."""
    context = multiprocessing.get_context(method)
    child = context.Process(target=_depend, args=(lost, ends))
    child.start()
    time.sleep(100)


def _depend(lost: list[str], ends: Connection) -> None:
    for name in lost:
        setattr(parent, name, lambda _: [])
    die_with_parent()
    die_with_parent()
    ends.send((os.getpid(), threading.active_count()))
    time.sleep(100)


@pytest.mark.parametrize(
    ("method", "lost"),
    [
        ("fork", []),
        ("fork", ["_ask_the_kernel"]),
        ("fork", ["_ask_the_kernel", "_pidfd_of"]),
        ("spawn", ["_started_by_main_thread"]),
        ("forkserver", []),
    ],
)
def test_each_way_alone(method: str, lost: list[str]) -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        between = multiprocessing.get_context("fork").Process(target=_between, args=(method, lost, theirs))
        between.start()
        try:
            assert ours.poll(20)
            pid, threads = ours.recv()
            assert threads == 2
            assert not gone(pid)
            between.kill()
            eventually(lambda: gone(pid), "the end of the process", WITHIN_S)
        finally:
            between.kill()
            between.join()
            between.close()


def test_a_parent_that_is_gone_already() -> None:
    program = "import sys, time; from aioshm.engine import die_with_parent; die_with_parent({}); print('alive')"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid, code, said in ((ended.pid, 1, ""), (os.getpid(), 0, "alive\n")):
        result = subprocess.run([sys.executable, "-c", program.format(pid)], capture_output=True, text=True)
        assert (result.returncode, result.stdout, result.stderr) == (code, said, "")


def test_the_file_stands_alone() -> None:
    names = "[name for name in sys.modules if name.split('.')[0] == 'aioshm']"
    program = f"import runpy, sys; runpy.run_path({parent.__file__!r}); print({names})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
