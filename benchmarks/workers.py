"""A step of an engine, a call of every worker and all their answers, against the same over pipes.

`WorkerGroup` sends a step once, to all workers, and waits for their answers on an event loop. The rival sends it to
each worker down a ``multiprocessing.Pipe`` of its own, and blocks for one answer after the other. The workers only
answer with the step that they were sent. A step with the stamps of progress is compared with a step without, too.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from aioshm.engine import WorkerGroup
from benchmarks.framework.crew import BenchmarkError, Boss, Crew
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.report import Report, latencies
from benchmarks.framework.stamps import Stamped, hold_cost

WORKERS = (1, 2)
STEP = {"request_ids": ["a", "b", "c", "d"], "tokens": [[1], [2], [3], [4]]}
TIMEOUT_S = 30.0
MIN_STEPS = 20

Step = Callable[[], Awaitable[list[Any]]]


class Worker(Stamped):
    """Answers; the same class works for both contestants."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def step(self, step: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Send it back."""
        return self._rank, step


async def run(settings: Settings, report: Report) -> None:
    """Measure both in turns."""
    for n_workers in WORKERS:
        for number in range(settings.repeat):
            progress(f"{n_workers} worker(s), {number + 1} of {settings.repeat}")
            for name, contestant in CONTESTANTS.items():
                async with contestant(n_workers) as step:
                    times = await _steps(step, n_workers, settings.seconds)
                    case = f"step, {n_workers} worker{'s' if n_workers > 1 else ''}"
                    report.result(case, name, n_workers).add(**latencies(times))
    async with WorkerGroup(Worker, 2, ready_timeout=TIMEOUT_S) as group:
        timed = partial(_timed, partial(group.collective_rpc, "step", (STEP,)), 2)
        await hold_cost(settings, report, "a step of a WorkerGroup", timed, partial(group.broadcast, "stamp"))
    ratios = report.ratios("step, 2 workers", "aioshm", "mp.Pipe", "p50_us", n_reader=2)
    report.hold("a step of a WorkerGroup with 2 workers: p50 against pipes that block their caller", ratios, "x", 1)


async def _steps(step: Step, n_workers: int, seconds: float) -> list[float]:
    """Return how long each took, in microseconds."""
    probe = [await _timed(step, n_workers) for _ in range(MIN_STEPS)]
    count = max(MIN_STEPS, int(seconds * 1e6 / median(probe)))
    return [await _timed(step, n_workers) for _ in range(count)]


async def _timed(step: Step, n_workers: int) -> float:
    began = time.perf_counter()
    answers = await step()
    took = time.perf_counter() - began
    if [rank for rank, _ in answers] != list(range(n_workers)):
        raise BenchmarkError(f"the answers are of ranks {[rank for rank, _ in answers]}")
    return took * 1e6


@asynccontextmanager
async def group_of(n_workers: int) -> AsyncIterator[Step]:
    """Start a group of workers; yield a function that does a step."""
    async with WorkerGroup(Worker, n_workers, ready_timeout=TIMEOUT_S) as group:
        yield partial(group.collective_rpc, "step", (STEP,))


@asynccontextmanager
async def pipes_to(n_workers: int) -> AsyncIterator[Step]:
    """Start workers with a pipe to each; yield a function that does a step."""
    with Crew(asyncio.new_event_loop) as crew:
        pipes = []
        for rank in range(n_workers):
            ours, theirs = multiprocessing.Pipe()
            crew.start(f"worker {rank}", _serve, rank, theirs)
            theirs.close()
            pipes.append(ours)

        async def step() -> list[Any]:
            # Quicker than Connection.send, which makes a new pickler each time.
            data = pickle.dumps(("step", (STEP,)), 5)
            for pipe in pipes:
                pipe.send_bytes(data)
            return [pickle.loads(pipe.recv_bytes()) for pipe in pipes]

        yield step
        for pipe in pipes:
            pipe.close()


def _serve(_boss: Boss, rank: int, pipe: Connection) -> None:
    worker = Worker(rank)
    with suppress(EOFError):
        while True:
            method, args = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps(getattr(worker, method)(*args), 5))


CONTESTANTS = {"aioshm": group_of, "mp.Pipe": pipes_to}

if __name__ == "__main__":
    sys.exit(main("workers", __doc__, run, repeat=3, seconds=1.0))
