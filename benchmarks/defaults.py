"""The promises of default rings alone, with new processes for every repetition.

Two processes that do the same work differ by up to a tenth for as long as they live, because their memory lies
elsewhere in the caches. So every repetition has processes of its own, and its figure is the median of a few turns.

    make bench-defaults ARGS=--check     in .venv-rivals, which has every rival in its pinned version
"""

from __future__ import annotations

import sys
from dataclasses import replace
from statistics import median

from benchmarks.compare.__main__ import add_only, wanted
from benchmarks.compare.cases import RIVAL_PACKAGES
from benchmarks.compare.measure import measure
from benchmarks.compare.promises import PROMISES, hold
from benchmarks.contestants import CONTESTANTS
from benchmarks.framework import harness
from benchmarks.framework.harness import Settings
from benchmarks.framework.report import Report

TURNS = 3
"""Of each contestant of a stream or of round trips, in one repetition."""


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the result against the promises."""
    cases = wanted(settings)
    for case in cases:
        names = {name for promise in PROMISES if promise.case == case.name for name in promise.contestants}
        contestants = [one for one in CONTESTANTS if one.name in names & set(case.contestants)]
        several = replace(settings, repeat=TURNS if case.kind in {"stream", "round trips"} else 1)
        for number in range(settings.repeat):
            harness.progress(f"{case.name}: processes {number + 1} of {settings.repeat}")
            turns = Report(report.benchmark, {}, {})
            await measure(several, turns, case, contestants, seed=number)
            for result in turns.results:
                medians = {name: median(values) for name, values in result.figures.items()}
                report.result(result.case, result.contestant, result.n_reader).add(**medians)
            report.failures += turns.failures
    hold(report, cases)


if __name__ == "__main__":
    sys.exit(
        harness.main(
            "defaults", __doc__, run, repeat=5, seconds=0.2, loop="uvloop", more=add_only, packages=RIVAL_PACKAGES
        )
    )
