"""Loans of arrays that readers lease, of every size: from the end of the block to the view, and what was copied."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.contestants.aioshm_ends import BLOCKING, READY_TIMEOUT_S, Face, copied_bytes, open_reader
from benchmarks.contestants.contestant import Contestant, Opened, Port, hand
from benchmarks.framework.contest import Contest
from benchmarks.framework.harness import Settings, main
from benchmarks.framework.loops import Order, Ports, sleep_until
from benchmarks.framework.report import Report, latencies
from benchmarks.framework.stage import Stage
from benchmarks.framework.workload import KIB, MIB, Codec, Workload, marked

SIZES = [64, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB]
QUICK_SIZES = [64, 64 * KIB, 16 * MIB]

VIEW_BYTES = 256 * KIB
"""Smaller messages are leased as a copy."""

PERIOD_S = 0.00006
WARM_UP = 500
"""Messages: in these a reader finds its rhythm, and each page that is looked at is touched for the first time."""

READER_BEGINS_S = 0.3

MAX_COPIED = 512
"""Bytes of a message that neither a loan nor a lease copies: what is pickled beside the array."""


def open_writer(face: Face, links: Sequence[Connection], _workload: Workload) -> Opened:
    """Create the queue, whose loans are what is called."""
    queue = import_module(BLOCKING if face.blocking else "aioshm").MessageQueue(len(links), len(links))
    hand(links, queue.export_handle())
    if not face.blocking:
        return _ready_awaited(queue)
    queue.wait_until_ready(READY_TIMEOUT_S)
    return Port(queue.loan, queue.close, copied=partial(copied_bytes, queue))


async def _ready_awaited(queue: Any) -> Port:
    await queue.wait_until_ready(READY_TIMEOUT_S)
    return Port(queue.loan, queue.aclose, copied=partial(copied_bytes, queue))


def _contestant(name: str, face: Face) -> Contestant:
    module = BLOCKING if face.blocking else "aioshm"
    carried: frozenset[Codec] = frozenset({"array"})
    return Contestant(
        name, partial(open_writer, face), partial(open_reader, face), not face.blocking, module, module, carried
    )


FACES = [_contestant("aioshm", Face()), _contestant("aioshm blocking", Face(blocking=True))]


async def lend(ports: Ports, count: int, period_s: float) -> int:
    """Lend arrays at a cadence, each with the time at which its block ends; return how many bytes were copied."""
    loan: Any = ports.send
    copied, turn, nbytes, clock = ports.copied, ports.turn, ports.work.nbytes, time.monotonic_ns
    before, due = copied(), time.perf_counter() + READER_BEGINS_S
    for _ in range(count):
        due += period_s
        await turn()
        sleep_until(due)
        async with loan(nbytes // 8, "uint64") as array:
            array[0] = clock()
    return int(copied() - before)


async def look(ports: Ports, count: int) -> tuple[list[float], int]:
    """Return how long after its loan's end each array was seen, in microseconds, and what was copied of them."""
    lease: Any = ports.lease
    copied, clock, length = ports.copied, time.monotonic_ns, ports.work.nbytes // 8
    late = []
    before = copied()
    for _ in range(count):
        async with lease() as array:
            now = clock()
            late.append((now - int(array[0])) / 1e3)
            if len(array) != length:
                raise ports.work.wrong(array, length)
    return late, copied() - before


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the result against the promises."""
    works = [marked(nbytes, "array") for nbytes in (QUICK_SIZES if settings.quick else SIZES)]
    count = max(20, int(settings.seconds / PERIOD_S))

    async with Contest(settings, report, settings.chosen(FACES), works) as contest:

        async def turn(kind: int, stage: Stage) -> None:
            write, read = Order(lend, (WARM_UP + count, PERIOD_S), kind), Order(look, (WARM_UP + count,), kind)
            copied, [(late, copied_too)] = await stage.perform(write, read)
            result = report.result(works[kind].name, stage.name)
            result.add(
                **latencies(late[WARM_UP:], slowest=False),
                copied_bytes_per_message=(copied + copied_too) / (WARM_UP + count),
            )

        for _ in contest.repetitions("loans"):
            for kind in range(len(works)):
                await contest.each(partial(turn, kind))
    for face in FACES:
        for work in works:
            result = report.find(work.name, face.name)
            if result is not None and work.nbytes >= VIEW_BYTES:
                copied = result.median("copied_bytes_per_message")
                report.hold(f"{face.name}, {work.name}: bytes copied of a message", copied, " B", MAX_COPIED)


if __name__ == "__main__":
    sys.exit(main("loans", __doc__, run, repeat=15, seconds=0.25, contestants=FACES, loop="uvloop"))
