"""The demo's processes, seen from the one that starts them.

Nothing holds them together but pipes: their standard input ends when this process ends, however that happens, and
that ends them. No helper process, no name in the file system.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

import msgspec

from aioshm.cli.demo.orders import Failed, FailureKind, Job, Opened, Progress, Report, Result
from aioshm.cli.outcome import FAILED, UNUSABLE, CommandFailed

GRACE_S = 0.25
"""How long processes may take to end by themselves before they are killed."""

_KINDS: tuple[FailureKind, ...] = get_args(FailureKind)


class WorkerFailed(Exception):
    """A process has not done its part."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.text)
        self.kind = failed.kind


class Worker:
    """One process.

    Args:
        name: For people.
        role: For the process, see ``worker.py``.
        heard: Called with everything that it reports.
    """

    def __init__(self, name: str, role: str, heard: Callable[[Report], None]) -> None:
        self.name = name
        self._role = role
        self._heard = heard
        self._process: subprocess.Popen[bytes] | None = None
        self.result: asyncio.Task[Result] | None = None
        """Done when the process has ended; raises `WorkerFailed` if it gave up, or died."""

    def start(self, job: Job, loop: str) -> None:
        """Start the process and give it its job."""
        with _interrupts_held_back():
            self._process = subprocess.Popen(
                (sys.executable, "-m", "aioshm.cli.demo.worker", self._role, loop),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
        self.result = asyncio.create_task(self._follow(self._process))
        self.tell(msgspec.json.encode(job))

    async def _follow(self, process: subprocess.Popen[bytes]) -> Result:
        reports = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reports), process.stdout
        )
        outcome: Result | Failed | None = None
        async for line in reports:
            report = msgspec.json.decode(line, type=Report)
            if isinstance(report, (Result, Failed)):
                outcome = report
            self._heard(report)
        transport.close()
        code = process.wait()  # its end of the pipe closes with it, so this does not take long
        if isinstance(outcome, Result) and code == 0:
            return outcome
        if not isinstance(outcome, Failed):
            outcome = Failed("crash", f"{self.name} (pid {process.pid}) died: {_how(code)}")
        raise WorkerFailed(outcome)

    def tell(self, line: bytes) -> None:
        """Send a line to the process; one that is gone does not hear it."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
        except BrokenPipeError:
            pass  # its result says how it ended

    def dismiss(self) -> None:
        """Let the process end: it hears that nobody wants it any more."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()


class Crew:
    """A writer and its readers.

    Args:
        readers: How many.
        progressed: Called with the number of messages that every reader has read.
    """

    def __init__(self, readers: int, progressed: Callable[[int], None]) -> None:
        self._progressed = progressed
        self._writer = Worker("the writer", "writer", self._writer_reported)
        self._readers = [Worker(f"reader {rank}", f"reader-{rank}", _ignore) for rank in range(readers)]

    async def run(self, job: Job, loop: str) -> list[Result]:
        """Do the job; when this returns, raises or is cancelled, no process is left.

        Returns:
            The writer's result, then the readers'.

        Raises:
            CommandFailed: A process failed; the text is about the one that the others failed for.
        """
        workers = [self._writer, *self._readers]
        try:
            for worker in workers:
                worker.start(job, loop)
            results = _results(workers)
            done, left = await asyncio.wait(results, return_when=asyncio.FIRST_EXCEPTION)
            if left:  # the queue has told them that somebody is gone, so they end by themselves
                more, _ = await asyncio.wait(left, timeout=GRACE_S)
                done |= more
            _raise_worst(done)
            return [result.result() for result in results]
        finally:
            await _end(workers)

    def _writer_reported(self, report: Report) -> None:
        if isinstance(report, Opened):
            for reader in self._readers:
                reader.tell(report.handle.encode())
        elif isinstance(report, Progress):
            self._progressed(report.done)


async def _end(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.dismiss()
    results = _results(workers)
    if results:
        await asyncio.wait(results, timeout=GRACE_S)
    for worker in workers:
        worker.kill()
    await asyncio.gather(*results, return_exceptions=True)


def _results(workers: Sequence[Worker]) -> list[asyncio.Task[Result]]:
    return [worker.result for worker in workers if worker.result is not None]


def _raise_worst(tasks: set[asyncio.Task[Result]]) -> None:
    errors = [error for task in tasks if (error := task.exception()) is not None]
    for error in errors:
        if not isinstance(error, WorkerFailed):
            raise error
    failures = [error for error in errors if isinstance(error, WorkerFailed)]
    if failures:
        worst = min(failures, key=lambda failure: _KINDS.index(failure.kind))
        raise CommandFailed(str(worst), UNUSABLE if worst.kind == "setup" else FAILED)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    # Ctrl-C goes to every process of the terminal's foreground group, but is this one's to act on. A new process
    # inherits what is blocked here, from its very first instruction on; an interrupt of this one is only late.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _ignore(_: Report) -> None:
    pass
