"""One tree's side of `benchmarks.before_after`: ``python -m benchmarks.framework.slices CASE SECONDS LOOP NAME...``.

Every contestant of the case is on stage, each with processes of its own. Then this says as JSON what can be measured,
and how many messages take about so long; each line that comes has the number of one of those and how many messages to
measure, and is answered with the microseconds that one took.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeAlias

from benchmarks.compare.cases import CADENCES_MS, CASES, Case
from benchmarks.contestants import CONTESTANTS
from benchmarks.contestants.contestant import Contestant
from benchmarks.framework.contest import available
from benchmarks.framework.harness import loop_factory
from benchmarks.framework.loops import Order, answer, ask, listen, read, read_leased, send, tick
from benchmarks.framework.report import percentile
from benchmarks.framework.stage import Stage, on_stage

WARM_UP = 0.1
"""The share of a slice's messages that pass before the clock starts."""

LEAST_MESSAGES, LEAST_TRIPS, LEAST_TICKS = 8, 20, 6
MOST_MESSAGES, MOST_TRIPS = 400_000, 10_000  # the times of all trips come back in one message
PROBES = 2
"""Measurements that find out how many messages make a slice; the first is of what is touched once, and not counted."""

Slice: TypeAlias = Callable[[int], Awaitable[float]]
"""Measures so many messages, and returns the microseconds that one took."""


async def main(name: str, seconds: float, loop: str, contestants: list[str]) -> None:
    """Play the part."""
    case = next(case for case in CASES if case.name == name)
    slices: list[Slice] = []
    async with AsyncExitStack() as everybody:
        parts = []
        for contestant in playing(case, contestants):
            both_ways = case.kind == "round trips"
            staging = on_stage(
                contestant, [case.workload], case.n_reader, loop_factory(loop), both_ways=both_ways, pinned=True
            )
            stage = await everybody.enter_async_context(staging)
            for what, measure, least in _parts(case, stage):
                parts.append((what, contestant.name, await _fitting(measure, least, seconds)))
                slices.append(measure)
        say(parts)
        while line := await asyncio.to_thread(sys.stdin.readline):
            number, count = map(int, line.split())
            say(await slices[number](count))


def playing(case: Case, names: Collection[str]) -> list[Contestant]:
    """Return who of these takes part in a case, here as in the comparison."""
    wanted = [one for one in CONTESTANTS if one.name in names and one.name in case.contestants]
    return available(wanted, [case.workload])


def say(what: Any) -> None:
    """Answer."""
    print(json.dumps(what), flush=True)


def _parts(case: Case, stage: Stage) -> list[tuple[str, Slice, int]]:
    """Return what is measured of a case: as reports call it, how, and of how many messages at least."""
    if case.kind == "stream":
        return [(case.title, partial(_stream, stage), max(LEAST_MESSAGES, case.workload.slots // 8))]
    if case.kind == "round trips":
        return [(case.title, partial(_round_trips, stage), LEAST_TRIPS)]
    return [(f"every {ms} ms", partial(_cadence, stage, ms / 1e3), LEAST_TICKS) for ms in CADENCES_MS]


async def _fitting(measure: Slice, least: int, seconds: float) -> int:
    """Return how many messages take about so many seconds."""
    if isinstance(measure, partial) and measure.func is _cadence:
        return max(least, int(seconds / measure.args[1]))
    count = least
    most = MOST_TRIPS if least == LEAST_TRIPS else MOST_MESSAGES
    for _ in range(PROBES):
        count = min(most, max(least, int(seconds * 1e6 / await measure(count))))
    return count


async def _stream(stage: Stage, count: int) -> float:
    warm_up = max(1, int(count * WARM_UP))
    loop = read_leased if stage.contestant.leased else read
    _, seconds = await stage.perform(Order(send, (0, warm_up + count)), Order(loop, (warm_up, count)))
    return float(max(seconds)) / count * 1e6


async def _round_trips(stage: Stage, count: int) -> float:
    warm_up = max(1, int(count * WARM_UP))
    times, _ = await stage.perform(Order(ask, (warm_up, count)), Order(answer, (warm_up + count,)))
    return percentile(times, 50)


async def _cadence(stage: Stage, period_s: float, count: int) -> float:
    warm_up = 2
    _, [heard] = await stage.perform(Order(tick, (warm_up + count, period_s)), Order(listen, (warm_up, count)))
    return percentile(heard.late_us, 50)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4:]))
