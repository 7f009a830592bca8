"""One tree's side of `benchmarks.before_after`: ``python -m benchmarks.compare.slices CASE SECONDS LOOP NAME...``.

Every contestant of the case is on stage, each with processes of its own. This process prints as JSON the names of the
contestants, each with the number of messages that take about so many seconds. Then it reads lines with the name's index
and a number of messages, and answers each with the microseconds that one message took.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Collection
from contextlib import AsyncExitStack
from typing import Any

from benchmarks.compare.cases import CASES, Case
from benchmarks.compare.measure import KINDS, available, fitting
from benchmarks.contestants import CONTESTANTS
from benchmarks.contestants.contestant import Contestant
from benchmarks.framework.harness import loop_factory
from benchmarks.framework.stage import Stage, on_stage

PLAYED = [case for case in CASES if case.kind in {"stream", "round trips", "cadence"}]
LEAST_TICKS = 6
PROBES = 2
"""The first measurement after the start is of memory that is touched once."""


async def main(name: str, seconds: float, loop: str, contestants: list[str]) -> None:
    """Play the part."""
    case = next(case for case in PLAYED if case.name == name)
    both_ways = case.kind == "round trips"
    async with AsyncExitStack() as everybody:
        stages, parts = [], []
        for contestant in playing(case, contestants):
            staging = on_stage(contestant, case.workload, case.n_reader, loop_factory(loop), both_ways=both_ways)
            stages.append(stage := await everybody.enter_async_context(staging))
            for _ in range(PROBES):
                count = await fitting(case, stage, seconds, ticks=LEAST_TICKS)
            parts.append((contestant.name, count))
        say(parts)
        while line := await asyncio.to_thread(sys.stdin.readline):
            number, count = map(int, line.split())
            say(await microseconds(case, stages[number], count))


def playing(case: Case, names: Collection[str]) -> list[Contestant]:
    """Return who of these takes part in a case, here as in the comparison."""
    wanted = [one for one in CONTESTANTS if one.name in names and one.name in case.contestants]
    return available(wanted)


async def microseconds(case: Case, stage: Stage, count: int) -> float:
    """Return how long one of so many messages took; at a cadence how late it was."""
    [figures] = (await KINDS[case.kind](case, stage, count, 0)).values()
    return 1e6 / figures["messages_per_s"] if case.kind == "stream" else figures["p50_us"]


def say(what: Any) -> None:
    """Answer."""
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4:]))
