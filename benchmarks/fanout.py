"""Messages per second from one writer to 1, 2, 3 and 4 readers, each of which gets every message."""

from __future__ import annotations

import sys

from benchmarks.harness import Settings, main
from benchmarks.report import Report
from benchmarks.stream import measure_streams

READERS = [1, 2, 3, 4]
QUICK_READERS = [1, 2]


async def run(settings: Settings, report: Report) -> None:
    """Measure."""
    await measure_streams(settings, report, QUICK_READERS if settings.quick else READERS)


if __name__ == "__main__":
    sys.exit(main("fanout", __doc__, run, repeat=3, seconds=0.25))
