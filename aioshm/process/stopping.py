"""Stops processes and their descendants, within one deadline for all; and SIGTERM inside a process that is stopped."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import threading
import time
from collections.abc import Collection, Iterable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from aioshm.errors import OutOfThreads
from aioshm.process.background import in_thread
from aioshm.process.limits import detach_when_forked
from aioshm.process.orphans import reap_if_adopted
from aioshm.process.watch import ProcessWatch

if TYPE_CHECKING:  # the import takes 12 ms
    import psutil

SHUTDOWN_TIMEOUT_S = 5.0
"""How long processes may take to exit after SIGTERM."""
KILLED_S = 5.0
"""How long killed processes may take to be gone; a process with much memory or a device takes a moment."""
TERMINATED = 128 + signal.SIGTERM
"""The code of the SystemExit that SIGTERM raises, as shells name the signal."""

_RECHECK_S = 0.005

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
    try:
        stopping.find_descendants()
        stopping.terminate()
        stopping.wait(timeout)
    finally:
        stopping.kill()
    stopping.wait(KILLED_S)
    deadline = time.monotonic() + KILLED_S
    while stopping.descendants_run() and time.monotonic() < deadline:
        time.sleep(_RECHECK_S)
    stopping.report()


async def ashutdown(procs: Iterable[BaseProcess], timeout: float = SHUTDOWN_TIMEOUT_S) -> None:
    """Stop processes as `shutdown` does, without blocking the loop.

    Cancelling this kills the processes; the call returns, cancelled, when they are gone. An exception of a signal
    handler kills them without waiting: the loop may not run any more.
    """
    stopping = _Stopping(procs, timeout)
    try:
        await _stop(stopping, timeout)
    except asyncio.CancelledError:
        raise
    except BaseException:
        stopping.kill()
        raise


async def _stop(stopping: _Stopping, timeout: float) -> None:
    loop = asyncio.get_running_loop()
    cancelled: asyncio.CancelledError | None = None
    with ProcessWatch(stopping.procs) as watch:
        try:
            try:
                await in_thread(stopping.find_descendants)
            except OutOfThreads:
                stopping.find_descendants()
            stopping.terminate()
            await watch.all_exited(loop.time() + timeout)
        except asyncio.CancelledError as error:
            cancelled = error
        stopping.kill()
        deadline = loop.time() + KILLED_S
        while (watch.running or stopping.descendants_run()) and loop.time() < deadline:
            try:
                if watch.running:
                    await watch.all_exited(deadline)
                else:
                    await asyncio.sleep(_RECHECK_S)
            except asyncio.CancelledError as error:
                cancelled = error
    stopping.report()
    if cancelled is not None:
        raise cancelled


class _Stopping:
    """The processes that one call stops, and their descendants."""

    def __init__(self, procs: Iterable[BaseProcess], timeout: float) -> None:
        if not (math.isfinite(timeout) and timeout >= 0):
            raise ValueError(f"timeout must be a finite number of seconds, at least 0, not {timeout}")
        self.procs = [proc for proc in procs if _runs(proc)]
        self._descendants: set[psutil.Process] = set()
        self._killed: set[psutil.Process] = set()

    def find_descendants(self) -> None:
        """Note the descendants of the processes: unknown once the processes have exited."""
        self._descendants |= _descendants({proc.pid for proc in self._running() if proc.pid is not None})

    def terminate(self) -> None:
        for proc in self._running():
            proc.terminate()

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while running := self._running():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            wait([proc.sentinel for proc in running], left)
            if len(self._running()) == len(running):
                time.sleep(min(left, _RECHECK_S))  # a sentinel may close a little before its process exits

    def kill(self) -> None:
        self.find_descendants()
        for proc in self._running():  # parents first, so that they start no more processes
            proc.kill()
        for process in self._descendants:
            _kill(process)
        self._killed |= self._descendants

    def descendants_run(self) -> bool:
        self._descendants = {process for process in self._descendants if _exists(process)}
        return bool(self._descendants)

    def report(self) -> None:
        """Reap adopted descendants, and log what is left."""
        for process in self._killed:
            if process.is_running():  # the same process, and no later one with its pid
                reap_if_adopted(process.pid)
        left = [f"{proc.name} (pid {proc.pid})" for proc in self._running()]
        left += [f"pid {process.pid}" for process in self._descendants]
        if left:
            _log.error("killed, but not gone after %s s: %s", KILLED_S, ", ".join(left))

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

        below = psutil.Process().children(recursive=True)
    except (ImportError, OSError):  # no descriptor is left; each child leads a group, which is killed with the child
        return found
    for process in below:  # parents come before their children
        try:
            if process.ppid() in inside:
                inside.add(process.pid)
                found.add(process)
        except (psutil.Error, OSError):
            continue
    return found


def _kill(process: psutil.Process) -> None:
    from psutil import Error

    try:
        process.kill()
    except Error:
        pass


def _exists(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Termination:
    """Cancels the task that makes this on SIGTERM, so that the task cleans up, instead of ending the process.

    Only in the main thread, and if SIGTERM would end the process otherwise.

    Attributes:
        interrupts: Whether SIGTERM raises SystemExit immediately, for a plain function that holds up the loop.
        ignored: Whether the task ends by itself: the first SIGTERM does nothing then, the second ends the process.
        came: Whether SIGTERM has ended the task, or is about to.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._armed = False
        self._signalled = False
        self._raised = False
        self.interrupts: bool = False
        self.ignored: bool = False
        self.came: bool = False
        detach_when_forked(self)

    def arm(self) -> None:
        """Begin. Idempotent."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the loop's own handler drops it
            try:
                # The loop wakes up for a signal that comes just before it sleeps: Python alone would not notice.
                self._loop.add_signal_handler(signal.SIGTERM, self._cancel)
                signal.signal(signal.SIGTERM, self._interrupt)
                signal.siginterrupt(signal.SIGTERM, False)
                self._armed = True
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def disarm(self) -> None:
        """End. Idempotent."""
        if self._armed:
            self._armed = False
            self._loop.remove_signal_handler(signal.SIGTERM)

    def raise_again(self) -> None:
        """Raise the SystemExit again: the function may have caught it, and Python drops it in destructors."""
        if self._raised:
            raise SystemExit(TERMINATED)

    def take_back(self) -> bool:
        """Return whether SIGTERM, and nothing else, ended the task; uncancel the task then. Call this once."""
        assert self._task is not None
        return self.came and (self._raised or self._task.uncancel() == 0)

    def detach_after_fork(self) -> None:
        """Let SIGTERM end a forked child."""
        if self._armed:
            self._armed = False
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _interrupt(self, _number: int, _frame: object) -> None:
        self._signalled = True
        if self.interrupts and not (self.came or self.ignored):
            self.came = True
            self._raised = True
            raise SystemExit(TERMINATED)

    def _cancel(self) -> None:
        if not self._signalled:  # a forked child got the signal, and shares the descriptor that wakes this loop
            return
        assert self._task is not None
        if self.ignored:
            self.disarm()
        elif not self.came:
            self.came = True
            self._task.cancel("SIGTERM")
