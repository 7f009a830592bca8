"""Stops processes and their descendants, within one deadline for all; and SIGTERM inside a process that is stopped.

Orphans that this process adopts, as process 1 of a container or as a subreaper (prctl(2)), are reaped.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Generator, Iterable
from contextlib import closing, suppress
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from aioshm.arguments import check_seconds
from aioshm.process.background import give_back
from aioshm.process.limits import start_thread

if TYPE_CHECKING:  # the import takes 12 ms
    import psutil

SHUTDOWN_TIMEOUT_S = 5.0
"""How long processes may take to exit after SIGTERM."""
KILLED_S = 5.0
"""How long killed processes may take to be gone; a process with much memory or a device takes a moment."""
TERMINATED = 128 + signal.SIGTERM
"""The code of the SystemExit that SIGTERM raises, as shells name the signal."""

_RECHECK_S = 0.005
_ORPHANS_RECHECK_S = 1.0
"""How often to look for exited orphans."""
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_subreaper = 0
"""The process that has called `adopt_orphans`: a forked child has not."""

_log = logging.getLogger("aioshm.engine")


def shutdown(procs: Iterable[BaseProcess], timeout: float = SHUTDOWN_TIMEOUT_S) -> None:
    """Stop processes: send SIGTERM to all, then kill processes that still run after the timeout, and all descendants.

    Blocks; see `ashutdown`. An exception of a signal handler, such as Ctrl-C, kills all of them immediately, and is
    raised then.

    Args:
        procs: The processes; processes that have exited, or were never started, are ignored.
        timeout: Seconds that all of them together may take; 0 kills them immediately.
    """
    stopping = _Stopping(procs, timeout)
    with closing(stopping.steps()) as steps:
        for _ in steps:
            time.sleep(_RECHECK_S)


async def ashutdown(procs: Iterable[BaseProcess], timeout: float = SHUTDOWN_TIMEOUT_S) -> None:
    """Stop processes as `shutdown` does, without blocking the loop.

    Cancelling this kills the processes; the call returns, cancelled, when they are gone.
    """
    stopping = _Stopping(procs, timeout)
    cancelled: asyncio.CancelledError | None = None
    if stopping.procs:
        try:
            await give_back(stopping.find_descendants)
        except asyncio.CancelledError as error:
            cancelled = error
            stopping.hurry = True
    with closing(stopping.steps()) as steps:
        for _ in steps:
            try:
                await asyncio.sleep(_RECHECK_S)
            except asyncio.CancelledError as error:
                cancelled = error
                stopping.hurry = True
    if cancelled is not None:
        raise cancelled


class _Stopping:
    """The processes that one call stops, and their descendants."""

    def __init__(self, procs: Iterable[BaseProcess], timeout: float) -> None:
        self._timeout = check_seconds("timeout", timeout, zero=True)
        self.procs = [proc for proc in procs if _runs(proc)]
        self.hurry = False  # set: kill the processes now
        self._descendants: set[psutil.Process] = set()
        self._found = False

    def steps(self) -> Generator[None]:
        """Stop the processes; the caller sleeps for `_RECHECK_S` at each step. Closing this kills them."""
        try:
            if not self._found:
                self.find_descendants()
            self.terminate()
            deadline = time.monotonic() + self._timeout
            while self._running() and not self.hurry and time.monotonic() < deadline:
                yield
        finally:
            self._kill()
        killed = self._descendants
        deadline = time.monotonic() + KILLED_S
        while (self._running() or self._descendants_run()) and time.monotonic() < deadline:
            yield
        for process in killed:
            if process.is_running():  # the same process, and no later one with its pid
                reap(process.pid)
        left = [f"{proc.name} (pid {proc.pid})" for proc in self._running()]
        left += [f"pid {process.pid}" for process in self._descendants]
        if left:
            _log.error("killed, but not gone after %s s: %s", KILLED_S, ", ".join(left))

    def find_descendants(self) -> None:
        """Note the descendants of the processes: unknown once the processes have exited."""
        self._found = True
        self._descendants |= _descendants({proc.pid for proc in self._running() if proc.pid is not None})

    def terminate(self) -> None:
        for proc in self._running():
            proc.terminate()

    def _kill(self) -> None:
        self.find_descendants()
        for proc in self._running():  # parents first, so that they start no more processes
            proc.kill()
        for process in self._descendants:
            with suppress(ProcessLookupError, PermissionError):
                if process.is_running():  # the same process, and no later one with its pid
                    os.kill(process.pid, signal.SIGKILL)

    def _descendants_run(self) -> bool:
        self._descendants = {process for process in self._descendants if _exists(process)}
        return bool(self._descendants)

    def _running(self) -> list[BaseProcess]:
        return [proc for proc in self.procs if proc.exitcode is None]


def _runs(proc: BaseProcess) -> bool:
    try:
        return proc.is_alive()
    except ValueError:  # the process object was closed
        return False


def _descendants(pids: Collection[int]) -> set[psutil.Process]:
    """Return the descendants of some children of this process."""
    if not pids:
        return set()
    inside = set(pids)
    found: set[psutil.Process] = set()
    try:
        import psutil
    except (ImportError, OSError):  # no descriptor is left; each child leads a group, which is killed with the child
        return found
    try:
        below = psutil.Process().children(recursive=True)
    except (psutil.Error, OSError):  # the same; or /proc does not show processes of other users (hidepid=1, proc(5))
        return found
    for process in below:  # parents come before their children
        try:
            if process.ppid() in inside:
                inside.add(process.pid)
                found.add(process)
        except (psutil.Error, OSError):
            continue
    return found


def _exists(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Termination:
    """Makes SIGTERM cancel the task that creates this, so that the task cleans up, instead of ending the process.

    Only in the main thread, and if SIGTERM would end the process otherwise.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._pid = os.getpid()
        self._armed = False
        self._raised = False
        self.interrupts: bool = False  # SIGTERM raises SystemExit: in a plain function that blocks the loop
        self.ignored: bool = False  # the first SIGTERM does nothing: the task ends by itself
        self.came: bool = False  # SIGTERM has ended the task, or is about to

    def arm(self) -> None:
        """Begin. Idempotent."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
            self._armed = True

    def disarm(self) -> None:
        """End. Idempotent."""
        if self._armed:
            self._armed = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def raise_again(self) -> None:
        """Raise the SystemExit again: the function may have caught it, and Python drops it in destructors."""
        if self._raised:
            raise SystemExit(TERMINATED)

    def take_back(self) -> bool:
        """Return whether SIGTERM, and nothing else, ended the task; uncancel the task then. Call this once."""
        assert self._task is not None
        return self.came and (self._raised or self._task.uncancel() == 0)

    def _handle(self, _number: int, _frame: object) -> None:
        if self._pid != os.getpid():  # a forked child
            self.disarm()
            signal.raise_signal(signal.SIGTERM)
        elif self.ignored:
            self.disarm()
        elif self.interrupts and not self.came:
            self.came = True
            self._raised = True
            raise SystemExit(TERMINATED)
        else:
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self.ignored:
            self.disarm()
        elif not self.came:  # only now: the task may have begun to clean up since the signal
            self.came = True
            assert self._task is not None
            self._task.cancel("SIGTERM")


# Orphans


def adopt_orphans() -> None:
    """Make this process the parent of orphans among its descendants (PR_SET_CHILD_SUBREAPER), and reap them.

    Call this before engines or workers are started. The orphans of dead ones then come to this process, and none of
    them stays a zombie, except daemons: orphans that have begun a session of their own (setsid(2)). Process 1 of a
    container adopts orphans without this call. Children of other parts of the program, such as ``subprocess``, are
    left alone. Lasts until this process ends; forked children do not inherit it.

    Raises:
        OSError: The system has no subreapers (macOS).
    """
    global _subreaper
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, f"{sys.platform} has no subreapers: process 1 adopts and reaps all orphans")
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(errno.EINVAL, "prctl(PR_SET_CHILD_SUBREAPER) failed")
    _subreaper = os.getpid()


def adopts_orphans() -> bool:
    """Return whether orphans among the descendants of this process come to this process."""
    return sys.platform == "linux" and os.getpid() in (1, _subreaper)


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


def _reap_all(leader: int) -> None:
    while True:
        with suppress(ImportError, OSError):  # no descriptor is left, perhaps to import psutil
            if not _reap_exited(leader):
                return
        time.sleep(_ORPHANS_RECHECK_S)


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
