"""Orphans that this process adopts, as process 1 of a container or as a subreaper (prctl(2)), and reaps."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from aioshm.process.limits import start_thread

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PR_GET_CHILD_SUBREAPER = 37
_RECHECK_S = 1.0
"""How often to look for exited orphans."""


def adopt_orphans() -> None:
    """Make this process the parent of orphans among its descendants (PR_SET_CHILD_SUBREAPER), and reap them.

    Call this before engines or workers are started. The orphans of dead ones then come to this process, and none of
    them stays a zombie, except daemons: orphans that have begun a session of their own (setsid(2)). Process 1 of a
    container adopts orphans without this call. Children of other parts of the program, such as ``subprocess``, are
    left alone. Lasts until this process ends; forked children do not inherit it.

    Raises:
        OSError: The system has no subreapers (macOS).
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, f"{sys.platform} has no subreapers: process 1 adopts and reaps all orphans")
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(errno.EINVAL, "prctl(PR_SET_CHILD_SUBREAPER) failed")


def adopts_orphans() -> bool:
    """Return whether orphans among the descendants of this process come to this process."""
    if sys.platform != "linux":
        return False
    if os.getpid() == 1:
        return True
    found = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    return bool(found.value)


def leads_sessions() -> bool:
    """Return whether children have to lead sessions, by which their orphans are found, instead of process groups.

    Not in a child of ``multiprocessing``: if that dies, its children have to be in its session.
    """
    return multiprocessing.parent_process() is None and adopts_orphans()


def reap_left_by(leader: int) -> None:
    """Reap what a dead child leaves behind, if this process adopts it: the members of its session and process group.

    Takes place in a thread, which ends with the last of them.
    """
    if adopts_orphans():
        try:
            start_thread(_reap_all, leader, name="aioshm-reaps-orphans", what="reaping orphans")
        except RuntimeError:  # `OutOfThreads`, or Python is ending
            with suppress(OSError):
                _reap_exited(leader)


def reap(pid: int) -> bool:
    """Reap a child of this process if it has exited; return whether it runs. Other processes are left alone."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    except ChildProcessError:  # another process's child; or another part of the program reaps all children
        return False


def handles_child_exits(pid: int) -> bool | None:
    """Return whether a process handles, blocks or ignores SIGCHLD, as those that reap orphans do; None: not visible."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:"))]
    return any(mask >> (signal.SIGCHLD - 1) & 1 for mask in masks)


def zombies_of(parent: int) -> list[int]:
    """Return the zombies among the children of a process."""
    import psutil

    return [
        process.pid
        for process in psutil.process_iter(["ppid", "status"])
        if process.info == {"ppid": parent, "status": psutil.STATUS_ZOMBIE}
    ]


def _reap_all(leader: int) -> None:
    while True:
        with suppress(ImportError, OSError):  # no descriptor is left, perhaps to import psutil
            if not _reap_exited(leader):
                return
        time.sleep(_RECHECK_S)


def _reap_exited(leader: int) -> bool:
    """Reap orphans that have exited; return whether others run."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    if leader in pids:  # the number is used again, so the session and the group had no member left
        return False
    runs = False
    for pid in pids:
        with suppress(ProcessLookupError):
            if leader in (os.getpgid(pid), os.getsid(pid)) and reap(pid):
                runs = True
    return runs
