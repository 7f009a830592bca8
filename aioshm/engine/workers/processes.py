"""The processes of a `WorkerGroup`: started, watched, named when one exits, and stopped."""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioshm.config import Options
from aioshm.engine.workers.messages import ControlSocket
from aioshm.engine.workers.rank import Rank
from aioshm.engine.workers.worker import LoopFactory, run_worker
from aioshm.errors import WorkerDied
from aioshm.lifeline.sockets import sweep_leftovers
from aioshm.process.child import Child
from aioshm.process.manager import Job, ProcessManager
from aioshm.process.placement import Placement, place_of
from aioshm.process.restart import Restart
from aioshm.process.stalls import ProgressWatch
from aioshm.process.stopping import ashutdown
from aioshm.process.watch import ProcessExit, ProcessWatch

if TYPE_CHECKING:
    from aioshm.engine.workers.session import Session

EXIT_WITHIN_S = 5.0
"""How long a process may take to exit after its socket has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of a `WorkerGroup`."""

    worker: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    n_workers: int
    name: str
    options: Options
    sizes: tuple[int, int]  # bytes of a chunk, and number of chunks, of each queue
    ready_timeout: float | None
    shutdown_timeout: float
    capture_stderr: bool
    loop_factory: LoopFactory | None
    restart: Restart | None
    standbys: int
    max_workers: int
    placement: Placement | None


class WorkerProcess:
    """One process: the worker of a rank, or a standby without a rank."""

    def __init__(self, process: Child, control: ControlSocket) -> None:
        self.process = process
        self.control = control
        self.name: str = process.name
        self.pid: int = process.pid or 0
        self.exited: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        self._handle: str | None = None

    async def handle(self) -> str:
        """Return the handle of the queue of answers; raise EOFError or OSError if the process has exited."""
        if self._handle is None:
            self._handle = str(await self.control.receive())
        return self._handle

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


class WorkerProcesses:
    """All processes of a group, standbys included; calls `Session.processes_exited`."""

    def __init__(self, settings: Settings, session: Session) -> None:
        self._settings = settings
        self._processes: dict[str, WorkerProcess] = {}
        self._session = session
        self.ready_timeout = settings.ready_timeout
        self._manager = ProcessManager(
            run_worker, (), shutdown_timeout=settings.shutdown_timeout, capture_stderr=settings.capture_stderr
        )
        this = weakref.proxy(self)  # the loop references the watches
        self._watch = ProcessWatch(manager=self._manager, on_exit=lambda: this._exited())
        self.progress = ProgressWatch(
            settings.options.stall_warning_s,
            settings.restart,
            lambda watched: this._session.health_changed(watched),
        )

    def start(self, name: str, rank: int | None = None, imported: object = None) -> WorkerProcess:
        """Start a worker; or, without a rank, a standby, which imports the modules of ``imported``.

        Blocks for milliseconds. Not in a thread: the kernel ends with this process only processes
        that its main thread has started.
        """
        settings = self._settings
        place = place_of(settings.placement, rank or 0)  # without a rank: the same for all ranks
        ours, theirs = socket.socketpair()
        with ExitStack() as unused, theirs:
            unused.enter_context(ours)
            arguments = (theirs, imported, settings.sizes, settings.options, settings.loop_factory)
            process = self._manager.start_more(Job(name, arguments, place=place))
            unused.pop_all()
        worker = self._processes[name] = WorkerProcess(process, ControlSocket(ours))
        self._watch.add([process], self._manager)
        return worker

    async def prepare(self, worker: WorkerProcess, work: Coroutine[Any, Any, str], what: str) -> str:
        """Run a step of a new process; return "", or after its exit the cause of a failure."""
        within_s = self.ready_timeout
        cause = ""
        try:
            async with asyncio.timeout(within_s):
                cause = await work
            if not cause and not worker.exited.done():
                return ""
        except TimeoutError:
            cause = f"{worker} was not {what} after {within_s:g} s, and was killed"
        except (EOFError, OSError):
            await asyncio.wait([worker.exited], timeout=EXIT_WITHIN_S)
        worker.process.kill()
        exited = await worker.exited
        return cause or exited.describe()

    def discard(self, worker: WorkerProcess) -> None:
        """Remove a process that has exited."""
        worker.control.close()
        self._processes.pop(worker.name, None)
        self._manager.discard(worker.process)

    async def stop_worker(self, worker: WorkerProcess) -> None:
        """Wait for a worker to exit; stop the process after ``shutdown_timeout``."""
        worker.control.close()
        try:
            await asyncio.wait([worker.exited], timeout=self._settings.shutdown_timeout)
        finally:
            self._processes.pop(worker.name, None)  # not before: the exit is reported by the name
            await self._manager.stop(worker.name)

    def death(self, ranks: Sequence[Rank], story: str = "") -> WorkerDied:
        """Return the error for workers without a process; it has the attributes of the first."""
        first = ranks[0]
        exits = [rank.exit for rank in ranks if rank.process is not None]
        if not exits:
            return WorkerDied(first.rank, first.name, None, None, story)
        text = ", ".join(each.describe() for each in exits)
        if story:
            text += f"; {story}"
        found = exits[0]
        tail = []
        with suppress(ValueError):  # the process was discarded, and no other process could be started
            tail = self._manager.last_lines(found.name)
        if not found.reason:
            return WorkerDied(first.rank, found.name, found.pid, found.exitcode, text, tail)
        error = WorkerDied(first.rank, found.name, found.pid, found.exitcode, text)
        error.last_lines = tail  # the stacks; the text has the line of Python
        return error

    def forget(self) -> None:
        """Stop watching the processes, and close their sockets. Idempotent."""
        self._watch.close()
        self.progress.close()
        for worker in self._processes.values():
            worker.control.close()

    async def stop(self, patience: float) -> None:
        """Wait for the processes to exit, then kill them; ``patience`` 0: send SIGTERM first."""
        if not patience:
            await self._close()
            return
        try:  # the processes exit because their queues were closed
            with ProcessWatch(self._manager.processes) as watch:
                await watch.all_exited(asyncio.get_running_loop().time() + patience)
        finally:
            await self.kill()

    async def kill(self) -> None:
        try:
            await ashutdown(self._manager.processes, 0)
        finally:
            await self._close()

    async def _close(self) -> None:
        self.forget()
        try:
            await self._manager.aclose()
        finally:
            sweep_leftovers()

    def _exited(self) -> None:
        gone = []
        for each in self._watch.take():
            worker = self._processes.get(each.name)
            if worker is not None and worker.pid == each.pid and not worker.exited.done():
                worker.exited.set_result(each)
                gone.append(worker)
        if gone:
            self._session.processes_exited(gone)
