"""What a reader costs that waits for a message: context switches and CPU time of its whole process.

Each contestant's reader waits twice: before it has received anything, and right behind a burst.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from benchmarks.cast import Cast, on_stage
from benchmarks.crew import Boss, Crew
from benchmarks.harness import Settings, main, progress
from benchmarks.payloads import SMALL_DICT, Payload
from benchmarks.report import Promise, Report
from benchmarks.rivals import ReaderEnd, WriterEnd

MAX_SWITCHES = 5
MAX_CPU_PERCENT = 0.5

BURST = 10_000
QUICK_BURST = 500

SILENT = "idle"
BEHIND_BURST = "idle after a burst"


@dataclass(frozen=True)
class Wait:
    """An order: read so many messages, then wait for one more, and reply with `Cost`."""

    burst: int


@dataclass(frozen=True)
class Cost:
    """What the process spent while it waited, all its threads together.

    Attributes:
        wall_s: How long it waited.
        cpu_s: CPU time.
        voluntary: Context switches because it had nothing to do, the one that began the wait among them.
        involuntary: Context switches because another process was to run.
    """

    wall_s: float
    cpu_s: float
    voluntary: int
    involuntary: int


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the results against the promises."""
    burst = QUICK_BURST if settings.quick else BURST
    with Crew(settings.loop_factory) as crew:
        for repetition in range(settings.repeat):
            # New readers each time: a wait counts as the first only once.
            async with AsyncExitStack() as stack:
                progress(f"repetition {repetition + 1} of {settings.repeat}")
                casts = [
                    await stack.enter_async_context(on_stage(crew, rival, wait_and_tell, [SMALL_DICT]))
                    for rival in settings.rivals
                ]
                for case, messages in [(SILENT, 0), (BEHIND_BURST, burst)]:
                    for cast, cost in zip(casts, await _wait(casts, messages, settings.seconds), strict=True):
                        report.result(case, cast.name).add(
                            voluntary_switches=cost.voluntary,
                            involuntary_switches=cost.involuntary,
                            cpu_percent=100 * cost.cpu_s / cost.wall_s,
                        )
    for case in [SILENT, BEHIND_BURST]:
        _hold_against_promises(report, case, settings.seconds)


async def _wait(casts: Sequence[Cast], burst: int, seconds: float) -> list[Cost]:
    """Let all wait at the same time: each process counts only what it does itself."""
    for cast in casts:
        cast.hands[0].order(Wait(burst))
        for number in range(burst):
            await cast.senders[0].send(SMALL_DICT.message(number))
    await asyncio.sleep(seconds)
    costs = []
    for cast in casts:
        await cast.senders[0].send(SMALL_DICT.message(burst))
        cost = await cast.hands[0].reply()
        assert isinstance(cost, Cost)
        costs.append(cost)
    return costs


async def wait_and_tell(
    boss: Boss, ends: Sequence[ReaderEnd], _back: Sequence[WriterEnd], payloads: Sequence[Payload]
) -> None:
    """Role: read a burst, wait for the message behind it, and reply with what waiting cost."""
    receiver = await ends[0].open()
    check = payloads[0].check
    boss.reply("ready")
    while (order := await boss.order()) is not None:
        for number in range(order.burst):
            check(await receiver.receive(), number)
        before, cpu, wall = resource.getrusage(resource.RUSAGE_SELF), time.process_time(), time.perf_counter()
        message = await receiver.receive()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        after = resource.getrusage(resource.RUSAGE_SELF)
        check(message, order.burst)
        boss.reply(Cost(wall, cpu, after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw))
    await receiver.aclose()


def _hold_against_promises(report: Report, case: str, seconds: float) -> None:
    ours = report.find(case, "aioshm")
    if ours is None:
        return
    report.promises.append(
        Promise(
            f"voluntary context switches in {seconds:g} s, {case}, most of all repetitions (at most {MAX_SWITCHES})",
            ours.worst("voluntary_switches"),
            "",
            MAX_SWITCHES,
        )
    )
    report.promises.append(
        Promise(
            f"CPU in {seconds:g} s, {case}, most of all repetitions (at most {MAX_CPU_PERCENT:g}%)",
            ours.worst("cpu_percent"),
            "%",
            MAX_CPU_PERCENT,
        )
    )


if __name__ == "__main__":
    sys.exit(main("idle", __doc__, run, repeat=5, seconds=5.0))
