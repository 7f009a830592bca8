"""The processes of a `WorkerGroup`: started, met, watched, named when one exits, and stopped."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from aioshm.config import Options
from aioshm.engine.protocol.progress import engine_index
from aioshm.engine.workers.process import LoopFactory, run_worker
from aioshm.errors import WorkerDied
from aioshm.process.manager import Job, ProcessManager
from aioshm.process.state import SUSPECT_STATES, process_state
from aioshm.process.watch import ProcessExit, ProcessWatch
from aioshm.queue import Handle


class WorkerCrew:
    """Worker processes, named ``{name}_{rank}``. Making it starts them, and blocks for some milliseconds for each.

    Args:
        name: What they are called.
        n_workers: How many.
        steps: The queue that they read.
        sizes: The bytes of a chunk, and the chunks, of each worker's own queue.
        options: Of that queue.
        shutdown_timeout: See `ProcessManager`.
        capture_stderr: See `ProcessManager`.
        loop_factory: See `WorkerGroup`.
        on_exit: Called on the loop when one has exited.
    """

    def __init__(
        self,
        name: str,
        n_workers: int,
        steps: Handle,
        sizes: tuple[int, int],
        options: Options,
        *,
        shutdown_timeout: float,
        capture_stderr: bool,
        loop_factory: LoopFactory | None,
        on_exit: Callable[[], None],
    ) -> None:
        self._introductions: list[Connection] = []
        with ExitStack() as mine, ExitStack() as theirs:
            jobs = []
            for rank in range(n_workers):
                reading, writing = Pipe(duplex=False)
                self._introductions.append(mine.enter_context(reading))
                theirs.enter_context(writing)
                jobs.append(Job(f"{name}_{rank}", (rank, steps, writing, *sizes, options, loop_factory)))
            self._manager = ProcessManager(
                run_worker, jobs, shutdown_timeout=shutdown_timeout, capture_stderr=capture_stderr
            )
            try:
                self._watch = ProcessWatch(manager=self._manager, on_exit=on_exit)
            except BaseException:
                self._manager.close()
                raise
            mine.pop_all()

    @property
    def pids(self) -> list[int]:
        """Their process ids, by rank."""
        return [process.pid or 0 for process in self._manager.processes]

    async def introductions(self) -> AsyncIterator[tuple[int, str]]:
        """Yield each worker's rank, and the handle of its queue once it has sent that.

        Raises:
            EOFError, OSError: It has exited before.
        """
        loop = asyncio.get_running_loop()
        for rank, introduction in enumerate(self._introductions):
            readable = asyncio.Event()
            loop.add_reader(introduction.fileno(), readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(introduction.fileno())
            yield rank, introduction.recv_bytes().decode()  # short enough to have come at once

    def death(self, rank: int = 0) -> Callable[[], WorkerDied]:
        """Return what makes the error for those that have exited by now.

        Args:
            rank: Who is meant if none has exited yet, but ought to have.
        """
        exits = {engine_index(each.name) or 0: each for each in self._watch.exited()}
        if not exits:
            process = self._manager.processes[rank]
            exits = {rank: ProcessExit(process.name, process.pid, None)}
        rank, first = min(exits.items())
        text = ", ".join(exits[each].describe() for each in sorted(exits))
        tail = self._manager.last_lines(first.name)
        return functools.partial(WorkerDied, rank, first.name, first.pid, first.exitcode, text, tail)

    def describe(self, ranks: Sequence[int]) -> str:
        """Name workers that have not done something, with what is wrong with them as far as the system knows."""
        said = []
        for rank in ranks:
            process = self._manager.processes[rank]
            state = process_state(process.pid or 0)
            said.append(f"{process.name} (pid {process.pid}{f', {state}' if state in SUSPECT_STATES else ''})")
        return ", ".join(said)

    def forget(self) -> None:
        """Watch them no more, and close the pipes to them. Idempotent."""
        self._watch.close()
        for introduction in self._introductions:
            introduction.close()

    async def stop(self, patience: float) -> None:
        """Wait for them to exit by themselves, then stop what is left; see `ashutdown`.

        Args:
            patience: How long to wait, in seconds.
        """
        self.forget()
        try:
            if patience:
                with ProcessWatch(self._manager.processes) as watch:
                    await watch.all_exited(asyncio.get_running_loop().time() + patience)
        finally:
            await self._manager.aclose()
