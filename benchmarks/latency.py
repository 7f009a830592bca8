"""Round trips between two processes, and how long it takes to wake a reader that is just going to sleep."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.contestants import CONTESTANTS, EVERYWHERE
from benchmarks.framework.contest import Contest, Turn
from benchmarks.framework.harness import Settings, main
from benchmarks.framework.loops import Order, Ports
from benchmarks.framework.report import Report, latencies
from benchmarks.framework.stage import Stage
from benchmarks.framework.workload import SHORT_BYTES, usual

ROUND_TRIP_SHARE = 0.1
"""The promised p50 of a 64-byte round trip, as a share of zmq.asyncio's."""

LOST_WAKE_UP_MS = 100.0
"""The promised bound of the slowest wake-up: a reader that was not woken would sleep until something else happens."""

PAIRS = 2000
QUICK_PAIRS = 50
MAX_GAP_US = 400.0
"""The longest time between a pair's messages: longer than any reader here looks around before it sleeps."""

PARKING = "parking reader"


@dataclass(frozen=True)
class Wakes:
    """How pairs' second messages arrived.

    Attributes:
        late_ns: How long after it was sent each one was there.
        parked: How many of them found the reader asleep, if it can tell.
    """

    late_ns: list[int]
    parked: int | None


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the results against the promises."""
    workloads = [SHORT_BYTES, *usual(settings.quick)]
    contestants = settings.chosen(CONTESTANTS)
    async with Contest(settings, report, contestants, workloads, both_ways=True) as contest:
        for kind, work in enumerate(workloads):
            trips = await contest.round_trips(kind, slowest=True)
            for _ in contest.repetitions(f"{work.name}: round trips"):
                await contest.each(trips)
        wakes = _wakes(report, QUICK_PAIRS if settings.quick else PAIRS)
        for _ in contest.repetitions(f"{PARKING}: pairs"):
            await contest.each(wakes)
    ratio = report.ratio(SHORT_BYTES.name, "aioshm", "zmq.asyncio", "p50_us")
    report.hold("p50 of a 64-byte round trip, against zmq.asyncio", ratio, "x", ROUND_TRIP_SHARE)
    slowest = report.worst(PARKING, "aioshm", "max_us")
    text = "slowest of all wake-ups of a reader that was just parking"
    report.hold(text, slowest and slowest / 1e3, "ms", LOST_WAKE_UP_MS)


def _wakes(report: Report, count: int) -> Turn:
    """Return what measures how late pairs' second messages arrive."""
    gaps = [MAX_GAP_US * n / count for n in range(count)]
    random.Random(count).shuffle(gaps)

    async def turn(stage: Stage) -> None:
        _, [wakes] = await stage.perform(Order(send_pairs, (gaps,)), Order(acknowledge_pairs, (count,)))
        result = report.result(PARKING, stage.name)
        result.add(**latencies([late / 1e3 for late in wakes.late_ns]))
        if wakes.parked is not None:
            result.add(parked_percent=100 * wakes.parked / count)

    return turn


async def send_pairs(ports: Ports, gaps_us: Sequence[float]) -> None:
    """Send pairs whose second message comes at any moment in which the reader, done with the first, may be parking."""
    for gap in gaps_us:
        await ports.send(None)
        _pause(gap / 1e6)
        await ports.send(time.monotonic_ns())
        await ports.receive()


async def acknowledge_pairs(ports: Ports, count: int) -> Wakes:
    """Receive pairs and send a message back for each."""
    late_ns, found_asleep = [], 0
    parks = ports.parks or (lambda: 0)
    for _ in range(count):
        await ports.receive()
        parks_before = parks()
        sent_ns = await ports.receive()
        late_ns.append(time.monotonic_ns() - sent_ns)
        found_asleep += parks() != parks_before
        await ports.send(None)
    return Wakes(late_ns, found_asleep if ports.parks else None)


def _pause(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        time.sleep(0)  # lets a contestant's own threads work


if __name__ == "__main__":
    sys.exit(main("latency", __doc__, run, repeat=3, seconds=0.5, contestants=CONTESTANTS, default=EVERYWHERE))
