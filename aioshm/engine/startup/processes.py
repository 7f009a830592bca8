"""The processes of a front end, managed together; `CoreEngineProcManager` for its engines."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from types import TracebackType
from typing import Any, NamedTuple, Self

from aioshm.config import check_int
from aioshm.engine.security.keys import AnyKeys, EngineKeys, hand_over, keys_to_hand_over
from aioshm.process.background import give_back
from aioshm.process.child import Child
from aioshm.process.endings import Endings
from aioshm.process.limits import naming_limits
from aioshm.process.stderr import StderrRelay
from aioshm.process.stopping import SHUTDOWN_TIMEOUT_S, ashutdown, shutdown

LAST_LINES = 20
"""How many lines of a process' standard error are told unless more are asked for."""

_EXIT_PRIORITY = 10  # any from 0 on is before multiprocessing joins what still runs, when Python ends

_log = logging.getLogger("aioshm.engine")


class Job(NamedTuple):
    """What one process is to do, and the keys that it has for connections over TCP."""

    name: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    keys: AnyKeys | None = None


class ProcessManager:
    """Processes that are started together, watched together and stopped together; a context manager of either kind.

    They end when this process ends, however that happens, and so does what they start if it calls `die_with_parent`.
    They lead process groups of their own: Ctrl-C reaches this process only, and `close` stops them.

    Args:
        target: What each process runs; importable in it, without side effects.
        jobs: One for each process.
        shutdown_timeout: Seconds that all together may take to end when asked to, before they are killed.
        capture_stderr: Whether to keep the last lines of what each writes to its standard error, for `last_lines`. It
            goes to this process' standard error all the same, but through a pipe.

    Attributes:
        processes: The processes, in the order of the jobs; their exit codes stay known when this is closed.

    Raises:
        OutOfDescriptors, OutOfThreads: This process has not enough for all of them; those that were started have been
            killed.
        Exception: One could not be started; the others have been killed.
    """

    def __init__(
        self,
        target: Callable[..., object],
        jobs: Sequence[Job],
        *,
        shutdown_timeout: float = SHUTDOWN_TIMEOUT_S,
        capture_stderr: bool = True,
    ) -> None:
        self.processes: list[Child] = []
        self._pid = os.getpid()
        self._shutdown_timeout = shutdown_timeout
        what = type(self).__name__
        self._relay: StderrRelay | None = None
        if capture_stderr:
            with naming_limits(what):
                self._relay = StderrRelay()
        self._closed = False
        self._forgotten = util.Finalize(
            self,
            _end_forgotten,
            (type(self).__name__, self.processes, self._relay, shutdown_timeout),
            exitpriority=_EXIT_PRIORITY,
        )
        try:
            with naming_limits(what):
                for job in jobs:
                    self._start(target, job)
        except BaseException:
            self._shutdown_timeout = 0
            self.close()
            raise
        if self.processes:
            _log.debug("started %s", ", ".join(f"{process.name} (pid {process.pid})" for process in self.processes))

    def _start(self, target: Callable[..., object], job: Job) -> None:
        name, args, kwargs, keys = job
        if self._relay is None:
            self._start_child(Child(target, name, args, kwargs), keys)
        else:
            with self._relay.pipe(name) as stderr:
                self._start_child(Child(target, name, args, kwargs, stderr=stderr), keys)

    def _start_child(self, child: Child, keys: AnyKeys | None) -> None:
        if keys is not None:
            hand_over(child, keys)
        child.start()
        self.processes.append(child)

    def sentinels(self) -> list[int]:
        """Return a descriptor for each process, readable when it has ended; none when this is closed.

        A loop calls back only one for each descriptor: who waits beside `join_first` duplicates them.
        """
        return [] if self._closed else [process.sentinel for process in self.processes]

    def finished_procs(self) -> dict[str, int]:
        """Return the exit codes of the processes that have ended, by name; ``-n`` for one killed by signal ``n``."""
        return {process.name: code for process in self.processes if (code := process.exitcode) is not None}

    async def join_first(self) -> dict[str, int]:
        """Wait until a process has ended; return what `finished_procs` does then.

        Without processes it returns at once. Cancelling this changes nothing. Closing the manager ends it too.
        """
        with Endings(self.processes) as endings:
            await endings.next()
        return self.finished_procs()

    def last_lines(self, name: str, count: int = LAST_LINES) -> list[str]:
        """Return the last lines that a process has written to its standard error up to now.

        Args:
            name: The name of the process.
            count: How many lines at most; no more than the last 16 KiB are kept.

        Raises:
            ValueError: There is no such process.
        """
        if name not in {process.name for process in self.processes}:
            raise ValueError(f"name must be that of one of the processes, not {name!r}")
        check_int("count", count, minimum=1)
        return [] if self._relay is None else self._relay.last_lines(name, count)

    def close(self) -> None:
        """Stop the processes, see `shutdown`. Idempotent; blocks."""
        if self._pid != os.getpid():  # a forked child's copy: the processes are the parent's
            return
        if not self._closed:
            shutdown(self.processes, self._shutdown_timeout)
            if self._relay is not None:
                self._relay.close()
            self._release()

    def shutdown(self, timeout: float | None = None) -> None:
        """Do what `close` does; under vLLM's name.

        Args:
            timeout: Seconds that all together may take to end when asked to; None: as the manager was made with.
        """
        if timeout is not None:
            self._shutdown_timeout = timeout
        self.close()

    async def aclose(self) -> None:
        """Stop the processes, see `ashutdown`. Idempotent; cancelling this kills them, and nothing is left."""
        if self._closed or self._pid != os.getpid():
            return
        try:
            await ashutdown(self.processes, self._shutdown_timeout)
            if self._relay is not None:
                await give_back(self._relay.close)
        finally:
            self._release()

    def _release(self) -> None:
        self._closed = True
        self._forgotten.cancel()
        if self._relay is not None:
            self._relay.close(wait=False)
        for process in self.processes:
            process.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(process.name for process in self.processes) or 'no processes'}>"


class CoreEngineProcManager(ProcessManager):
    """The engine processes of this machine, named ``EngineCore_0`` and so on by their global index.

    Each runs ``target_fn(*args, **kwargs, dp_rank=global index, local_dp_rank=local index)``. When the constructor
    returns they have been started, not more: `wait_for_engine_startup` says how they fare. It blocks for some
    milliseconds for each; it may be called in a thread, too.

    Args:
        target_fn: What each process runs.
        local_engine_count: How many engines this machine has; none where all of them are on other hosts.
        start_index: The first one's global index.
        local_start_index: The first one's index on this machine.
        args: For the target.
        shutdown_timeout: See `ProcessManager`.
        capture_stderr: See `ProcessManager`.
        keys: Each process starts with those of its engine, for `run_engine_core`; None: from those of this process.
        kwargs: For the target; every other argument by name.
    """

    def __init__(
        self,
        target_fn: Callable[..., object],
        local_engine_count: int,
        start_index: int = 0,
        local_start_index: int = 0,
        *,
        args: Sequence[Any] = (),
        shutdown_timeout: float = SHUTDOWN_TIMEOUT_S,
        capture_stderr: bool = True,
        keys: EngineKeys | None = None,
        **kwargs: Any,
    ) -> None:
        check_int("local_engine_count", local_engine_count, minimum=0)
        check_int("start_index", start_index, minimum=0)
        check_int("local_start_index", local_start_index, minimum=0)
        jobs = [
            Job(
                f"EngineCore_{start_index + number}",
                args,
                kwargs | {"dp_rank": start_index + number, "local_dp_rank": local_start_index + number},
                keys_to_hand_over(keys, start_index + number),
            )
            for number in range(local_engine_count)
        ]
        super().__init__(target_fn, jobs, shutdown_timeout=shutdown_timeout, capture_stderr=capture_stderr)


def _end_forgotten(kind: str, processes: list[Child], relay: StderrRelay | None, shutdown_timeout: float) -> None:
    # While Python ends there is time to ask; the garbage collector may have come at any time, in the loop's thread.
    shutdown(processes, shutdown_timeout if util.is_exiting() else 0)
    if relay is not None:
        relay.close()
    for process in processes:
        process.release()
    warnings.warn(f"a {kind} was not closed: use `async with`, or await aclose()", ResourceWarning, stacklevel=2)
