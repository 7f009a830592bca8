"""Processes that have ends, fork, and look how the child ends and whether their own ends go on.

``python forking.py KIND LOOP-HOW...``, where KIND is one of `scenes.SCENES`, and HOW is what the child does: ``exit``
and ``aclose`` after the loop has stopped, ``inside`` to leave through the running loop, ``mp`` as a child of
``multiprocessing``, ``del`` to forget them. Each LOOP-HOW has a process of its own, forked from this one before it has
threads and sockets.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import time
import warnings
from typing import Any

import uvloop
from scenes import SCENES, close

import aioshm.blocking
from aioshm import RoleError

ENDS_WITHIN_S = 15
HUNG_S = 30
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
    signal.alarm(ENDS_WITHIN_S)
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
    print("the child ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


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


def main(kind: str, *cases: str) -> None:
    multiprocessing.resource_tracker.ensure_running()  # one for all; it would last as long as each of the processes
    gc.collect()
    gc.freeze()
    for case in cases:
        print(case, flush=True)
        pid = os.fork()
        if pid == 0:
            faulthandler.register(signal.SIGALRM, chain=True)  # no thread of its own, which its child would wait for
            signal.alarm(HUNG_S)
            run_one(kind, *case.split("-", 1))
            return
        print("the parent ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
