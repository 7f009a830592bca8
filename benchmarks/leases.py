"""Leases against dequeue, and calls that block against those that are awaited, for messages of every size."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

from benchmarks.contestants.aioshm_ends import CONTESTANTS
from benchmarks.framework.contest import measure_streams
from benchmarks.framework.harness import Settings, main
from benchmarks.framework.report import Report
from benchmarks.framework.workload import KIB, MIB, Workload, block, plain_bytes, small_dict, tensor

AWAITED, BLOCKING = "aioshm", "aioshm blocking"
LEASED = {AWAITED: "aioshm leased", BLOCKING: "aioshm blocking leased"}

AT_LEAST = 1.0
"""A lease's messages/s, against those of ``dequeue``."""

BLOCKING_AT_LEAST = 0.95
"""The messages/s of calls that block, against those that are awaited."""

SIZES = [64, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 16 * MIB]
QUICK_SIZES = [4 * KIB, MIB]


def workloads(quick: bool) -> list[Workload]:
    """Return bytes, arrays and tensors of every size, and arrays in MessagePack."""
    found = [small_dict(), small_dict("msgpack")]
    for nbytes in QUICK_SIZES if quick else SIZES:
        slots, chunk_bytes = (64, 128 * KIB) if nbytes <= 64 * KIB else (10, 24 * MIB)
        found += [
            plain_bytes(nbytes, kinds=8, slots=slots, chunk_bytes=chunk_bytes),
            tensor(nbytes, slots=slots, chunk_bytes=chunk_bytes),
        ]
        if nbytes >= 64 * KIB:
            array = block(nbytes, slots=slots, chunk_bytes=chunk_bytes)
            found += [array, replace(array, name=f"{array.name}, msgpack", codec="msgpack")]
    return found


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the result against the promises."""
    works = workloads(settings.quick)
    await measure_streams(settings, report, settings.chosen(CONTESTANTS), works, [1])
    ratio = partial(report.ratio, figure="messages_per_s")
    for work in works:
        for plain, leased in LEASED.items():
            text = f"{work.name}: messages/s of {leased}, against {plain}"
            report.hold(text, ratio(work.name, leased, plain), "x", AT_LEAST, at_least=True)
        if work.nbytes >= 4 * KIB:
            text = f"{work.name}: messages/s of {BLOCKING}, against {AWAITED}"
            report.hold(text, ratio(work.name, BLOCKING, AWAITED), "x", BLOCKING_AT_LEAST, at_least=True)


if __name__ == "__main__":
    sys.exit(main("leases", __doc__, run, repeat=5, seconds=0.25, contestants=CONTESTANTS, loop="uvloop"))
