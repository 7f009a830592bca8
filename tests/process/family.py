"""A front end with an engine, its worker, and a helper of that: ``python family.py WAY``. Says who they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

LONG_S = 100


def say(role: str, pid: int) -> None:
    os.write(1, f"{role} {pid}\n".encode())


def engine(**_: Any) -> None:
    from aioshm.engine import die_with_parent

    say("engine", os.getpid())
    if os.fork() == 0:
        die_with_parent()
        say("worker", os.getpid())
        program = "import time; from aioshm.engine import die_with_parent as d; d(); print('helper', flush=True); "
        helper = subprocess.Popen([sys.executable, "-c", f"{program}time.sleep({LONG_S})"], stdout=subprocess.PIPE)
        assert helper.stdout is not None
        helper.stdout.readline()
        say("helper", helper.pid)
    time.sleep(LONG_S)


def idle(**_: Any) -> None:
    say("engine", os.getpid())
    time.sleep(LONG_S)


def stubborn(**_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    idle()


def start(target: Any) -> Any:
    from aioshm.engine import CoreEngineProcManager

    return CoreEngineProcManager(target, 1)


def main() -> None:
    say("front end", os.getpid())
    way = sys.argv[1]
    if way == "forgotten":
        from aioshm.process.child import Child

        child = Child(stubborn, "engine")
        child.start()
        say("engine", child.pid or 0)
        return
    if way == "thread":  # one that has ended by the time
        kept: list[Any] = []
        thread = threading.Thread(target=lambda: kept.append(start(idle)))
        thread.start()
        thread.join()
        say("thread", 0)
    elif way == "slow":
        kept = [start(idle)]
        say("engine", kept[0].processes[0].pid)
    else:
        kept = [start(engine if way == "tree" else idle)]
    time.sleep(LONG_S)


if __name__ == "__main__":
    main()
elif sys.argv[1] == "slow":  # the engine imports the front end's main module
    time.sleep(LONG_S)
