"""Messages per second from one writer to 1, 2, 3 and 4 readers, each of which gets every message."""

from __future__ import annotations

import sys

from benchmarks.contestants import CONTESTANTS, EVERYWHERE
from benchmarks.framework.contest import measure_streams
from benchmarks.framework.harness import Settings, main
from benchmarks.framework.report import Report
from benchmarks.framework.workload import usual

READERS = [1, 2, 3, 4]
QUICK_READERS = [1, 2]


async def run(settings: Settings, report: Report) -> None:
    """Measure."""
    readers = QUICK_READERS if settings.quick else READERS
    await measure_streams(settings, report, settings.chosen(CONTESTANTS), usual(settings.quick), readers)


if __name__ == "__main__":
    sys.exit(main("fanout", __doc__, run, repeat=3, seconds=0.25, contestants=CONTESTANTS, default=EVERYWHERE))
