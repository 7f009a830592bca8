"""Messages per second to a remote reader, over TCP on the loopback interface, and what encryption costs."""

from __future__ import annotations

import sys

from benchmarks.contestants import OVER_TCP
from benchmarks.contestants.aioshm_ends import CURVE, LEASED, PLAIN
from benchmarks.contestants.pyzmq import BARE, BARE_UNCOPIED
from benchmarks.framework.contest import measure_streams
from benchmarks.framework.harness import Settings, main
from benchmarks.framework.report import Report
from benchmarks.framework.workload import BYTES_4K, BYTES_4M

RATIO = 0.8


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the results against the promise."""
    workloads = [BYTES_4K, BYTES_4M]
    await measure_streams(settings, report, settings.chosen(OVER_TCP), workloads, [1])
    for case in (work.name for work in workloads):
        for ours, theirs in ((PLAIN, BARE), (LEASED, BARE_UNCOPIED)):
            ratio = report.ratio(case, ours.name, theirs.name, "messages_per_s")
            text = f"messages/s of {case}: {ours.name}, against {theirs.name}, which loses messages"
            report.hold(text, ratio, "x", RATIO, at_least=True)
        left = report.ratio(case, CURVE.name, PLAIN.name, "messages_per_s")
        if left is not None:
            report.remarks.append(f"CURVE leaves {left:.0%} of the messages/s of {case}")


if __name__ == "__main__":
    sys.exit(main("remote", __doc__, run, repeat=5, seconds=1.0, contestants=OVER_TCP))
