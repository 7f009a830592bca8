"""Engines, workers and other processes that aioshm has started, from outside, and whether they make progress.

`StartedProcesses` reads their cells (`aioshm.process.progress`) through ``/proc``; `History` decides without I/O.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Literal, TypeAlias, get_args

import msgspec

from aioshm.config import Options
from aioshm.observe.queues import RESCAN_S, Segment, find_segments
from aioshm.observe.suspects import WINDOW_S
from aioshm.process.proc import STOPPED_STATES, child_name, parent_of, process_info, process_state
from aioshm.process.progress import (
    BUSY,
    CELL_BYTES,
    ENDING,
    FILE_NAME,
    IDLE,
    STACK_OFFSET,
    STARTING,
    TURN_S,
    WAITING,
    Sample,
    parse,
)
from aioshm.process.stacks import ProcessReport, parse_faulthandler, process_report, spied_report

Kind: TypeAlias = Literal["engine", "worker", "standby", "API server", "coordinator", "process"]
State: TypeAlias = Literal["starting", "idle", "busy", "stalled", "stopped", "ending", "running"]

WITHOUT_PROGRESS: frozenset[State] = frozenset({"stalled", "stopped"})

QUIET_LOOP_S = 3 * TURN_S
"""Seconds without a sign of life after which the event loop of an idle process counts as blocked."""

_CELLS = re.compile(f"/memfd:{FILE_NAME} ")
_NAMES: dict[Kind, re.Pattern[str]] = {
    "engine": re.compile(r"(EngineCore)_(\d+)"),
    "API server": re.compile(r"(ApiServer)_(\d+)"),
    "coordinator": re.compile(r"(DPCoordinator)()"),
    "standby": re.compile(r"(.+)_standby_(\d+)"),
    "worker": re.compile(r"(.+)_(\d+)"),
    "process": re.compile(r"(.*)()"),
}
CALLED: frozenset[Kind] = frozenset({"worker", "standby"})
"""Processes with calls instead of requests, one at a time."""
_STAMPING: frozenset[Kind] = CALLED | {"engine"}
"""Processes that write their cell as soon as they are ready."""
_PHASES: dict[int, State] = {STARTING: "starting", IDLE: "idle", BUSY: "busy", ENDING: "ending", WAITING: "busy"}
_RATE_S = 0.2
_PAUSE_S = 0.05
_MAX_STACK_BYTES = 1 << 20
_AS_REPORTED = "this stack is the one that its supervisor has read {:.0f} s ago"


class StartedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that aioshm has started, at one moment.

    Attributes:
        name: Its name, such as ``EngineCore_0``, or ``Model_1`` for rank 1 of the workers named ``Model``.
        kind: The kind that the name stands for.
        rank: Its rank, or its number among the standbys or API servers; -1: none.
        pid: Its pid.
        parent: The pid of the process that has started it.
        program: The command line of that process.
        state: ``"starting"``, ``"idle"``, ``"busy"`` with a step or call, ``"ending"``; ``"stalled"``: without progress
            for longer than ``AIOSHM_STALL_WARNING_S`` and the announced time (`aioshm.progress.expect`), or idle with
            a blocked event loop; ``"stopped"`` by SIGSTOP, a debugger or a frozen cgroup; ``"running"``: not known.
        seconds: Seconds in this state; of a blocked event loop, those for which it was watched.
        waits_for_peers: Whether it is busy with a collective operation: another process may be the culprit.
        requests: Requests that it has; of a worker 1 during a call.
        steps_per_s: Steps or calls; None: not known yet.
    """

    name: str
    kind: Kind
    rank: int
    pid: int
    parent: int
    program: str
    state: State
    seconds: float
    waits_for_peers: bool
    requests: int
    steps_per_s: float | None

    @property
    def makes_progress(self) -> bool:
        """Whether the process is neither stalled nor stopped."""
        return self.state not in WITHOUT_PROGRESS


class History:
    """The readings of one cell. No I/O, no clock."""

    def __init__(self, warning_s: float) -> None:
        self._warning_s = warning_s
        self._last: Sample | None = None
        self._turned_ns = 0  # when the loop gave its latest sign of life
        self._counted = (0, 0)  # steps, and when
        self.steps_per_s: float | None = None
        self.is_unsure: bool = False
        """Whether only another reading can show that the event loop of an idle process runs."""

    def look(self, sample: Sample, now_ns: int) -> tuple[State, float]:
        """Take a reading; return the state, and the seconds since when."""
        last = self._last
        self._last = sample
        self._count(sample, now_ns)
        if last is None or (sample.steps, sample.turned_ns) != (last.steps, last.turned_ns):
            self._turned_ns = now_ns
        has_turned = last is not None and self._turned_ns == now_ns
        quiet_s = (now_ns - self._turned_ns) / 1e9
        age_s = 0.0
        if sample.since_ns:
            age_s = max(0, now_ns - sample.since_ns) / 1e9
        self.is_unsure = False
        if sample.phase in (BUSY, WAITING) and age_s >= max(self._warning_s, sample.expected_s):
            return "stalled", age_s
        if sample.phase == IDLE and sample.turned_ns:
            if quiet_s >= max(QUIET_LOOP_S, sample.expected_s):
                return "stalled", quiet_s
            self.is_unsure = not has_turned and not sample.expected_s
        return _PHASES.get(sample.phase, "running"), age_s

    def _count(self, sample: Sample, now_ns: int) -> None:
        steps, counted_ns = self._counted
        seconds = (now_ns - counted_ns) / 1e9
        if counted_ns and seconds >= _RATE_S:
            self.steps_per_s = max(0, sample.steps - steps) / 2 / seconds  # each step begins, and ends
        if not counted_ns or seconds >= _RATE_S:
            self._counted = (sample.steps, now_ns)


def named(name: str) -> tuple[Kind, str, int]:
    """Return the kind of process that has a name, the name without rank, and the rank."""
    for kind, pattern in _NAMES.items():
        if found := pattern.fullmatch(name):
            return kind, found[1], int(found[2] or -1)
    return "process", name, -1


class _Process:
    """A process, and its cell."""

    def __init__(self, segment: Segment, pid: int, parent: int, warning_s: float) -> None:
        self.segment: Segment = segment
        self.history: History = History(warning_s)
        self.pid: int = pid
        self._parent = parent
        self._name = child_name(pid) or process_info(pid).command
        self._kind, group, self._rank = named(self._name)
        self._program = process_info(parent).command
        self.order: tuple[int, int, str, int] = (parent, get_args(Kind).index(self._kind), group, self._rank)

    def look(self) -> StartedProcess | None:
        """Read the cell; None: the process is gone, or the file is not a cell: it may be anybody's, or truncated."""
        cell = self.segment.read(0, CELL_BYTES)
        kernel_state = process_state(self.pid)
        if len(cell) != CELL_BYTES or parse(cell).phase not in _PHASES or kernel_state in ("gone", "zombie"):
            return None
        sample = parse(cell)
        state, seconds = self.history.look(sample, time.monotonic_ns())
        if kernel_state in STOPPED_STATES:
            state = "stopped"
            self.history.is_unsure = False
        elif not sample.steps and not sample.turned_ns and self._kind not in _STAMPING:
            state = "running"
        requests = sample.requests
        if self._kind in CALLED and sample.phase in (BUSY, WAITING):
            requests = max(1, requests)
        return StartedProcess(
            name=self._name,
            kind=self._kind,
            rank=self._rank,
            pid=self.pid,
            parent=self._parent,
            program=self._program,
            state=state,
            seconds=seconds,
            waits_for_peers=sample.phase == WAITING,
            requests=requests,
            steps_per_s=self.history.steps_per_s,
        )


class StartedProcesses:
    """Reads the cells of this user's processes on this host again and again.

    A busy process is stalled after ``AIOSHM_STALL_WARNING_S`` without progress.

    Raises:
        ValueError: The environment variable is invalid.
    """

    def __init__(self) -> None:
        self._warning_s = Options.from_env().stall_warning_s
        self._processes: dict[object, _Process] = {}  # by cell and pid
        self._due = 0.0

    def look(self) -> tuple[StartedProcess, ...]:
        """Return the processes, those of one parent together, sorted by kind, name and rank.

        Raises:
            NoProc: There is no ``/proc``.
        """
        if time.monotonic() >= self._due:
            self._search()
            self._due = time.monotonic() + RESCAN_S
        found = []
        for process in sorted(self._processes.values(), key=lambda process: process.order):
            with suppress(OSError):
                if (seen := process.look()) is not None:
                    found.append(seen)
        return tuple(found)

    def settle(self) -> tuple[StartedProcess, ...]:
        """Look until each idle process has shown that its event loop runs, or counts as stalled: 1.5 s at most."""
        found = self.look()
        deadline = time.monotonic() + QUIET_LOOP_S + 2 * _PAUSE_S
        while any(each.history.is_unsure for each in self._processes.values()) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            found = self.look()
        return found

    def report(self, process: StartedProcess) -> ProcessReport:
        """Describe a process; without py-spy, by the stacks that its supervisor has read during the present stall."""
        report = spied_report(process.pid)
        segment = next((each.segment for each in self._processes.values() if each.pid == process.pid), None)
        if report.stacks or segment is None:
            return report
        with suppress(OSError):
            age_s = time.time() - segment.status().st_mtime
            text = segment.read(STACK_OFFSET, _MAX_STACK_BYTES).decode(errors="replace")
            if age_s <= process.seconds and (stacks := parse_faulthandler(text)):
                report = process_report(process.pid, stacks, _AS_REPORTED.format(age_s))
        return report

    def _search(self) -> None:
        before = self._processes
        self._processes = {}
        for segment in find_segments(_CELLS)[0]:
            if owner := _owner(segment.paths):
                key = (segment.identity, owner[0])
                with suppress(OSError):
                    self._processes[key] = before.get(key) or _Process(segment, *owner, self._warning_s)


def _owner(holders: Collection[int]) -> tuple[int, int] | None:
    """Return the process that a cell belongs to, and its parent, among the processes that have the cell open.

    Forked children of both have it open, too, but have the command line of their parents.
    """
    parents = ((pid, parent_of(pid)) for pid in holders)
    return next((found for found in parents if found[1] in holders), None)


def find_processes(window_s: float = WINDOW_S) -> tuple[StartedProcess, ...]:
    """Return this user's processes that aioshm has started on this host; blocks for the window, and up to 1.5 s more.

    Args:
        window_s: Seconds between two readings, for the rates.

    Raises:
        NoProc: There is no ``/proc``.
    """
    watch = StartedProcesses()
    watch.look()
    time.sleep(window_s)
    return watch.settle()
