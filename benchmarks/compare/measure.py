"""How each kind of case is measured."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from benchmarks.compare.cases import CADENCES_MS, CPU_BOUNDS, QUICK_CADENCES_MS, Case
from benchmarks.compare.memcpy import BLOCK_BYTES, NAME, QUICK_BLOCK_BYTES, memcpy_on_stage
from benchmarks.contestants import Contestant
from benchmarks.framework.contest import Contest, Turn
from benchmarks.framework.crew import Hand
from benchmarks.framework.harness import Settings
from benchmarks.framework.loops import Order, listen, tick
from benchmarks.framework.report import Report, latencies
from benchmarks.framework.stage import Stage

MIN_TICKS, QUICK_TICKS = 30, 8
TICKS_S = 1.0
"""How long a contestant is listened to at a cadence, unless that is less than `MIN_TICKS` messages."""

PROMISED_TICKS = 320
"""Messages at least at a cadence whose CPU time has a bound.

What a reader spins through windows varies from message to message: over 50 of them its mean has a standard deviation
of 0.35% of a core, over 320 of 0.09% (the predictor alone, gaps with 2% of jitter).
"""

TICKS_WARM_UP = 0.25
"""The share of a cadence's messages that pass before the clock starts."""

MEMCPY_BLOCKS = 4


async def measure(settings: Settings, report: Report, case: Case, contestants: Sequence[Contestant]) -> None:
    """Run a case."""
    both_ways = case.kind == "round trips"
    contest = Contest(settings, report, contestants, [case.workload], case.n_reader, both_ways=both_ways, pinned=True)
    async with AsyncExitStack() as everybody:
        copier = None
        if case.by_bytes:
            block = QUICK_BLOCK_BYTES if settings.quick else BLOCK_BYTES
            copier = await everybody.enter_async_context(memcpy_on_stage(block, settings.loop_factory))
        await everybody.enter_async_context(contest)
        turn = await _turn(settings, contest, case)
        for _ in contest.repetitions(case.name):
            if copier is not None and contest.stages:
                await _copy(settings, report, case, copier)
            await contest.each(turn)


async def _turn(settings: Settings, contest: Contest, case: Case) -> Turn:
    if case.kind == "stream":
        return await contest.streams(case=case.title)
    if case.kind == "round trips":
        return await contest.round_trips(case=case.title)
    return partial(cadences, contest.report, settings.quick)


async def cadences(report: Report, quick: bool, stage: Stage) -> None:
    """Measure one contestant at each cadence."""
    for period_ms in QUICK_CADENCES_MS if quick else CADENCES_MS:
        count = QUICK_TICKS if quick else ticks(period_ms)
        warm_up = max(2, int(count * TICKS_WARM_UP))
        before = report.find(cadence_title(period_ms), stage.name)
        repetition = 0 if before is None else len(before.figures["p50_us"])
        _, [heard] = await stage.perform(
            Order(
                tick, (warm_up + count, period_ms / 1e3, repetition)
            ),  # gaps of its own for each, the same for everybody
            Order(listen, (warm_up, count)),
        )
        result = report.result(cadence_title(period_ms), stage.name)
        result.add(**latencies(heard.late_us, slowest=False), reader_cpu_percent=heard.cpu_percent)


def ticks(period_ms: int) -> int:
    """Return how many messages of a cadence are measured in one repetition."""
    least = PROMISED_TICKS if period_ms in CPU_BOUNDS else MIN_TICKS
    return max(least, int(TICKS_S * 1e3 / period_ms))


def cadence_title(period_ms: int) -> str:
    """Return what reports call the messages at this cadence."""
    return f"every {period_ms} ms"


async def _copy(settings: Settings, report: Report, case: Case, copier: Hand) -> None:
    copier.order(1 if settings.quick else MEMCPY_BLOCKS)
    speed = float(await copier.reply())
    report.result(case.title, NAME, case.n_reader).add(volume_gb_per_s=speed / 1e9)
