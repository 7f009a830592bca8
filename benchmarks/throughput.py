"""Messages per second from one writer to one reader, against what every Python has. README shows the picture of it."""

from __future__ import annotations

import sys

from benchmarks.compare.cases import Case
from benchmarks.compare.measure import measure
from benchmarks.contestants import CONTESTANTS
from benchmarks.framework.harness import Settings, main
from benchmarks.framework.report import Report
from benchmarks.framework.workload import KIB, MIB, SMALL_DICT, block

EVERYWHERE = ("aioshm", "zmq.asyncio", "mp.Queue", "mp.Pipe")
MESSAGES = [
    SMALL_DICT,
    block(4 * KIB, slots=512, chunk_bytes=64 * KIB),
    block(MIB, slots=16, chunk_bytes=2 * MIB),
    block(16 * MIB),
]


async def run(settings: Settings, report: Report) -> None:
    """Measure each kind of message."""
    contestants = [one for one in CONTESTANTS if one.name in settings.names]
    for work in MESSAGES[::2] if settings.quick else MESSAGES:
        await measure(settings, report, Case(work.name, work.name, "stream", work, EVERYWHERE), contestants)


if __name__ == "__main__":
    sys.exit(main("throughput", __doc__, run, repeat=5, seconds=0.3, contestants=EVERYWHERE))
