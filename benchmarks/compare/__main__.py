"""``python -m benchmarks.compare``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import compare, pictures
from benchmarks.compare.cases import CASES, RIVAL_PACKAGES, Case
from benchmarks.compare.measure import measure
from benchmarks.compare.promises import hold
from benchmarks.contestants import CONTESTANTS
from benchmarks.framework import harness
from benchmarks.framework.harness import STDOUT, Settings, progress
from benchmarks.framework.report import Report

RESULTS = Path("results")


async def run(settings: Settings, report: Report) -> None:
    """Measure, hold the results against the promises, and draw the picture."""
    picture: Path | None = settings.more.plot
    if picture is not None:
        pictures.check(picture)
    cases = wanted(settings)
    contestants = [one for one in CONTESTANTS if one.name in settings.names]
    for case in cases:
        await measure(settings, report, case, [one for one in contestants if one.name in case.contestants])
    hold(report, cases)
    missing = [f"missing: {one.name} ({reason})" for one in contestants if (reason := one.missing())]
    report.settings["missing"] = missing
    if picture is None and settings.more.json != STDOUT:
        picture = RESULTS / "compare.svg"
    if picture is not None:
        try:
            pictures.draw(report.as_dict(), picture)
            progress(f"plot: {picture.resolve()}")
        except pictures.NoPictureError as error:
            progress(f"no plot: {error}")


def wanted(settings: Settings) -> list[Case]:
    """Return the cases that the command line asks for."""
    only = settings.more.only
    return [case for case in CASES if (case.name in only if only else case.quick or not settings.quick)]


def add_only(parser: argparse.ArgumentParser) -> None:
    """Add the option that chooses cases."""
    names = [case.name for case in CASES]
    parser.add_argument(
        "--only", nargs="+", metavar="CASE", choices=names, help=f"cases (default: all): {', '.join(names)}"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_only(parser)
    parser.add_argument("--plot", metavar="FILE", type=Path, help="write a plot there: .svg, .png or .pdf")


if __name__ == "__main__":
    sys.exit(
        harness.main(
            "compare",
            compare.__doc__,
            run,
            repeat=5,
            seconds=0.5,
            contestants=[one.name for one in CONTESTANTS],
            loop="uvloop",
            more=_add_options,
            results=RESULTS / "compare.json",
            packages=RIVAL_PACKAGES,
        )
    )
