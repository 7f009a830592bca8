"""Processes that have few descriptors or threads left: ``python starving.py RESOURCE NUMBERS``, where NUMBERS is JSON.

For each kind of `scenes.SCENES` in NUMBERS and each of its numbers, a forked process may have that many more of
RESOURCE (``descriptors`` or ``threads``) while it makes and uses a scene, on uvloop for odd numbers; then it does so
with enough of everything. A kind ends with the third number in a row that is enough. The results are lines of JSON.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any

import psutil
import uvloop
import zmq
from scenes import SCENES, Scene, close, warm_up
from zmq.utils import garbage

from aioshm import LimitReached
from aioshm.process import loop_thread

SOON_S = 0.6
LATER_S = 10.0
HUNG_S = 60.0
LANES = 6  # kinds at the same time: most of the time is spent waiting for timeouts
ENOUGH = 3
NOBODY = 54_321 + 100 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
"""This user and those that follow have no other processes; limits of threads are a user's."""


class Subject:
    """Makes and uses a scene, first with few of a resource, then with enough.

    Attributes:
        errors: The errors while few were left.
        slow_s: How long that took.
    """

    def __init__(self, scene: Scene, kind_of_limit: str, left: int, soon_s: float) -> None:
        self.errors: list[str] = []
        self.slow_s = 0.0
        self._scene = scene
        self._limit = limit_descriptors if kind_of_limit == "descriptors" else limit_threads
        self._left = left
        self._soon_s = soon_s

    async def run(self) -> list[str]:
        """Return what was left behind."""
        await warm_up()
        before = open_descriptors(), len(threads()), len(asyncio.all_tasks())
        ends: list[Any] = []
        made = False
        with self.starving():
            await self._scene.make(ends, self._soon_s)
            made = True
            await self._scene.use(ends, self._soon_s)
        if self.errors and not (made and self._scene.goes_on):
            await close(ends)
            await self._scene.make(ends, LATER_S)
        if self.errors:
            await self._scene.use(ends, LATER_S)
        await close(ends)
        # These and the context that several ends share would last as long as the process.
        if loop_thread._shared is not None:
            loop_thread._shared.stop()
        garbage.gc.stop()
        if zmq.Context._instance is not None:
            zmq.Context._instance.term()
        return await left_behind(*before)

    @contextmanager
    def starving(self) -> Iterator[None]:
        """Have few left within the block; its error is noted."""
        lift = self._limit(self._left)
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            kind = "LimitReached" if isinstance(error, LimitReached) else type(error).__name__
            self.errors.append(f"{kind}: {error}")
            if os.environ.get("STARVING_TRACE"):
                traceback.print_exc()
            error.__traceback__ = None
            del error
        finally:
            lift()
            self.slow_s = time.monotonic() - began
        gc.collect()


def limit_descriptors(left: int) -> Callable[[], None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = open_descriptors()
    free = (number for number in range(soft) if number not in open_now)
    for _ in range(left):
        next(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(free), hard))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limit_threads(left: int) -> Callable[[], None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (len(threads()) + left, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))


def open_descriptors() -> set[int]:
    numbers = {int(name) for name in os.listdir("/proc/self/fd")}
    return {number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")}


def threads() -> list[str]:
    return os.listdir("/proc/self/task")


async def left_behind(descriptors: set[int], count: int, tasks: int) -> list[str]:
    """Return what there is more than before, once it has had time to go."""
    deadline = time.monotonic() + 5
    while True:
        gc.collect()
        left = [f"descriptor {number}: {target(number)}" for number in open_descriptors() - descriptors]
        if len(threads()) > count:
            left.append(f"{len(threads()) - count} threads")
        if len(asyncio.all_tasks()) > tasks:
            left.append(f"{len(asyncio.all_tasks()) - tasks} tasks")
        children = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
        left += [f"process {each.pid}" for each in children]
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.005)


def target(number: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{number}")
    return "?"


def become(user: int) -> None:
    """Be another user, with a directory for its sockets that `main` removes."""
    directory = os.path.join(os.environ["STARVING_DIR"], str(user))
    os.makedirs(directory, mode=0o700, exist_ok=True)
    os.chown(directory, user, user)
    os.environ["AIOSHM_RUNTIME_DIR"] = os.environ["XDG_RUNTIME_DIR"] = directory
    os.setgid(user)
    os.setuid(user)


def be_subject(kind: str, kind_of_limit: str, left: int, soon_s: float, tell: int) -> None:
    faulthandler.dump_traceback_later(HUNG_S - 4, exit=False)
    if kind_of_limit == "threads":
        become(NOBODY + 40 * sorted(SCENES).index(kind) + left)
    subject = Subject(SCENES[kind], kind_of_limit, left, soon_s)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if left % 2 else asyncio.new_event_loop) as runner:
        behind = runner.run(subject.run())
    result = {"errors": subject.errors, "behind": behind, "slow_s": round(subject.slow_s, 2)}
    os.write(tell, json.dumps(result).encode())


def run_one(kind: str, kind_of_limit: str, left: int, soon_s: float) -> dict[str, Any]:
    """Return what came of one number, in a process of its own: libzmq may abort it."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            be_subject(kind, kind_of_limit, left, soon_s, tell)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(3)
        sys.exit(0)  # as any program: this is where a forgotten context would wait for ever
    os.close(tell)
    result: dict[str, Any] = {"kind": kind, "left": left, "ended": "it did not end"}
    deadline = time.monotonic() + HUNG_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            result["ended"] = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.002)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.set_blocking(told, False)
    with open(told) as said, suppress(BlockingIOError, ValueError):
        result |= json.loads(said.read())
    return result


def run_kind(kind: str, kind_of_limit: str, numbers: list[int], told: int) -> None:
    enough = 0
    for left in numbers:
        result = run_one(kind, kind_of_limit, left, SOON_S)
        if any(not error.startswith("LimitReached") for error in result.get("errors", ())):  # or the machine is busy
            result = run_one(kind, kind_of_limit, left, 6 * SOON_S)
        os.write(told, f"{json.dumps(result)}\n".encode())
        enough = 0 if result.get("errors", True) else enough + 1
        if enough == ENOUGH:
            return


def main(kind_of_limit: str, text: str) -> None:
    waiting: dict[str, list[int]] = json.loads(text)
    warnings.simplefilter("ignore")
    resource_tracker.ensure_running()  # one for all; it would last as long as each of the processes
    told = os.dup(1)
    os.dup2(2, 1)
    directory = os.environ["STARVING_DIR"] = tempfile.mkdtemp(prefix="aioshm-")
    os.chmod(directory, 0o755)
    gc.collect()
    gc.freeze()  # objects of the imports: each process would look through them, and so copy them
    lanes = 0
    while waiting or lanes:
        while waiting and lanes < LANES:
            kind = next(iter(waiting))
            numbers = waiting.pop(kind)
            lanes += 1
            if os.fork() == 0:
                run_kind(kind, kind_of_limit, numbers, told)
                os._exit(0)
        os.wait()
        lanes -= 1
    shutil.rmtree(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
