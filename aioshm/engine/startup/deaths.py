"""Notices on the loop when one of some processes ends: without a thread, and without asking again and again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Protocol, runtime_checkable

from aioshm.engine.protocol.progress import Ended, engine_index

_FIRST_RETRY_S, _LAST_RETRY_S = 0.001, 0.1
_CODE_WITHIN_S = 1.0
_LOOK_FOR_S = 2.0
"""A descriptor may also tell what is known already, or be closed by a process that lives on."""


class WatchedProcess(Protocol):
    """What is needed of a process; those of ``multiprocessing`` have it."""

    @property
    def name(self) -> str:
        """Its name, for people."""

    @property
    def pid(self) -> int | None:
        """Its process id."""

    @property
    def exitcode(self) -> int | None:
        """None while it runs."""

    @property
    def sentinel(self) -> Any:
        """A descriptor that is readable once it has ended."""


@runtime_checkable
class WatchedManager(Protocol):
    """What is needed of what has started the local engines.

    What it may have besides is used: ``processes``, its processes; ``aclose()`` or ``close()``, which stop all of them;
    ``last_lines(name)``, the last lines that a process wrote to stderr.
    """

    def sentinels(self) -> Sequence[Any]:
        """Return descriptors that are readable once a process has ended."""

    def finished_procs(self) -> Mapping[str, int | None]:
        """Return the exit codes of the processes that have ended, by name; None where nobody knows it."""


class DeathWatch:
    """Calls back once for each new death among some processes.

    Every descriptor that is watched is its own: others may watch the same processes on the same loop, and close theirs.

    A sentinel of ``multiprocessing`` stays silent as long as any descendant that inherited it lives, so a process that
    is known by its id is also watched by that (``pidfd_open(2)``), where there is such a thing.

    Args:
        loop: Calls back.
        manager: Has processes to watch.
        processes: Others to watch.
        on_death: Called.

    Raises:
        ValueError: A process was not started.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        manager: WatchedManager | None,
        processes: Iterable[WatchedProcess],
        on_death: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._manager = manager
        self._engines: list[WatchedProcess] = list(getattr(manager, "processes", ()))
        ranks = ((engine_index(process.name), process) for process in self._engines)
        self._by_rank = {rank: process for rank, process in ranks if rank is not None}
        self._others = list(processes)
        self._on_death = on_death
        self._descriptors: set[int] = set()
        self._gone: dict[WatchedProcess, float] = {}  # those whose id says so, and since when
        self._told: set[str] = set()
        self._next_look: asyncio.Handle | None = None
        self._delay, self._until = _FIRST_RETRY_S, 0.0
        self._stopped = False
        self._pid = os.getpid()
        try:
            if manager is not None:
                for sentinel in manager.sentinels():
                    self._watch(os.dup(_fileno(sentinel)), None)
            for process in (*self._engines, *self._others):
                if process.exitcode is None:
                    self._watch_process(process)
        except BaseException:
            self.stop()
            raise
        self._next_look = loop.call_soon(self._look)  # one may have ended already

    def engines(self) -> dict[int, WatchedProcess]:
        """Return the processes of engines, as far as they are known, by rank."""
        return self._by_rank

    def ended(self) -> list[Ended]:
        """Return the processes that have ended."""
        found: dict[str, Ended] = {}
        if self._manager is not None:
            pids = {process.name: process.pid for process in self._engines}
            for name, code in self._manager.finished_procs().items():
                found[name] = Ended(name, pids.get(name), code, engine_index(name))
        for process in self._others:
            if process.exitcode is not None:
                found[process.name] = Ended(process.name, process.pid, process.exitcode)
        for process, since in self._gone.items():
            if process.name not in found and monotonic() - since >= _CODE_WITHIN_S:  # somebody else took its exit code
                engine = engine_index(process.name) if process in self._engines else None
                found[process.name] = Ended(process.name, process.pid, None, engine)
        return list(found.values())

    def stop(self) -> None:
        """Watch no more. Idempotent; safe on a closed loop, and in a forked child, whose parent goes on watching."""
        self._stopped = True
        if self._pid != os.getpid():
            return
        if self._next_look is not None:
            self._next_look.cancel()
        for descriptor in list(self._descriptors):
            self._forget(descriptor)

    def _watch_process(self, process: WatchedProcess) -> None:
        # Not in the interpreter on macOS, not allowed in some sandboxes; and it may have ended this moment.
        if hasattr(os, "pidfd_open") and process.pid is not None:
            with suppress(OSError):
                self._watch(os.pidfd_open(process.pid), process)
                return
        self._watch(os.dup(_fileno(process.sentinel)), None)

    def _watch(self, descriptor: int, process: WatchedProcess | None) -> None:
        self._descriptors.add(descriptor)
        self._loop.add_reader(descriptor, self._fired, descriptor, process)

    def _forget(self, descriptor: int) -> None:
        self._descriptors.discard(descriptor)
        if not self._loop.is_closed():
            self._loop.remove_reader(descriptor)
        os.close(descriptor)

    def _fired(self, descriptor: int, process: WatchedProcess | None) -> None:
        if descriptor not in self._descriptors:
            return
        self._forget(descriptor)
        if process is not None:
            self._gone[process] = monotonic()
        self._delay, self._until = _FIRST_RETRY_S, monotonic() + _LOOK_FOR_S
        self._look()

    def _look(self) -> None:
        """Find out who it was: a descriptor tells a moment before there is an exit code."""
        if self._stopped:
            return
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        new = {each.name for each in self.ended()} - self._told
        if new:
            self._told |= new
            self._on_death()
        elif monotonic() < self._until:
            self._next_look = self._loop.call_later(self._delay, self._look)
            self._delay = min(2 * self._delay, _LAST_RETRY_S)


def _fileno(sentinel: Any) -> int:
    return sentinel if isinstance(sentinel, int) else int(sentinel.fileno())
