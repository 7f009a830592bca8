"""A supervisor whose engines are killed or stopped, and leave processes behind: ``orphanage.py WAY DIRECTORY``.

Prints a JSON object: the zombies that are left, and what became of children that the supervisor started by itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from support import eventually

LONG_S = 100
OWN_CODE = 7
ENGINES = 6


def worker(up: str) -> None:
    """Start a process in the worker's own group, which outlives the worker a little."""
    subprocess.Popen(["sleep", "0.2"])
    Path(up).touch()
    time.sleep(LONG_S)


def engine(dp_rank: int, local_dp_rank: int, directory: str) -> None:
    """Start processes in the group of the engine, some engines a worker in a group of its own, the first a session."""
    for _ in range(2):
        subprocess.Popen(["sleep", str(LONG_S)])
    if dp_rank == 0:
        subprocess.Popen(["sleep", str(LONG_S)], start_new_session=True)
    if dp_rank % 4 < 2:
        from aioshm.process.manager import Job, ProcessManager

        up = Path(directory, f"worker of {dp_rank}")
        manager = ProcessManager(worker, [Job("worker", (str(up),))])  # noqa: F841 -- its end would stop the worker
        eventually(up.exists)
    Path(directory, f"{dp_rank}").touch()
    time.sleep(LONG_S)


def children() -> dict[int, str]:
    """Return the states of the children of this process."""
    processes = psutil.process_iter(["ppid", "status"])
    return {each.pid: each.info["status"] for each in processes if each.info["ppid"] == os.getpid()}


def start_own() -> list[subprocess.Popen[bytes]]:
    """Start processes of this program, in its own group, in a group of their own, and in a session of their own."""
    options: list[dict[str, Any]] = [{}, {"process_group": 0}, {"start_new_session": True}]
    return [subprocess.Popen(["sh", "-c", f"exit {OWN_CODE}"], **each) for each in options]


def main(way: str, directory: str) -> None:
    from aioshm.engine import CoreEngineProcManager
    from aioshm.process import adopt_orphans

    if way == "subreaper":
        adopt_orphans()
    assert (os.getpid() == 1) is (way == "process 1")
    own = start_own()
    with CoreEngineProcManager(engine, ENGINES, directory=directory, shutdown_timeout=30) as manager:
        eventually(lambda: all(Path(directory, f"{rank}").exists() for rank in range(ENGINES)))
        for process in manager.processes[1:]:  # the first one is stopped
            os.kill(process.pid or 0, signal.SIGKILL)
            own += start_own()
        eventually(lambda: len(manager.finished_procs()) == ENGINES - 1)
    pids = {process.pid for process in own}
    tracker = 1  # of multiprocessing
    eventually(lambda: len(set(children()) - pids) <= tracker)
    left = {pid: state for pid, state in children().items() if pid not in pids and state == psutil.STATUS_ZOMBIE}
    print(json.dumps({"zombies": left, "own": sorted({process.wait() for process in own})}))


if __name__ == "__main__":
    main(*sys.argv[1:])
