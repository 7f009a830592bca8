"""What a reader costs that waits for a message: context switches and CPU time of its whole process.

Each contestant's reader waits twice: before it has received anything, and right behind a burst.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

from benchmarks.contestants import CONTESTANTS, EVERYWHERE
from benchmarks.framework.contest import Contest
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.loops import CpuWatch, Order, Ports, send
from benchmarks.framework.report import Report
from benchmarks.framework.stage import together
from benchmarks.framework.workload import SMALL_DICT

MAX_SWITCHES = 5
MAX_CPU_PERCENT = 0.5

BURST = 10_000
QUICK_BURST = 500

SILENT = "idle"
BEHIND_BURST = "idle after a burst"


@dataclass(frozen=True)
class Cost:
    """What the process spent while it waited, all its threads together.

    Attributes:
        cpu_percent: CPU time, as a share of a core.
        voluntary: Context switches because it had nothing to do, the one that began the wait among them.
        involuntary: Context switches because another process was to run.
    """

    cpu_percent: float
    voluntary: int
    involuntary: int


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the results against the promises."""
    burst = QUICK_BURST if settings.quick else BURST
    for repetition in range(settings.repeat):
        progress(f"repetition {repetition + 1} of {settings.repeat}")
        # New readers each time: a wait counts as the first only once.
        async with Contest(settings, report, settings.chosen(CONTESTANTS), [SMALL_DICT]) as contest:
            for case, messages in [(SILENT, 0), (BEHIND_BURST, burst)]:
                # All wait at the same time: each process counts only what it does itself.
                for stage in contest.stages:
                    stage.readers[0].order(Order(wait_and_tell, (messages,)))
                    await stage.perform(Order(send, (0, messages)), None)
                await asyncio.sleep(settings.seconds)
                for stage in contest.stages:
                    stage.writer.order(Order(send, (messages, messages + 1)))
                    _, cost = await together([hand.reply() for hand in (stage.writer, *stage.readers)])
                    report.result(case, stage.name).add(
                        voluntary_switches=cost.voluntary,
                        involuntary_switches=cost.involuntary,
                        cpu_percent=cost.cpu_percent,
                    )
    for case in [SILENT, BEHIND_BURST]:
        wait = f"in {settings.seconds:g} s, {case}, most of all repetitions"
        switches = report.worst(case, "aioshm", "voluntary_switches")
        report.hold(f"voluntary context switches {wait}", switches, "", MAX_SWITCHES)
        report.hold(f"CPU {wait}", report.worst(case, "aioshm", "cpu_percent"), "%", MAX_CPU_PERCENT)


async def wait_and_tell(ports: Ports, burst: int) -> Cost:
    """Read a burst and wait for the message behind it; return what waiting cost."""
    receive, check = ports.receive, ports.work.check
    for number in range(burst):
        check(await receive(), number)
    watch = CpuWatch()
    message = await receive()
    cost = Cost(watch.percent(), *watch.switches())
    check(message, burst)
    return cost


if __name__ == "__main__":
    sys.exit(main("idle", __doc__, run, repeat=5, seconds=5.0, contestants=CONTESTANTS, default=EVERYWHERE))
