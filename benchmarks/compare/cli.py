"""The command line: which cases, and where the picture goes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare import plot
from benchmarks.compare.cases import CASES, RIVAL_PACKAGES, Case
from benchmarks.compare.measure import measure
from benchmarks.compare.promises import hold
from benchmarks.contestants import CONTESTANTS, Contestant
from benchmarks.framework import harness
from benchmarks.framework.harness import STDOUT, Settings, progress
from benchmarks.framework.report import Report

RESULTS = Path("results")


def main() -> int:
    """Run the comparison; return the exit code."""
    return harness.main(
        "compare",
        sys.modules["benchmarks.compare"].__doc__,
        run,
        repeat=5,
        seconds=0.5,
        contestants=CONTESTANTS,
        loop="uvloop",
        more=_add_options,
        results=RESULTS / "compare.json",
        packages=RIVAL_PACKAGES,
    )


async def run(settings: Settings, report: Report) -> None:
    """Measure, hold the results against the promises, and draw the picture."""
    picture: Path | None = settings.more.plot
    if picture is not None:
        plot.check(picture)
    cases = [case for case in CASES if _is_wanted(case, settings)]
    contestants = settings.chosen(CONTESTANTS)
    report.settings["missing"] = _missing(cases, contestants)
    for case in cases:
        await measure(settings, report, case, [one for one in contestants if one.name in case.contestants])
    report.settings["unheld"] = hold(report)
    report.settings["failures"] = report.failures
    report.remarks += [f"not measured: {text}" for text in report.settings["unheld"]]
    if picture is None and settings.more.json != STDOUT:
        picture = RESULTS / "compare.svg"
    if picture is not None:
        try:
            plot.plot(report, picture)
            progress(f"plot: {picture.resolve()}")
        except plot.NoPlotError as error:
            progress(f"no plot: {error}")


def _add_options(parser: argparse.ArgumentParser) -> None:
    names = [case.name for case in CASES]
    parser.add_argument("--plot", metavar="FILE", type=Path, help="write a plot there: .svg, .png or .pdf")
    parser.add_argument(
        "--only", nargs="+", metavar="CASE", choices=names, help=f"cases (default: all): {', '.join(names)}"
    )


def _is_wanted(case: Case, settings: Settings) -> bool:
    only = settings.more.only
    return case.name in only if only else case.quick or not settings.quick


def _missing(cases: Sequence[Case], contestants: Sequence[Contestant]) -> list[str]:
    """Return who cannot take part in what, and how that can be changed."""
    texts: dict[str, None] = {}
    for contestant in contestants:
        for case in cases:
            reason = contestant.missing(case.workload.codec) if contestant.name in case.contestants else None
            if reason is not None:
                texts[f"missing: {contestant.name} ({reason})"] = None
    return list(texts)
