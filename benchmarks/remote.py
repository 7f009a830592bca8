"""Messages per second to a remote reader, over TCP on the loopback interface, and what encryption costs."""

from __future__ import annotations

import sys

from benchmarks.harness import Settings, main
from benchmarks.payloads import BYTES_4K, BYTES_4M
from benchmarks.report import Promise, Report
from benchmarks.rivals import Rival
from benchmarks.rivals.over_tcp import BARE, BARE_UNCOPIED, CURVE, LEASED, OVER_TCP, PLAIN
from benchmarks.stream import measure_streams

RATIO = 0.8


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the results against the promise."""
    await measure_streams(settings, report, [1])
    for payload in settings.payloads:

        def rate(rival: Rival, case: str = payload.name) -> float | None:
            result = report.find(case, rival.name)
            return None if result is None else result.median("messages_per_s")

        for ours, theirs in ((PLAIN, BARE), (LEASED, BARE_UNCOPIED)):
            measured, bound = rate(ours), rate(theirs)
            if measured and bound:
                text = f"messages/s of {payload.name}: {ours.name}, against {theirs.name}, which loses messages"
                report.promises.append(
                    Promise(f"{text} (at least {RATIO:g}x)", measured / bound, "x", RATIO, at_least=True)
                )
        plain, curve = rate(PLAIN), rate(CURVE)
        if plain and curve:
            report.remarks.append(f"CURVE leaves {curve / plain:.0%} of the messages/s of {payload.name}")


if __name__ == "__main__":
    sys.exit(main("remote", __doc__, run, repeat=5, seconds=1.0, rivals=OVER_TCP, payloads=[BYTES_4K, BYTES_4M]))
