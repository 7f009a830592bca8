"""What a busy queue does to another task on the reader's event loop: a ticker, once a millisecond.

The queue is either never empty, or it is empty again and again, because the reader is just quicker than the writer.
How late the ticker is depends on the machine too. So it is measured on an idle loop, and on one that is busy without
any queue, as well. And the time for which the kernel let the thread wait for a CPU (``/proc/thread-self/schedstat``,
see the kernel's sched-stats.rst) is taken off: what is left, the own lateness, is due to the loop and what runs on it.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from dataclasses import dataclass
from functools import partial

from benchmarks.contestants import CONTESTANTS, EVERYWHERE
from benchmarks.framework.contest import Contest
from benchmarks.framework.crew import BenchmarkError
from benchmarks.framework.harness import Settings, main
from benchmarks.framework.loops import Order, Ports
from benchmarks.framework.report import Report, percentile
from benchmarks.framework.run_queue import RunQueue
from benchmarks.framework.stage import Stage
from benchmarks.framework.workload import SMALL_DICT

PERIOD_S = 0.001
MAX_LATE_MS = 5.0

IDLE_LOOP = "idle loop"
BUSY_LOOP = "busy loop, no queue"
SATURATED = "saturated reader"
KEEPING_UP = "reader keeps up"
NO_QUEUE = "-"

MAX_GAP_S = 40e-6
"""A reader that keeps up gets its messages at intervals that grow up to this, from far shorter than a wake-up takes."""

_BATCH = 64  # messages between the sender's looks at whether it is over


@dataclass(frozen=True)
class Ticks:
    """How late the ticker was, tick by tick.

    Attributes:
        late_ms: By the clock.
        own_ms: Without the time that the thread waited for a CPU.
        messages: What the reader received meanwhile.
    """

    late_ms: list[float]
    own_ms: list[float]
    messages: int


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the result against the promise."""
    # Nothing else runs on a loop that blocks.
    contestants = [contestant for contestant in settings.chosen(CONTESTANTS) if contestant.awaited]
    if not contestants:
        raise BenchmarkError("these contestants leave their loop no time for anything else")
    seconds = settings.seconds
    async with Contest(settings, report, contestants, [SMALL_DICT]) as contest:

        async def measure(case: str, name: str | None, write: Order | None, stage: Stage) -> None:
            _, [ticks] = await stage.perform(write, Order(tick_beside, (seconds, case)))
            report.result(case, name or stage.name).add(
                late_p50_ms=percentile(ticks.late_ms, 50),
                late_p99_ms=percentile(ticks.late_ms, 99),
                late_max_ms=max(ticks.late_ms),
                own_p99_ms=percentile(ticks.own_ms, 99),
                own_max_ms=max(ticks.own_ms),
                messages_per_s=ticks.messages / seconds,
            )

        for _ in contest.repetitions("ticker"):
            for case in [IDLE_LOOP, BUSY_LOOP]:
                for stage in contest.stages[:1]:
                    await measure(case, NO_QUEUE, None, stage)
            for case in [SATURATED, KEEPING_UP]:
                write = Order(send_meanwhile, (seconds, MAX_GAP_S if case == KEEPING_UP else 0.0))
                await contest.each(partial(measure, case, None, write))
    for case in [SATURATED, KEEPING_UP]:
        text = f"own lateness of a 1 ms ticker, {case}, worst of all repetitions"
        report.hold(text, report.worst(case, "aioshm", "own_max_ms"), "ms", MAX_LATE_MS)


async def send_meanwhile(ports: Ports, seconds: float, most_gap_s: float) -> None:
    """Send for so long, at intervals that grow; not longer, or a ticker that is starved would never finish."""
    send, messages = ports.send, ports.work.numbered(itertools.count())
    ends = time.perf_counter() + seconds
    while (left := ends - time.perf_counter()) > 0:
        for message in itertools.islice(messages, _BATCH):
            await send(message)
            _pause(most_gap_s * (1 - left / seconds))
        await ports.turn()
    await send(None)


def _pause(seconds: float) -> None:
    if seconds:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass


async def tick_beside(ports: Ports, seconds: float, case: str) -> Ticks:
    """Run the ticker for so long, beside whatever the case says."""
    messages = 0

    async def drain() -> None:
        nonlocal messages
        while (message := await ports.receive()) is not None:
            ports.work.check(message, messages)
            messages += 1

    ticker = asyncio.create_task(_tick(seconds))
    reading = asyncio.create_task(drain()) if case in {SATURATED, KEEPING_UP} else None
    spinning = asyncio.create_task(_spin()) if case == BUSY_LOOP else None
    late_ms, own_ms = await ticker
    ticks = Ticks(late_ms, own_ms, messages)
    if reading is not None:
        await reading
    if spinning is not None:
        spinning.cancel()
    return ticks


async def _spin() -> None:
    while True:  # noqa: ASYNC110 - there is nothing to wait for
        await asyncio.sleep(0)


async def _tick(seconds: float) -> tuple[list[float], list[float]]:
    """Return how late each tick was, in milliseconds: by the clock, and without the time spent waiting for a CPU."""
    late_ms, own_ms = [], []
    with RunQueue() as run_queue:
        ends = time.perf_counter() + seconds
        while (began := time.perf_counter()) < ends:
            waited_before = run_queue.waited_s()
            await asyncio.sleep(PERIOD_S)
            late = max(0.0, time.perf_counter() - began - PERIOD_S)
            waited = run_queue.waited_s() - waited_before
            late_ms.append(late * 1e3)
            own_ms.append(max(0.0, late - waited) * 1e3)
    return late_ms, own_ms


if __name__ == "__main__":
    sys.exit(main("fairness", __doc__, run, repeat=5, seconds=2.0, contestants=CONTESTANTS, default=EVERYWHERE))
