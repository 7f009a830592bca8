"""Stops processes and their descendants, within one deadline for all."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import TYPE_CHECKING

from aioshm.errors import OutOfThreads
from aioshm.process.background import in_thread
from aioshm.process.limits import detach_when_forked
from aioshm.process.watch import ProcessWatch

if TYPE_CHECKING:  # it costs 12 ms, which nobody pays who stops nothing
    import psutil

SHUTDOWN_TIMEOUT_S = 5.0
"""How long processes may take to exit when asked to."""
KILLED_S = 5.0
"""How long killed processes may take to be gone; a process with much memory or a device takes a moment."""

_LOOK_S = 0.005

_log = logging.getLogger("aioshm.engine")


def shutdown(procs: Iterable[BaseProcess], timeout: float = SHUTDOWN_TIMEOUT_S) -> None:
    """Stop processes: SIGTERM to all, one deadline for all, then kill those that still run, and all descendants.

    Blocks; see `ashutdown`. An exception of a signal handler, such as Ctrl-C, kills all of them immediately, and is
    raised then.

    Args:
        procs: The processes; those that have exited, or were never started, are ignored.
        timeout: Seconds that all of them together may take; 0 kills them immediately.
    """
    stopping = _Stopping(procs, timeout)
    try:
        stopping.add(_below(stopping.pids()))
        stopping.ask()
        stopping.wait(timeout)
    finally:
        stopping.kill()
    stopping.wait(KILLED_S)
    deadline = time.monotonic() + KILLED_S
    while stopping.below_run() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    stopping.report()


async def ashutdown(procs: Iterable[BaseProcess], timeout: float = SHUTDOWN_TIMEOUT_S) -> None:
    """Stop processes as `shutdown` does, without blocking the loop.

    Cancelling this kills the processes; it returns, cancelled, when they are gone. An exception of a signal handler
    kills them without waiting: the loop may not run any more.
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
            if pids := stopping.pids():
                try:
                    stopping.add(await in_thread(lambda: _below(pids)))
                except OutOfThreads:
                    stopping.add(_below(pids))
            stopping.ask()
            await watch.all_exited(loop.time() + timeout)
        except asyncio.CancelledError as error:
            cancelled = error
        stopping.kill()
        deadline = loop.time() + KILLED_S
        while watch.running or stopping.below_run():
            if loop.time() >= deadline:
                break
            try:
                if watch.running:
                    await watch.all_exited(deadline)
                else:
                    await asyncio.sleep(_LOOK_S)
            except asyncio.CancelledError as error:
                cancelled = error
    stopping.report()
    if cancelled is not None:
        raise cancelled


class _Stopping:
    def __init__(self, procs: Iterable[BaseProcess], timeout: float) -> None:
        if not (math.isfinite(timeout) and timeout >= 0):
            raise ValueError(f"timeout must be a finite number of seconds, at least 0, not {timeout}")
        self.procs = [proc for proc in procs if _runs(proc)]
        self._below: set[psutil.Process] = set()

    def pids(self) -> set[int]:
        return {proc.pid for proc in self._running() if proc.pid is not None}

    def add(self, below: set[psutil.Process]) -> None:
        """Note the descendants of processes: unknown once the processes have exited."""
        self._below |= below

    def ask(self) -> None:
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
                time.sleep(min(left, _LOOK_S))  # the sentinel of one may close a little before it exits

    def kill(self) -> None:
        self.add(_below(self.pids()))
        for proc in self._running():  # from the top, so that nothing more is started
            proc.kill()
        for process in self._below:
            _kill(process)

    def below_run(self) -> bool:
        self._below = {process for process in self._below if _exists(process)}
        return bool(self._below)

    def report(self) -> None:
        left = [f"{proc.name} (pid {proc.pid})" for proc in self._running()]
        left += [f"pid {process.pid}" for process in self._below]
        if left:
            _log.error("killed, but not gone after %s s: %s", KILLED_S, ", ".join(left))

    def _running(self) -> list[BaseProcess]:
        return [proc for proc in self.procs if proc.exitcode is None]


def _runs(proc: BaseProcess) -> bool:
    try:
        return proc.is_alive()
    except ValueError:  # it has been closed
        return False


def _below(roots: Collection[int]) -> set[psutil.Process]:
    """Return the descendants of some children of this process."""
    if not roots:
        return set()
    inside = set(roots)
    found: set[psutil.Process] = set()
    try:
        import psutil

        below = psutil.Process().children(recursive=True)
    except (ImportError, OSError):  # no descriptor is left; each leads a group, which is killed with it
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


TERMINATED = 128 + signal.SIGTERM
"""The code of the SystemExit that SIGTERM raises, as shells name the signal."""


class Termination:
    """Lets SIGTERM end the task that makes this, with its clean-up, instead of the process.

    Only in the main thread, and if SIGTERM would end the process otherwise.

    Attributes:
        interrupts: Whether SIGTERM raises SystemExit in a task of the user's that holds up the loop.
        ignored: Whether the task ends by itself: the first SIGTERM does nothing then, the second ends the process.
    """

    def __init__(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._armed = self._signalled = self._came = self._raised = False
        self.interrupts: bool = False
        self.ignored: bool = False
        detach_when_forked(self)

    def arm(self) -> None:
        """Begin. Idempotent."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the loop's own handler drops it
            try:
                # The loop wakes up for a signal that comes just before it sleeps: Python alone would not notice.
                self._loop.add_signal_handler(signal.SIGTERM, self._come)
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

    @property
    def came(self) -> bool:
        """Whether SIGTERM has ended the task, or is about to."""
        return self._came

    def take_back(self) -> bool:
        """Tell whether SIGTERM has ended the task, and nothing else; take a cancellation back then. Ask once."""
        assert self._task is not None
        return self._came and (self._raised or self._task.uncancel() == 0)

    def detach_after_fork(self) -> None:
        """Let SIGTERM end a forked child, as its parent expects that."""
        if self._armed:
            self._armed = False
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _interrupt(self, _number: int, frame: FrameType | None) -> None:
        self._signalled = True
        if not self.interrupts or self._came or self.ignored or _returns_to_loop(frame):
            return
        if asyncio.current_task(self._loop) is not None:
            self._came = self._raised = True
            raise SystemExit(TERMINATED)

    def _come(self) -> None:
        if not self._signalled:  # a forked child got it, which shares the descriptor that wakes this loop
            return
        assert self._task is not None
        if self.ignored:
            self.disarm()
        elif not self._came:
            self._came = True
            self._task.cancel("SIGTERM")
        elif self._raised and self.interrupts:
            # The task goes on: Python ignored the SystemExit, as it does in destructors and in some callbacks.
            self._raised = False
            self._task.cancel("SIGTERM")


def _returns_to_loop(frame: FrameType | None) -> bool:
    """Tell whether asyncio, or a coroutine of aioshm, runs, and not a function of the user's.

    Both return to the loop soon. An exception there would tear them: a task whose `call_soon` raises never runs again.
    """
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == "asyncio":
            return True
        if package == "aioshm":
            if frame.f_code.co_flags & (CO_COROUTINE | CO_ASYNC_GENERATOR):
                return True
        elif package not in sys.stdlib_module_names:
            return False
        frame = frame.f_back
    return False
