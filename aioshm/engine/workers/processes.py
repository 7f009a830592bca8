"""The processes of a `WorkerGroup`: started, watched, named when one exits, and stopped."""

from __future__ import annotations

import asyncio
import functools
import socket
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioshm.config import Options
from aioshm.engine.workers.messages import ControlSocket
from aioshm.engine.workers.worker import LoopFactory, run_worker
from aioshm.errors import WorkerDied
from aioshm.lifeline.sockets import sweep_leftovers
from aioshm.process.child import Child
from aioshm.process.manager import Job, ProcessManager
from aioshm.process.placement import Placement, place_of
from aioshm.process.proc import HUNG_STATES, process_state
from aioshm.process.restart import Restart
from aioshm.process.stalls import ProgressWatch, Watched
from aioshm.process.stopping import ashutdown
from aioshm.process.watch import ProcessExit, ProcessWatch

if TYPE_CHECKING:
    from aioshm.engine.workers.session import Session


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
        self.rank: int | None = None
        self.constructed: bool = False  # whether the constructor has returned
        self.exited: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        self._handle: str | None = None

    async def handle(self) -> str:
        """Return the handle of the queue of answers; raise EOFError or OSError if the process has exited."""
        if self._handle is None:
            self._handle = str(await self.control.receive())
        return self._handle

    def exit(self) -> ProcessExit:
        """Return the exit of the process; without a code while the process runs."""
        if self.exited.done():
            return self.exited.result()
        return ProcessExit(self.name, self.pid, None)

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


class WorkerProcesses:
    """The processes, named ``{name}_{rank}``; calls `Session.processes_exited`."""

    def __init__(self, settings: Settings, session: Session) -> None:
        self._settings = settings
        self._session = session
        self._processes: dict[str, WorkerProcess] = {}
        self._n_standbys = 0
        # By rank; after a death the dead one, until its replacement.
        self.workers: dict[int, WorkerProcess] = {}
        self._manager = ProcessManager(
            run_worker, (), shutdown_timeout=settings.shutdown_timeout, capture_stderr=settings.capture_stderr
        )
        this = weakref.proxy(self)  # the loop references the watch
        self._watch = ProcessWatch(manager=self._manager, on_exit=lambda: this._exited())
        warning_s = settings.options.stall_warning_s
        self._progress = ProgressWatch(warning_s, settings.restart, lambda watched: this._health_changed(watched))

    @property
    def pids(self) -> list[int]:
        return [worker.pid for _, worker in sorted(self.workers.items())]

    async def start_workers(self, n_workers: int) -> None:
        for rank in range(n_workers):
            self.assign(self.start(rank), rank)
            await asyncio.sleep(0)

    def start(self, rank: int | None, imported: object = None) -> WorkerProcess:
        """Start a worker; or, without a rank, a standby, which imports the modules of ``imported``.

        Blocks for milliseconds. Not in a thread: the kernel ends with this process only processes
        that its main thread has started.
        """
        settings = self._settings
        name = f"{settings.name}_{rank}"
        if rank is None:
            name = f"{settings.name}_standby_{self._n_standbys}"
            self._n_standbys += 1
        elif name in self._processes:  # the dead one
            self.discard(self._processes[name])
        place = place_of(settings.placement, rank or 0)  # without a rank: the same for all ranks
        ours, theirs = socket.socketpair()
        with ExitStack() as unused, theirs:
            unused.enter_context(ours)
            arguments = (theirs, imported, settings.sizes, settings.options, settings.loop_factory)
            process = self._manager.start_more(Job(name, arguments, place=place))
            unused.pop_all()
        worker = self._processes[name] = WorkerProcess(process, ControlSocket(ours))
        self._watch.add([process], managed=True)
        return worker

    def assign(self, worker: WorkerProcess, rank: int) -> None:
        """Assign a rank to a process, and discard the former process of the rank, which has exited."""
        former = self.workers.get(rank)
        self.workers[rank] = worker
        worker.rank = rank
        if former is not None and former is not worker:
            self.discard(former)

    def watch_progress(self, worker: WorkerProcess) -> None:
        """Watch a worker that is ready."""
        self._progress.add(worker.name, worker.process)

    def _health_changed(self, watched: Watched) -> None:
        for rank, worker in self.workers.items():
            if worker.process is watched.process:
                self._session.health_changed(rank, watched)

    def discard(self, worker: WorkerProcess) -> None:
        worker.control.close()
        if self._processes.get(worker.name) is worker:
            del self._processes[worker.name]
        self._manager.discard(worker.process)

    async def stop_worker(self, rank: int) -> None:
        """Wait for a worker to exit; stop the process after ``shutdown_timeout``."""
        worker = self.workers.pop(rank)
        worker.control.close()
        try:
            await asyncio.wait([worker.exited], timeout=self._settings.shutdown_timeout)
        finally:
            if self._processes.get(worker.name) is worker:  # not before: the exit is reported by the name
                del self._processes[worker.name]
            await self._manager.stop(worker.name)

    def death(self, rank: int | None = None, story: str = "") -> Callable[[], WorkerDied]:
        """Return the factory of the error for a worker without a process; None: for all workers that have exited."""
        exited = sorted(rank for rank, each in self.workers.items() if each.exited.done())
        if rank is None:
            rank = exited[0]
            exits = [self.workers[each] for each in exited]
        elif rank in self.workers:
            exits = [self.workers[rank]]
        else:
            return functools.partial(WorkerDied, rank, f"{self._settings.name}_{rank}", None, None, story)
        found = [each.exit() for each in exits]
        text = ", ".join(each.describe() for each in found)
        if story:
            text += f"; {story}"
        first = found[0]
        tail = []
        with suppress(ValueError):  # the process was discarded, and no other process could be started
            tail = self._manager.last_lines(first.name)
        failure = (rank, first.name, first.pid, first.exitcode, text)

        def make() -> WorkerDied:
            if not first.reason:
                return WorkerDied(*failure, tail)
            error = WorkerDied(*failure)  # the lines are the stacks, and the text has the line of Python
            error.last_lines = tail.copy()
            return error

        return make

    def describe(self, ranks: Sequence[int]) -> str:
        """Name workers, with the state of workers that make no progress or cannot run."""
        texts = []
        for rank in ranks:
            if rank not in self.workers:
                texts.append(f"{self._settings.name}_{rank}, which is being started")
                continue
            worker = self.workers[rank]
            life = self._session.lives.get(rank)
            known = [f"pid {worker.pid}"]
            if life is not None and life.state in ("stalled", "stopped"):
                known += [life.state, *[life.where] * bool(life.where)]
            elif (state := process_state(worker.pid)) in HUNG_STATES:
                known.append(state)
            texts.append(f"{worker.name} ({', '.join(known)})")
        return ", ".join(texts)

    def forget(self) -> None:
        """Stop watching the processes, and close their sockets. Idempotent."""
        self._watch.close()
        self._progress.close()
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
