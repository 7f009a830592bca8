"""Stalled and stopped processes: `Judge` decides without I/O, `ProgressWatch` reads, names, reports and ends them.

A process that no other process of its host watches watches itself in a thread, see `SelfWatch`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Self

from aioshm.errors import OutOfThreads
from aioshm.process.background import give_back, in_thread
from aioshm.process.child import Child
from aioshm.process.limits import start_thread
from aioshm.process.proc import STOPPED_STATES, handles_signal, process_state
from aioshm.process.progress import BUSY, ENDING, IDLE, STACK_SIGNAL, TURN_S, WAITING, Sample, own
from aioshm.process.restart import Health, Restart
from aioshm.process.stacks import ProcessReport, Stack, parse_faulthandler, process_report, stacks_of, stacks_of_thread

logger: logging.Logger = logging.getLogger("aioshm.engine")

LOOK_S = 0.5
"""Seconds between two readings, and less where reports come soon."""

LONGEST_INTERVAL_S = 3600.0
"""Between two reports on one stall: the intervals grow."""

_NAMED_AT_A_TIME = 8
"""How many processes are named at a time: each takes a thread, and with py-spy a process."""
_DUMP_WITHIN_S = 1.0
_DUMP_STEP_S = 0.02
_ENDS_WITHIN_S = 1.0


class Judge:
    """Decides how long a process has made no progress. No I/O, no clock.

    Time counts only while the watcher itself runs: after a stop of both processes nobody is late.
    """

    def __init__(self, warning_s: float) -> None:
        self._warning_s = warning_s
        self.last: Sample | None = None
        """The last reading."""
        self._step_s = 0.0  # since the last step or call has begun or ended
        self._turn_s = 0.0  # since the last sign of life of the loop
        self._next_report_s = warning_s
        self.without_progress_s: float = 0.0
        """How long a busy process has been in its step, or the loop of an idle process has not run; 0: it is fine."""

    def look(self, elapsed_s: float, sample: Sample) -> bool:
        """Take a reading, ``elapsed_s`` after the one before; return whether the process is late."""
        last = self.last
        self.last = sample
        self._step_s += elapsed_s
        self._turn_s += elapsed_s
        if last is None or sample.steps != last.steps:
            self._step_s = 0.0
        if last is None or (sample.steps, sample.turned_ns) != (last.steps, last.turned_ns):
            self._turn_s = 0.0
        limit_s = max(self._warning_s, sample.expected_s)
        self.without_progress_s = 0.0
        if sample.phase in (BUSY, WAITING) and self._step_s >= limit_s:
            self.without_progress_s = self._step_s
        elif sample.phase == IDLE and sample.turned_ns and self._turn_s >= max(limit_s, 3 * TURN_S):
            self.without_progress_s = self._turn_s
        if not self.without_progress_s:
            self._next_report_s = self._warning_s
        return self.without_progress_s > 0

    def forgive(self) -> None:
        """Count from now on: the process was stopped, and runs again."""
        self._step_s = 0.0
        self._turn_s = 0.0
        self.without_progress_s = 0.0

    def report_is_due(self) -> bool:
        """Return whether a late process is to be reported now; each interval is twice as long as the one before."""
        if self.without_progress_s < self._next_report_s:
            return False
        interval_s = min(max(self.without_progress_s, self._warning_s), LONGEST_INTERVAL_S)
        self._next_report_s = self.without_progress_s + interval_s
        return True


def culprit(process: Child) -> ProcessReport:
    """Find out what a process does: by py-spy, or else by ``faulthandler``. Blocks for up to some seconds."""
    pid = process.pid or 0
    stacks, hint = stacks_of(pid)
    waits: tuple[Stack, ...] = ()
    with suppress(OSError, ValueError):  # another thread has closed the cell
        if not stacks and not _is_stopped(process):
            stacks = _written_stacks(process)
            if stacks:
                hint = ""
        if process.progress is not None:
            waits = parse_faulthandler(process.progress.waits())
    return process_report(pid, stacks, hint, waits)


def _written_stacks(process: Child) -> tuple[Stack, ...]:
    cell = process.progress
    sample = None if cell is None else cell.read()
    # The process may have dropped the handler since, or run another program (execve(2)): then the signal would end it.
    if cell is None or sample is None or not sample.writes_stacks or not handles_signal(process.pid or 0, STACK_SIGNAL):
        return ()
    cell.drop_stacks()
    text = ""
    former = None
    deadline = time.monotonic() + _DUMP_WITHIN_S
    if process.send_signal(STACK_SIGNAL):
        while (not text or text != former) and time.monotonic() < deadline:
            time.sleep(_DUMP_STEP_S)
            former = text
            text = cell.stacks()
    return parse_faulthandler(text)


class Watched:
    """One process, and whether it makes progress."""

    def __init__(self, name: str, process: Child, warning_s: float, *, in_step: bool = False) -> None:
        self.name: str = name  # for people, such as ``engine 0``
        self.process: Child = process
        self.in_step: bool = in_step  # whether it works in lockstep with others that are
        self.health: Health = "running"
        self.where: str = ""  # while it is not running: since when, and at which line, for people
        self.judge: Judge = Judge(warning_s)
        self.is_stopped: bool = False  # as of the last look
        self.naming: asyncio.Task[None] | None = None  # finds the line, and reports
        self.ending: bool = False

    @property
    def waits(self) -> bool:
        """Whether it says that it waits for its peers."""
        return self.judge.last is not None and self.judge.last.phase == WAITING


class ProgressWatch:
    """Looks at the cells of processes, and reports those that make no progress; on the running loop.

    A stalled process is named in the log, with its line of Python, again and again at growing intervals. With
    ``hang_s`` in the restart policy it is ended after that long, and whoever watches its exit replaces it.

    Of processes in lockstep, which wait for each other, one is ended: a stopped one before all others, else one
    that does not say that it waits, and of these the one whose step began first. One that waits is ended if all do.

    ``warning_s`` is the time without progress before the first report. Without ``restart`` nothing
    is ended. ``on_change`` is called when the state of a process has changed, or its line is known.
    """

    def __init__(self, warning_s: float, restart: Restart | None, on_change: Callable[[Watched], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._hang_s = None if restart is None else restart.hang_s
        self._warning_s = warning_s if self._hang_s is None else min(warning_s, self._hang_s)
        self._restart = restart
        self._on_change = on_change
        self._watched: dict[Child, Watched] = {}
        self._interval_s = min(LOOK_S, self._warning_s / 4)
        self._tasks: set[asyncio.Task[None]] = set()
        self._naming = asyncio.Semaphore(_NAMED_AT_A_TIME)
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None  # None: there is no process to watch

    def add(self, name: str, process: Child, *, in_step: bool = False) -> Watched:
        """Watch a process, until it exits, or is stopped within a time limit."""
        watched = self._watched[process] = Watched(name, process, self._warning_s, in_step=in_step)
        if self._timer is None:
            self._last = self._loop.time()
            self._timer = self._loop.call_later(self._interval_s, self._look)
        return watched

    def close(self) -> None:
        """Stop watching. Idempotent; safe on a closed loop."""
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
        if not self._loop.is_closed():
            for task in self._tasks:
                task.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        # A watcher that was stopped, or whose loop was blocked, has not seen what the processes did meanwhile.
        elapsed_s = min(now - self._last, 2 * self._interval_s)
        self._last = now
        for watched in list(self._watched.values()):
            process = watched.process
            sample = None if process.progress is None else process.progress.read()
            if sample is None or process.exitcode is not None or process.survives_kill or process.is_stopping:
                del self._watched[process]
                continue
            is_still = sample == watched.judge.last
            is_late = watched.judge.look(elapsed_s, sample)
            was_stopped = watched.is_stopped
            watched.is_stopped = (is_late or is_still) and _is_stopped(process)
            if was_stopped and not watched.is_stopped:
                self._forgive(watched)
            elif is_late:
                self._late(watched)
            elif watched.health != "running":
                logger.info("%s (pid %s) makes progress again", watched.name, process.pid)
                self._enter(watched, "running", "")
        self._end_causes()
        self._timer = None
        if self._watched:
            self._timer = self._loop.call_later(self._interval_s, self._look)

    def _forgive(self, continued: Watched) -> None:
        """Count anew for a process that was stopped and runs again, and for the peers that have waited for it."""
        for watched in self._watched.values():
            if watched is continued or (watched.in_step and continued.in_step):
                watched.judge.forgive()

    def _late(self, watched: Watched) -> None:
        health: Health = "stopped" if watched.is_stopped else "stalled"
        self._enter(watched, health, watched.where)
        if watched.naming is None and watched.judge.report_is_due():
            watched.naming = self._spawn(self._report(watched))

    def _end_causes(self) -> None:
        """End processes that have hung for too long."""
        restart = self._restart
        if restart is None or restart.hang_s is None:
            return
        late = [watched for watched in self._watched.values() if watched.is_stopped or watched.judge.without_progress_s]
        causes = [watched for watched in late if not watched.in_step]
        if in_step := [watched for watched in late if watched.in_step]:
            cause = min(in_step, key=_as_cause)
            if not cause.waits or len(in_step) == sum(watched.in_step for watched in self._watched.values()):
                causes.append(cause)  # else it waits for a process that is not late, such as in a step that takes long
        for watched in causes:
            assert watched.judge.last is not None
            limit_s = max(restart.hang_s, watched.judge.last.expected_s)
            if watched.ending or watched.judge.without_progress_s < limit_s:
                continue
            if restart.kill_stopped or watched.health == "stalled":
                watched.ending = True
                self._spawn(self._end(watched))

    async def _report(self, watched: Watched) -> None:
        try:
            found = await self._culprit(watched)
            seconds = watched.judge.without_progress_s
            if not seconds or watched.process not in self._watched or watched.process.exitcode is not None:
                return  # it moves again, or has exited: its death may be known already
            waits = ", waits for its peers" if watched.waits else ""
            where = f"no progress for {seconds:.0f} s{waits}: {found.describe()}"
            self._enter(watched, watched.health, where)
            logger.warning("%s (pid %s) is %s: %s", watched.name, watched.process.pid, watched.health, where)
        finally:
            watched.naming = None

    async def _end(self, watched: Watched) -> None:
        assert self._restart is not None
        found = await self._culprit(watched)
        seconds = watched.judge.without_progress_s
        stopped = found.process.state in STOPPED_STATES
        if not seconds or stopped != (watched.health == "stopped") or (stopped and not self._restart.kill_stopped):
            watched.ending = False  # it has moved, or was continued or stopped just now
            return
        where = f"({found.describe()})"
        if found.line is not None:
            where = f"at {found.line}"
            if stopped:
                where = f"({found.process.state}) {where}"
        reason = f"hung for {seconds:.0f} s {where}, and was killed"
        await give_back(lambda: watched.process.end(reason))

    async def _culprit(self, watched: Watched) -> ProcessReport:
        async with self._naming:
            try:
                return await in_thread(lambda: culprit(watched.process))
            except OutOfThreads as error:
                pid = watched.process.pid or 0
                return process_report(pid, (), str(error))

    def _enter(self, watched: Watched, health: Health, where: str) -> None:
        if (health, where) != (watched.health, watched.where):
            watched.health = health
            watched.where = where
            self._on_change(watched)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name="aioshm-names-a-stall")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _is_stopped(process: Child) -> bool:
    return process_state(process.pid or 0) in STOPPED_STATES


def _as_cause(watched: Watched) -> tuple[bool, bool, int]:
    """Sort processes in lockstep by how likely each is the cause of the stalls of all."""
    assert watched.judge.last is not None
    return (not watched.is_stopped, watched.waits, watched.judge.last.since_ns)


class SelfWatch:
    """Logs, while the block runs, that this process makes no progress, with the line of the calling thread.

    A hang that holds the GIL stops the watching thread, too: then ``faulthandler`` writes all stacks to the standard
    error. A stop of the process that is longer than the limit has the same effect.
    """

    def __init__(self, name: str, warning_s: float) -> None:
        self._name = name
        self._warning_s = warning_s
        self._interval_s = min(LOOK_S, warning_s / 4)
        self._armed_until = 0.0  # until then `faulthandler` waits, by the monotonic clock
        self._ends = threading.Event()

    def __enter__(self) -> Self:
        self._watched = threading.get_ident()
        self._thread = start_thread(self._run, name="aioshm-watches-itself", what=f"the watch over {self._name}")
        own().on_expect.add(self.arm)
        _running.add(self)
        self.arm()
        return self

    def __exit__(self, *_: object) -> None:
        _running.discard(self)
        own().on_expect.discard(self.arm)
        self._ends.set()
        self._thread.join(_ENDS_WITHIN_S)
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        judge = Judge(self._warning_s)
        stalled = False
        last = time.monotonic()
        while not self._ends.wait(self._interval_s):
            now = time.monotonic()
            late = judge.look(min(now - last, 2 * self._interval_s), own().read())  # as in `ProgressWatch`
            last = now
            if self._armed_until - now < self._warning_s:
                self.arm()
            if stalled and not late:
                logger.info("%s (pid %d) makes progress again", self._name, os.getpid())
            stalled = late
            if late and judge.report_is_due():
                where = process_report(os.getpid(), stacks_of_thread(self._watched), "").describe()
                text = "%s (pid %d) is stalled: no progress for %.0f s: %s"
                logger.warning(text, self._name, os.getpid(), judge.without_progress_s, where)

    def arm(self) -> None:
        """Let `faulthandler` write the stacks in a while, unless this is called again before."""
        sample = own().read()
        if sample.phase == ENDING:
            return
        within_s = max(1.5 * self._warning_s, sample.expected_s + self._warning_s)
        self._armed_until = time.monotonic() + within_s
        # The standard error may have no descriptor.
        with _forking, suppress(OSError, ValueError, RuntimeError, AttributeError):
            faulthandler.dump_traceback_later(within_s)


_running: set[SelfWatch] = set()
_forking = threading.Lock()  # nothing is armed meanwhile


def _before_fork() -> None:
    # A forked child has no thread of `faulthandler`, and would wait for it when Python ends.
    _forking.acquire()
    if _running:
        faulthandler.cancel_dump_traceback_later()


def _in_child() -> None:
    _running.clear()
    _forking.release()


def _in_parent() -> None:
    _forking.release()
    for each in tuple(_running):
        each.arm()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
