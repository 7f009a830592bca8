"""Processes that have few descriptors or threads left, one for each number of them.

``python starving.py`` reads lines from its standard input, ``KIND RESOURCE FIRST LAST STEP``, and for each number from
FIRST to LAST forks a process that may have that many more of RESOURCE (``descriptors``, or ``threads``): on uvloop for
odd numbers, on asyncio for the others. What came of it is written as lines of JSON, and then one with the number of
lanes that failed. Forked from a process without threads and sockets, they cost a tenth of what started ones would; and
that one of them is aborted by libzmq, or does not end, is nobody else's business.
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
from collections.abc import Callable, Coroutine, Iterable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import uvloop
import zmq
from loops import open_fds
from scenes import start_threads
from zmq.utils import garbage

from aioshm.process import loop_thread

WITHIN_S = 5.0
LATER_S = 10.0
HUNG_S = 20.0
LANES = 4  # so many numbers at the same time: most of the time is spent waiting for timeouts
LANES_OF_STARTED = 2  # of those that take steps: they start processes, which keeps a processor busy
NOBODY = 54_321 + 100 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
"""This user and those that follow have no other processes; limits of threads are a user's."""

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


Work = Callable[[float], Coroutine[Any, Any, None]]


def described(error: BaseException) -> str:
    kinds = [kind.__name__ for kind in type(error).__mro__]
    base = " AioshmError" if "AioshmError" in kinds and kinds[0] != "AioshmError" else ""
    limit = " LimitReached" if "LimitReached" in kinds else ""
    return f"{type(error).__name__}{base}{limit}: {error}"


def limit_descriptors(left: int) -> Callable[[], None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = open_fds()
    free = (number for number in range(soft) if str(number) not in open_now)
    for _ in range(left):
        next(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(free), hard))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limit_threads(left: int) -> Callable[[], None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (len(threads()) + left, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))


def threads() -> list[str]:
    return os.listdir("/proc/self/task")


async def settled(look: Callable[[], Any], wanted: Callable[[Any], bool], within_s: float = 5.0) -> Any:
    deadline = time.monotonic() + within_s
    while not wanted(found := look()) and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
        gc.collect()
    return found


async def starve(work: Work, kind_of_limit: str, left: int) -> dict[str, Any]:
    """Do some work with so few left and, if that fails, again with enough; return what came of it."""
    await start_threads()
    before = set(open_fds()), len(threads()), len(asyncio.all_tasks())
    errors: list[str] = []
    lift = (limit_descriptors if kind_of_limit == "descriptors" else limit_threads)(left)
    began = time.monotonic()
    try:
        await work(WITHIN_S)
    except Exception as error:
        errors.append(described(error))
        if os.environ.get("STARVING_TRACE"):
            traceback.print_exc()
    finally:
        lift()
    slow_s = time.monotonic() - began
    gc.collect()
    if errors:
        await work(LATER_S)
    return {"left": left, "errors": errors, "behind": await left_behind(*before), "slow": round(slow_s, 2)}


async def left_behind(descriptors: set[str], thread_count: int, task_count: int) -> list[str]:
    """Return what is there and was not before."""
    # These and the context that several ends share would last as long as the process.
    if loop_thread._shared is not None:
        loop_thread._shared.stop()
    garbage.gc.stop()
    if zmq.Context._instance is not None:
        zmq.Context._instance.term()
    left = await settled(lambda: open_fds().keys() - descriptors, lambda found: not found)
    said = [f"descriptor {number}: {open_fds().get(number)}" for number in sorted(left)]
    count = await settled(lambda: len(threads()), lambda found: found <= thread_count)
    if count > thread_count:
        said.append(f"{count - thread_count} threads")
    tasks = await settled(lambda: len(asyncio.all_tasks()), lambda found: found <= task_count)
    if tasks > task_count:
        said.append(f"{tasks - task_count} tasks")
    children = [each.name() for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return said + [f"process {name}" for name in children if name]


def fork(work: Callable[[], None]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    faulthandler.dump_traceback_later(HUNG_S - 4, exit=False)
    try:
        work()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)
    sys.exit(0)  # as any program: this is where a context that somebody has forgotten would wait for ever


def become(user: int) -> None:
    """Be another user, with a directory for its sockets that `main` removes."""
    directory = os.path.join(os.environ["STARVING_DIR"], str(user))
    os.makedirs(directory, mode=0o700, exist_ok=True)
    os.chown(directory, user, user)
    os.environ["AIOSHM_RUNTIME_DIR"] = os.environ["XDG_RUNTIME_DIR"] = directory
    os.setgid(user)
    os.setuid(user)


def run_one(work: Work, loop: str, kind_of_limit: str, left: int) -> dict[str, Any]:
    """Return what came of it, or how the process ended."""
    told, tell = os.pipe()

    def starving() -> None:
        if kind_of_limit == "threads":
            become(NOBODY + left)
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            line = runner.run(starve(work, kind_of_limit, left))
        os.write(tell, json.dumps(line).encode())

    pid = fork(starving)
    os.close(tell)
    status = None
    deadline = time.monotonic() + HUNG_S
    while status is None and time.monotonic() < deadline:
        done, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if done else None
        if status is None:
            time.sleep(0.002)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with open(told) as result:
        text = result.read()
    line: dict[str, Any] = json.loads(text) if text else {"left": left}
    return line if status == 0 else line | {"ended": f"status {status}"}


def sweep(work: Work, kind_of_limit: str, numbers: Iterable[int], told: int) -> None:
    for left in numbers:
        line = run_one(work, "uvloop" if left % 2 else "asyncio", kind_of_limit, left)
        os.write(told, f"{json.dumps(line)}\n".encode())


def sweep_all(work: Work, kind_of_limit: str, numbers: range, told: int) -> int:
    """Sweep in several lanes; return how many of them failed."""
    directory = os.environ["STARVING_DIR"] = tempfile.mkdtemp(prefix="aioshm-")
    os.chmod(directory, 0o755)
    lanes: list[int] = []
    count = min(LANES if numbers.step == 1 else LANES_OF_STARTED, len(numbers))
    for lane in range(count):
        pid = os.fork()
        if pid == 0:
            try:
                sweep(work, kind_of_limit, numbers[lane::count], told)
            except Exception:
                traceback.print_exc()
                os._exit(3)
            os._exit(0)
        lanes.append(pid)
    failed = [pid for pid in lanes if os.waitpid(pid, 0)[1]]
    shutil.rmtree(directory)
    return len(failed)


def main() -> None:
    from starved_kinds import KINDS

    warnings.simplefilter("ignore")
    resource_tracker.ensure_running()  # one for all; it would last as long as each of the processes
    wanted, told = os.fdopen(os.dup(0)), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    gc.collect()
    gc.freeze()  # what the imports made: each process would look through it, and so copy it, again and again
    for line in wanted:
        name, kind_of_limit, *numbers = line.split()
        first, last, step = map(int, numbers)
        failed = sweep_all(KINDS[name], kind_of_limit, range(first, last + 1, step), told)
        os.write(told, f"{failed}\n".encode())


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
