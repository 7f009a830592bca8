"""Exits of processes, noticed by an event loop without a thread."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from aioshm.closing import Closing

_FIRST_RECHECK_S = 0.001
_LAST_RECHECK_S = 0.25
_KILLED_RECHECK_S = 1.0  # how often to look for killed processes that are not gone
_CODE_WITHIN_S = 1.0
"""How long the exit code of an exited process may take; after that, another part of the program has taken the code."""
_SHOWN_CHARACTERS = 500
_EXCEPTION = re.compile(r'^(.*)  File ".*\n(?:\1 .*\n)*\1(\S+: *\n.*|\S.*)', re.MULTILINE)
"""The end of a traceback, each of whose lines may have a prefix: the beginning of the exception's text."""


class WatchedProcess(Protocol):
    """A process that can be watched, such as those of ``multiprocessing``.

    A process that may be on another host has an attribute ``host``, its address. Its process id means nothing here, and
    its exit code may never be known. Its sentinel is readable exactly when the process has exited, and negative after
    the descriptor was closed.
    """

    @property
    def name(self) -> str:
        """The name of the process, for people."""

    @property
    def pid(self) -> int | None:
        """The process id."""

    @property
    def exitcode(self) -> int | None:
        """The exit code; None while the process runs."""

    @property
    def sentinel(self) -> Any:
        """A descriptor that is readable once the process has exited."""


class WatchedManager(Protocol):
    """A starter of processes.

    Optional members are used where they exist: ``aclose()`` or ``close()``, which stop all processes;
    ``last_lines(name)``, the last lines of a process's stderr.
    """

    @property
    def processes(self) -> Sequence[WatchedProcess]:
        """The processes; those of other hosts have a ``host``."""


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The exit of a process.

    Attributes:
        name: The name of the process.
        pid: The process id, if known.
        exitcode: The exit code; ``-n`` if signal ``n`` killed the process; None if the code is not known.
        managed: Whether a watched manager started the process.
        host: The address of the process's host, which may be another host; empty: this host.
        last_line: The last line of its stderr, if known; for code 1 after the first of an exception, for 0 empty.
        reason: Why the process was killed, such as ``"hung for 30 s at a.py:41 in f, and was
            killed"``; empty otherwise.
    """

    name: str
    pid: int | None
    exitcode: int | None
    managed: bool = False
    host: str = ""
    last_line: str = ""
    reason: str = ""

    def describe(self, phase: str = "", *, who: str = "") -> str:
        """Return a sentence about the exit of ``who`` (by default the name) in this phase."""
        known = []
        if self.pid is not None:
            known.append(f"pid {self.pid} on {self.host}" if self.host else f"pid {self.pid}")
        if phase:
            known.append(phase)
        text = who or self.name
        if known:
            text += f" ({', '.join(known)})"
        if self.reason:  # says more than the last line of the stderr
            return f"{text} {self.reason}"
        text += f" {self._manner()}"
        if not self.last_line:
            return text
        if self.exitcode is not None and self.exitcode < 0:  # the stderr may have nothing to do with the signal
            return f"{text}; last line of its stderr: {self.last_line}"
        return f"{text}: {self.last_line}"

    def _manner(self) -> str:
        if self.exitcode is None:
            return "exited; its exit code is not known"
        if self.exitcode >= 0:
            return f"exited with code {self.exitcode}"
        try:
            return f"was killed by {signal.Signals(-self.exitcode).name}"
        except ValueError:
            return f"was killed by signal {-self.exitcode}"


class ProcessWatch(Closing):
    """The exits of processes: await them with `next`, or pass ``on_exit`` and `take` them.

    The watch has its own descriptors: others may watch the same processes on the same loop, and close theirs.
    """

    def __init__(
        self,
        processes: Iterable[WatchedProcess] = (),
        *,
        manager: WatchedManager | None = None,
        on_exit: Callable[[], object] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._owner_pid = os.getpid()
        self._on_exit = on_exit
        self._running: dict[WatchedProcess, WatchedManager | None] = {}  # value: the process's manager
        self._gone: weakref.WeakSet[WatchedProcess] = weakref.WeakSet()  # exited; adding them again is ignored
        self._descriptors: set[int] = set()
        # Processes that have exited without an exit code so far, and until when to wait for the code.
        self._due: dict[WatchedProcess, float] = {}
        self._exits: list[ProcessExit] = []  # since the last call of `take`
        self._waiter: asyncio.Future[None] | None = None
        self._recheck: asyncio.Handle | None = None
        self._delay = _FIRST_RECHECK_S
        self._closed = False
        try:
            if manager is not None:
                self.add(manager.processes, manager)
            self.add(processes)
        except BaseException:
            self.close()
            raise

    def add(self, processes: Iterable[WatchedProcess], manager: WatchedManager | None = None) -> None:
        """Watch more processes, which ``manager`` has started; raise ValueError if a process was not started."""
        for process in processes:
            if process not in self._running and process not in self._gone:
                if process.exitcode is None:
                    self._watch_process(process)
                self._running[process] = manager
        self._check_after(0.0)

    @property
    def running(self) -> bool:
        """Whether any process may still run."""
        return bool(self._running)

    def exited(self) -> list[ProcessExit]:
        """Return the exits since the last call of `take`, in their order."""
        self._collect()
        return self._exits.copy()

    def take(self) -> list[ProcessExit]:
        """Return the exits since the last call, and forget them."""
        self._collect()
        taken = self._exits
        self._exits = []
        return taken

    async def next(self, deadline: float | None = None) -> list[ProcessExit]:
        """Wait for an exit while any process runs, until the deadline; return what `take` returns.

        Cancelling this loses nothing. One task at a time may wait.
        """
        if not self.exited() and self.running:
            self._waiter = self._loop.create_future()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._waiter
        return self.take()

    async def all_exited(self, deadline: float | None = None) -> bool:
        """Wait until all processes have exited, or the deadline has passed; return whether all have exited."""
        while self.running and (deadline is None or self._loop.time() < deadline):
            await self.next(deadline)
        return not self.running

    def close(self) -> None:
        """Stop watching. Idempotent; safe on a closed loop, and in a forked child, whose parent continues."""
        self._closed = True
        if self._owner_pid != os.getpid():
            return
        if self._recheck is not None:
            self._recheck.cancel()
        for descriptor in [*self._descriptors]:
            self._forget(descriptor)

    def _collect(self) -> bool:
        """Note exits; return whether there are new ones."""
        before = len(self._exits)
        now = self._loop.time()
        for process in [*self._running]:
            code = process.exitcode
            survives_kill = getattr(process, "survives_kill", False)
            if code is None and not survives_kill and now < self._due.get(process, math.inf):
                continue
            manager = self._running.pop(process)
            self._gone.add(process)
            self._due.pop(process, None)
            line = "" if code == 0 else _last_line(manager, process.name, code)
            host = getattr(process, "host", "")
            reason = getattr(process, "reason", "")
            if survives_kill:
                reason = f"{reason or 'was killed'}, but is not gone"
            self._exits.append(ProcessExit(process.name, process.pid, code, manager is not None, host, line, reason))
        return len(self._exits) > before

    def _watch_process(self, process: WatchedProcess) -> None:
        if hasattr(process, "host"):
            try:
                self._watch(os.dup(_fileno(process.sentinel)), process, 0.0)
            except OSError:  # the sentinel was closed: the process has exited
                self._due[process] = self._loop.time()
            return
        # macOS has no pidfd, some sandboxes forbid the call, and the process may have exited just now.
        if hasattr(os, "pidfd_open") and process.pid is not None:
            with suppress(OSError):
                self._watch(os.pidfd_open(process.pid), process, _CODE_WITHIN_S)
                return
        sentinel = _fileno(process.sentinel)
        try:
            # The pipe of multiprocessing may be closed by a process that continues to run.
            self._watch(os.dup(sentinel), process, math.inf)
        except OSError:  # no descriptor is left
            self._due[process] = math.inf

    def _watch(self, descriptor: int, process: WatchedProcess, code_within_s: float) -> None:
        self._descriptors.add(descriptor)
        self._loop.add_reader(descriptor, self._readable, descriptor, process, code_within_s)

    def _forget(self, descriptor: int) -> None:
        self._descriptors.discard(descriptor)
        if not self._loop.is_closed():
            self._loop.remove_reader(descriptor)
        os.close(descriptor)

    def _readable(self, descriptor: int, process: WatchedProcess, code_within_s: float) -> None:
        if descriptor not in self._descriptors:
            return
        self._forget(descriptor)
        if process in self._running:
            self._due[process] = self._loop.time() + code_within_s
        self._delay = _FIRST_RECHECK_S
        self._check()

    def _check(self) -> None:
        """Announce new exits; check again if a descriptor is readable a moment before there is an exit code."""
        if self._closed:
            return
        if self._collect():
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
            if self._on_exit is not None:
                self._on_exit()
        if self._due:
            self._check_after(self._delay)
            self._delay = min(2 * self._delay, _LAST_RECHECK_S)
        elif self._running:
            self._check_after(_KILLED_RECHECK_S)

    def _check_after(self, delay: float) -> None:
        if self._recheck is not None:
            self._recheck.cancel()
        if not self._closed:
            self._recheck = self._loop.call_later(delay, self._check)


def _last_line(manager: WatchedManager | None, name: str, code: int | None) -> str:
    """Return the last line of the stderr of a process, if the manager knows the line."""
    with suppress(Exception):  # an error of a user's manager does not hide the exit
        lines: Sequence[str] = getattr(manager, "last_lines", lambda _: ())(name)
        last = next((line.strip() for line in reversed(lines) if re.search(r"\w", line)), "")[:_SHOWN_CHARACTERS]
        if code == 1 and (found := _EXCEPTION.findall("\n".join(lines))):
            first = " ".join(found[-1][1].split())[:_SHOWN_CHARACTERS]
            return first if first in last else f"{first} ... {last}"
        return last
    return ""


def _fileno(sentinel: Any) -> int:
    return sentinel if isinstance(sentinel, int) else int(sentinel.fileno())
