"""Messages per second from one writer to one reader."""

from __future__ import annotations

import sys

from benchmarks.harness import Settings, main
from benchmarks.payloads import SMALL_DICT
from benchmarks.report import Promise, Report
from benchmarks.stream import measure_streams

SMALL_DICT_RATIO = 5.0


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the result against the promise."""
    await measure_streams(settings, report, [1])
    ours, theirs = report.find(SMALL_DICT.name, "aioshm"), report.find(SMALL_DICT.name, "zmq.asyncio")
    if ours and theirs:
        report.promises.append(
            Promise(
                f"messages/s of {SMALL_DICT.name}s to one reader, against zmq.asyncio (at least {SMALL_DICT_RATIO:g}x)",
                ours.median("messages_per_s") / theirs.median("messages_per_s"),
                "x",
                SMALL_DICT_RATIO,
                at_least=True,
            )
        )


if __name__ == "__main__":
    sys.exit(main("throughput", __doc__, run, repeat=5, seconds=0.5))
