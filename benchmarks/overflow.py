"""Messages per second that do not fit a chunk: through overflow segments, and over ZeroMQ."""

from __future__ import annotations

import sys

from benchmarks.contestants.aioshm_ends import SEGMENTS, ZEROMQ
from benchmarks.framework.contest import measure_streams
from benchmarks.framework.harness import Settings, main
from benchmarks.framework.report import Report
from benchmarks.framework.workload import KIB, MIB, block

CHUNK_BYTES = 64 * KIB
READERS = [1, 2]


async def run(settings: Settings, report: Report) -> None:
    """Measure both ways in turns, and say how far apart they are."""
    sizes = [MIB] if settings.quick else [256 * KIB, MIB, 16 * MIB]
    workloads = [block(size, slots=10, chunk_bytes=CHUNK_BYTES) for size in sizes]
    contestants = [SEGMENTS, ZEROMQ]
    await measure_streams(settings, report, contestants, workloads, READERS[:1] if settings.quick else READERS)
    for work in workloads:
        ratio = report.ratio(work.name, SEGMENTS.name, ZEROMQ.name, "messages_per_s")
        if ratio is not None:
            report.remarks.append(f"{work.name}, 1 reader: segments send {ratio:.1f} times as many messages/s")


if __name__ == "__main__":
    sys.exit(main("overflow", __doc__, run, repeat=5, seconds=1.0))
