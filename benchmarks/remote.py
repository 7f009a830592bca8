"""Messages per second to a remote reader, over TCP on the loopback interface, and what encryption costs."""

from __future__ import annotations

import sys

from benchmarks.harness import Settings, main
from benchmarks.payloads import BYTES_4K, BYTES_4M
from benchmarks.report import Promise, Report
from benchmarks.rivals.over_tcp import BARE, CURVE, OVER_TCP, PLAIN
from benchmarks.stream import measure_streams

RATIO = 0.8


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the results against the promise."""
    await measure_streams(settings, report, [1])
    for payload in settings.payloads:
        found = [report.find(payload.name, rival.name) for rival in (PLAIN, CURVE, BARE)]
        if None in found:
            continue
        plain, curve, bare = (result.median("messages_per_s") for result in found if result is not None)
        report.promises.append(
            Promise(
                f"messages/s of {payload.name}, without encryption, against a bare zmq.asyncio XPUB/SUB "
                f"that loses messages (at least {RATIO:g}x)",
                plain / bare,
                "x",
                RATIO,
                at_least=True,
            )
        )
        report.remarks.append(f"CURVE leaves {curve / plain:.0%} of the messages/s of {payload.name}")


if __name__ == "__main__":
    sys.exit(main("remote", __doc__, run, repeat=5, seconds=1.0, rivals=OVER_TCP, payloads=[BYTES_4K, BYTES_4M]))
