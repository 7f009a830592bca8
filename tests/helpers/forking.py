"""Processes that have ends, fork, and look how the child ends and whether their own ends go on.

``python forking.py KIND LOOP-HOW...``, where KIND is one of `scenes.SCENES`, and HOW is what the child does: ``exit``
and ``aclose`` after the loop has stopped, ``inside`` to leave through the running loop, ``mp`` as a child of
``multiprocessing``, ``del`` to forget them. Each LOOP-HOW has a process of its own, forked from this one before it has
threads and sockets. The results are lines of JSON.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from typing import Any

import uvloop
from scenes import SCENES, close

import aioshm.blocking
from aioshm import RoleError

AT_A_TIME = 3  # so many processes: most of the time is spent waiting
ENDS_WITHIN_S = 15.0
HUNG_S = 30.0
AT_ONCE_S = 5.0  # on a machine that has much else to do; what hung, hung for ever


async def close_in_child(ends: list[Any]) -> None:
    for end in reversed(ends):
        try:
            await close([end])
        except RoleError as error:
            if "process" not in str(error):
                raise


def be_child(ends: list[Any], how: str) -> None:
    began = time.monotonic()
    if how.startswith("aclose") and isinstance(ends[0], aioshm.blocking.MessageQueue):
        for end in ends:
            try:
                end.close()
            except RoleError as error:
                if "forked" not in str(error):
                    raise
    elif how.startswith("aclose"):
        asyncio.run(close_in_child(ends))
    elif how.startswith("del"):
        ends.clear()
        gc.collect()
    print(f"the child is done within {AT_ONCE_S} s: {time.monotonic() - began < AT_ONCE_S}", flush=True)
    sys.exit(0)


def wait_for(pid: int) -> None:
    deadline = time.monotonic() + ENDS_WITHIN_S
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            print("the child hangs", flush=True)
            return
        time.sleep(0.005)
    print("the child ended with", os.waitstatus_to_exitcode(ended[1]), flush=True)


async def fork_inside(ends: list[Any], how: str) -> None:
    if how.endswith("-mp"):
        process = multiprocessing.get_context("fork").Process(target=be_child, args=(ends, how))
        process.start()
        assert process.pid is not None
        wait_for(process.pid)
        return
    pid = os.fork()
    if pid == 0:
        be_child(ends, how)  # SystemExit goes through the loop
    wait_for(pid)


def run_one(kind: str, loop: str, how: str) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # other threads run
    scene = SCENES[kind]
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop)
    ends: list[Any] = []
    runner.run(scene.make(ends, 10))
    if how in ("inside", "exit-mp", "aclose-mp"):
        runner.run(fork_inside(ends, how))
    else:
        pid = os.fork()
        if pid == 0:
            be_child(ends, how)
        wait_for(pid)
    runner.run(scene.use(ends, 10))
    print("the parent goes on", flush=True)
    runner.run(close(ends))
    runner.close()


class Case:
    """A process of its own for one way, and what it says.

    Raises:
        SystemExit: In that process, when it is done: it ends as any program does.
    """

    def __init__(self, kind: str, case: str) -> None:
        self._case = case
        self._deadline = time.monotonic() + HUNG_S
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 -- `result` closes them
        self._pid = os.fork()
        if self._pid == 0:
            for standard, file in enumerate(self._files, 1):
                os.dup2(file.fileno(), standard)
            faulthandler.register(signal.SIGUSR1)  # no thread of its own, which its child would wait for in vain
            try:
                run_one(kind, *case.split("-", 1))
            except Exception:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(3)
            sys.exit(0)

    def result(self) -> dict[str, Any] | None:
        """Return what came of it, or None while it runs; what hangs is killed."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid:
            if time.monotonic() > self._deadline:
                os.kill(self._pid, signal.SIGUSR1)
                time.sleep(0.5)
                os.kill(self._pid, signal.SIGKILL)
                self._deadline += HUNG_S
            return None
        texts = []
        for file in self._files:
            with file:
                file.seek(0)
                texts.append(file.read().decode())
        code = os.waitstatus_to_exitcode(status)
        return {"case": self._case, "code": code, "said": texts[0].splitlines(), "complaints": texts[1]}


def main(kind: str, *cases: str) -> None:
    multiprocessing.resource_tracker.ensure_running()  # one for all; it would last as long as each of the processes
    gc.collect()
    gc.freeze()
    waiting, running = [*cases], []
    while waiting or running:
        while waiting and len(running) < AT_A_TIME:
            running.append(Case(kind, waiting.pop(0)))
        for case in [*running]:
            if (result := case.result()) is not None:
                running.remove(case)
                print(json.dumps(result), flush=True)
        time.sleep(0.005)


if __name__ == "__main__":
    main(*sys.argv[1:])
