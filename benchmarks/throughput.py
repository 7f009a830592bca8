"""Messages per second from one writer to one reader."""

from __future__ import annotations

import sys

from benchmarks.contestants import CONTESTANTS, EVERYWHERE
from benchmarks.framework.contest import measure_streams
from benchmarks.framework.harness import Settings, main
from benchmarks.framework.report import Report
from benchmarks.framework.workload import SMALL_DICT, usual

RATIO = 5.0


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the result against the promise."""
    await measure_streams(settings, report, settings.chosen(CONTESTANTS), usual(settings.quick), [1])
    ratio = report.ratio(SMALL_DICT.name, "aioshm", "zmq.asyncio", "messages_per_s")
    text = f"messages/s of {SMALL_DICT.name}s to one reader, against zmq.asyncio"
    report.hold(text, ratio, "x", RATIO, at_least=True)


if __name__ == "__main__":
    sys.exit(main("throughput", __doc__, run, repeat=5, seconds=0.5, contestants=CONTESTANTS, default=EVERYWHERE))
