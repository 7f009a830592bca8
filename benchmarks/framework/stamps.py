"""The cost of the stamps of `aioshm.process.progress`: the same processes with stamps, and without them, in turns."""

from __future__ import annotations

import timeit
from collections.abc import Awaitable, Callable
from math import log
from statistics import median
from typing import Any

from aioshm.process.progress import BUSY, Cell, Progress
from benchmarks.before_after import estimate
from benchmarks.framework.harness import Settings, progress
from benchmarks.framework.report import Report

MOST = 1.01
"""The promised time of a step with stamps, as a share of the time without."""

WARM_UP, LEAST, MOST_STEPS = 5, 3, 400
ROUNDS = 70
"""Of each repetition."""

STAMPS = 20_000

_enter = Progress.enter


class Stamped:
    """The base of workers and engines that can leave out stamps."""

    def stamp(self, wanted: bool) -> None:
        """Stamp the cell before and after each step, or do not."""
        Progress.enter = _enter if wanted else _ignore  # type: ignore[method-assign, assignment]


def _ignore(_self: Progress, _phase: int) -> None:
    pass


def stamp_ns() -> float:
    """Return the nanoseconds of one stamp, by the fastest of some runs."""
    cell = Cell()
    own = Progress(cell.fileno())
    seconds = min(timeit.repeat(lambda: own.enter(BUSY), number=STAMPS, repeat=10))
    cell.close()
    return 1e9 * seconds / STAMPS


async def hold_cost(
    settings: Settings,
    report: Report,
    case: str,
    step: Callable[[], Awaitable[float]],
    switch: Callable[[bool], Awaitable[Any]],
) -> None:
    """Measure a step, which returns its microseconds, in rounds of four turns: with, without, without, with stamps."""
    await switch(True)
    probe = median([await step() for _ in range(LEAST + WARM_UP)])
    count = max(LEAST, min(MOST_STEPS, int(settings.seconds * 1e4 / probe)))
    rounds = 1 if settings.quick else ROUNDS * settings.repeat
    progress(f"{case}: {rounds} rounds of 4 times {count} steps with stamps and without")
    logs = []
    for number in range(rounds):
        times: dict[bool, list[float]] = {True: [], False: []}
        first = number % 2 == 0
        for wanted in (first, not first, not first, first):
            await switch(wanted)
            times[wanted] += [await step() for _ in range(WARM_UP + count)][WARM_UP:]
        logs.append(log(median(times[True]) / median(times[False])))
    await switch(True)
    ratio, low, high = estimate([logs])
    report.result(f"stamps, {case}", "aioshm").add(ratio=ratio, lowest=low, highest=high, stamp_ns=stamp_ns())
    report.hold(f"{case}: the time with stamps of progress, against without", ratio, "x", MOST)
