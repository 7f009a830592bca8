"""The processes of a `WorkerGroup`: started, met, watched, named when one exits, and stopped."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from aioshm.config import Options
from aioshm.engine.workers.process import ControlSocket, LoopFactory, Place, run_worker
from aioshm.errors import WorkerDied
from aioshm.lifeline.address import sweep_leftovers
from aioshm.process.background import in_thread
from aioshm.process.child import Child
from aioshm.process.manager import Job, ProcessManager
from aioshm.process.state import SUSPECT_STATES, process_state
from aioshm.process.stopping import ashutdown
from aioshm.process.watch import ProcessExit, ProcessWatch
from aioshm.queue import Handle


class Member:
    """One process.

    Attributes:
        name: What it is called.
        rank: Which worker it is; None: it is a standby.
        process: The process.
        control: Connects to it, see `run_worker`.
        exited: How it has exited, once it has.
    """

    def __init__(self, name: str, process: Child, control: ControlSocket) -> None:
        self.name: str = name
        self.rank: int | None = None
        self.process: Child = process
        self.control: ControlSocket = control
        self.exited: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        self._handle: str | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid or 0

    async def handle(self) -> str:
        """Return the handle of its queue, which is the first that it sends.

        Raises:
            EOFError, OSError: It has exited, or closed its end.
        """
        if self._handle is None:
            self._handle = str(await self.control.receive())
        return self._handle


class WorkerCrew:
    """Worker processes, named ``{name}_{rank}``.

    Args:
        name: What they are called.
        steps: The queue that they read.
        sizes: The bytes of a chunk, and the chunks, of each worker's own queue.
        options: Of that queue.
        shutdown_timeout: See `ProcessManager`.
        capture_stderr: See `ProcessManager`.
        loop_factory: See `WorkerGroup`.
        on_exit: Called on the loop when some have exited.

    Attributes:
        workers: The processes of the workers, by rank; after a death that of the dead one, until it has a successor.
    """

    def __init__(
        self,
        name: str,
        steps: Handle,
        sizes: tuple[int, int],
        options: Options,
        *,
        shutdown_timeout: float,
        capture_stderr: bool,
        loop_factory: LoopFactory | None,
        on_exit: Callable[[list[Member]], None],
    ) -> None:
        self._name, self._steps = name, steps
        self._settings = *sizes, options, loop_factory
        self._on_exit = on_exit
        self._members: dict[str, Member] = {}
        self._serial = 0
        self.workers: dict[int, Member] = {}
        self._manager = ProcessManager(run_worker, (), shutdown_timeout=shutdown_timeout, capture_stderr=capture_stderr)
        self._watch = ProcessWatch(manager=self._manager, on_exit=self._exited)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, by rank."""
        return [member.pid for _, member in sorted(self.workers.items())]

    async def start_workers(self, n_workers: int) -> None:
        """Start the first workers. The loop stands for some milliseconds for each, and runs between them.

        Raises:
            Exception: One could not be started.
        """
        for rank in range(n_workers):
            # Not in a thread: the kernel ends with this process only what its main thread has started, see
            # `die_with_parent`.
            member = self.workers[rank] = self._join(f"{self._name}_{rank}", *self._start(f"{self._name}_{rank}", None))
            member.rank = rank
            await asyncio.sleep(0)

    async def start(self, rank: int | None, imported: object = None) -> Member:
        """Start one more process.

        Args:
            rank: Which worker it is to be; None: a standby.
            imported: What a standby is to have imported before it is needed: it travels by pickle.

        Raises:
            Exception: It could not be started.
        """
        if rank is None:
            name = f"{self._name}_standby_{self._serial}"
            self._serial += 1
        else:
            name = f"{self._name}_{rank}"
            if name in self._members:  # the one that has died
                self.dismiss(self._members[name])
        started = await in_thread(lambda: self._start(name, imported), discard=lambda started: started[1].close())
        return self._join(name, *started)

    def _start(self, name: str, imported: object) -> tuple[Child, ControlSocket]:
        ours, theirs = socket.socketpair()
        with ExitStack() as unused, theirs:
            unused.enter_context(ours)
            process = self._manager.start_more(Job(name, (theirs, imported, *self._settings)))
            unused.pop_all()
        return process, ControlSocket(ours)

    def _join(self, name: str, process: Child, control: ControlSocket) -> Member:
        member = self._members[name] = Member(name, process, control)
        self._watch.add([process], managed=True)
        return member

    async def place(self, member: Member, rank: int, construction: bytes | None = None) -> None:
        """Let a process be the worker of a rank; the one before is forgotten, which has exited.

        Args:
            member: The process.
            rank: The rank.
            construction: The pickled step that makes the worker; None: the first one of the queue does.

        Raises:
            OSError: It has exited.
        """
        former = self.workers.get(rank)
        self.workers[rank] = member
        if former is not None and former is not member:
            self.dismiss(former)
        member.rank = rank
        await member.control.send(Place(rank, self._steps, construction is not None))
        if construction is not None:
            await member.control.send_pickled(construction)

    def dismiss(self, member: Member) -> None:
        """Forget a process that has exited."""
        member.control.close()
        if self._members.get(member.name) is member:
            del self._members[member.name]
        self._manager.discard(member.process)

    async def stop_worker(self, rank: int, patience: float) -> None:
        """Wait for a worker to exit by itself, then stop it."""
        member = self.workers.pop(rank)
        member.control.close()
        try:
            await asyncio.wait([member.exited], timeout=patience)
        finally:
            if self._members.get(member.name) is member:  # not before: its exit is told by its name
                del self._members[member.name]
            await self._manager.stop(member.name)

    def death(self, rank: int = 0) -> Callable[[], WorkerDied]:
        """Return what makes the error for those that have exited by now.

        Args:
            rank: Who is meant if none has exited yet, but ought to have.
        """
        exits = {each.rank: each.exited.result() for each in self._members.values() if each.exited.done()}
        of_workers = {who: found for who, found in exits.items() if who is not None}
        if not of_workers:
            process = self.workers[rank].process
            of_workers = {rank: ProcessExit(process.name, process.pid, None)}
        return self._error(of_workers, "")

    def death_of(self, rank: int, story: str = "") -> Callable[[], WorkerDied]:
        """Return what makes the error for a worker that has exited, or could never be started; ``story`` says more."""
        if rank not in self.workers:
            return functools.partial(WorkerDied, rank, f"{self._name}_{rank}", None, None, story)
        return self._error({rank: self.workers[rank].exited.result()}, story)

    def _error(self, exits: dict[int, ProcessExit], story: str) -> Callable[[], WorkerDied]:
        rank, first = min(exits.items())
        text = ", ".join(exits[each].describe() for each in sorted(exits))
        tail = []
        with suppress(ValueError):  # it was dismissed, and no other one could be started
            tail = self._manager.last_lines(first.name)
        more = f"{text}; {story}" if story else text
        return functools.partial(WorkerDied, rank, first.name, first.pid, first.exitcode, more, tail)

    def describe(self, ranks: Sequence[int]) -> str:
        """Name workers that have not done something, with what is wrong with them as far as the system knows."""
        said = []
        for rank in ranks:
            if rank not in self.workers:
                said.append(f"{self._name}_{rank}, which is being started")
                continue
            process = self.workers[rank].process
            state = process_state(process.pid or 0)
            said.append(f"{process.name} (pid {process.pid}{f', {state}' if state in SUSPECT_STATES else ''})")
        return ", ".join(said)

    def forget(self) -> None:
        """Watch them no more, and close the pipes to them. Idempotent."""
        self._watch.close()
        for member in self._members.values():
            member.control.close()

    async def stop(self, patience: float) -> None:
        """Wait for them to exit by themselves, then kill what is left.

        Args:
            patience: How long to wait, in seconds; 0: ask them with SIGTERM, see `ashutdown`.
        """
        self.forget()
        try:
            if patience:
                with ProcessWatch(self._manager.processes) as watch:
                    await watch.all_exited(asyncio.get_running_loop().time() + patience)
        finally:
            try:
                if patience:  # they were asked to exit: their queue was closed
                    await ashutdown(self._manager.processes, 0)
            finally:
                await self._manager.aclose()
                sweep_leftovers()

    def _exited(self) -> None:
        gone = []
        for each in self._watch.take():
            member = self._members.get(each.name)
            if member is not None and member.pid == each.pid and not member.exited.done():
                member.exited.set_result(each)
                gone.append(member)
        if gone:
            self._on_exit(gone)
