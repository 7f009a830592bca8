"""The command line: which cases, how often, and where the figures go."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from benchmarks.compare import plot
from benchmarks.compare.cases import CASES, Case
from benchmarks.compare.contestant import Contestant
from benchmarks.compare.contestants import CONTESTANTS
from benchmarks.compare.measure import Run, measure
from benchmarks.compare.promises import hold
from benchmarks.compare.tables import show
from benchmarks.compare.troupe import loop_factory
from benchmarks.crew import BenchmarkError
from benchmarks.harness import positive_float, positive_int, progress
from benchmarks.machine import describe
from benchmarks.report import Report

RESULTS = Path("results")
REPEAT = 5
SECONDS = 0.5
QUICK_SECONDS = 0.02

RIVAL_PACKAGES = ["vllm", "iceoryx2", "faster-fifo", "pynng", "torch"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison.

    Returns:
        The exit code: 1 if a promise was missed and ``--check`` given, 2 if somebody failed, or nothing can be run.
    """
    args = _parser().parse_args(arguments)
    try:
        if args.plot is not None:
            _check_plot(args.plot)
    except plot.NoPlotError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    cases = _cases(args)
    missing = _missing(cases, args.contestants)
    for text in missing:
        progress(text)
    run = Run(
        Report(
            "compare",
            {**describe(_loop_name()), **{name: _version(name) for name in RIVAL_PACKAGES}},
            {},
        ),
        args.repeat or (1 if args.quick else REPEAT),
        args.seconds or (QUICK_SECONDS if args.quick else SECONDS),
        args.quick,
    )
    run.report.settings.update(repeat=run.repeat, seconds=run.seconds, quick=run.quick, missing=missing)
    signal.signal(signal.SIGTERM, _exit)
    try:
        asyncio.run(_run(run, cases, args.contestants))
    except BenchmarkError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    run.report.settings["unheld"] = hold(run.report)
    run.report.settings["failures"] = run.failures
    return _publish(run, cases, args)


async def _run(run: Run, cases: Sequence[Case], names: Sequence[str]) -> None:
    for case in cases:
        taking_part = _taking_part(case, names)
        if taking_part:
            await measure(run, case, taking_part)


def _publish(run: Run, cases: Sequence[Case], args: argparse.Namespace) -> int:
    report = run.report
    if args.json == "-":
        print(report.to_json())
    else:
        show(report, cases, args.quick)
        for text in report.settings["unheld"]:
            print(f"{'-':6}  not measured: {text}")
        path = Path(args.json or RESULTS / "compare.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(report.to_json() + "\n")
        progress(f"all figures: {path.resolve()}")
    picture = args.plot
    if picture is None and args.json != "-":
        picture = RESULTS / "compare.svg"
    if picture is not None:
        try:
            plot.plot(report, picture)
            progress(f"plot: {picture.resolve()}")
        except plot.NoPlotError as error:
            progress(f"no plot: {error}")
    for text in run.failures:
        progress(f"FAILED: {text}")
    if args.check and not all(promise.kept for promise in report.promises):
        return 1
    return 2 if run.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=sys.modules["benchmarks.compare"].__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    case_names, names = [case.name for case in CASES], [contestant.name for contestant in CONTESTANTS]
    parser.add_argument("--json", metavar="FILE", help="write JSON there; - prints it instead of the table")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="write a plot there: .svg, .png or .pdf")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a promise was missed")
    parser.add_argument("--quick", action="store_true", help="show in seconds that it works; the figures mean nothing")
    parser.add_argument("--repeat", type=positive_int, help=f"repetitions (default: {REPEAT})")
    parser.add_argument("--seconds", type=positive_float, help=f"length of one measurement (default: {SECONDS:g})")
    parser.add_argument(
        "--only", nargs="+", metavar="CASE", choices=case_names, help=f"cases (default: all): {', '.join(case_names)}"
    )
    parser.add_argument(
        "--contestants",
        nargs="+",
        metavar="NAME",
        choices=names,
        default=names,
        help=f"who takes part (default: all): {', '.join(names)}",
    )
    return parser


def _cases(args: argparse.Namespace) -> list[Case]:
    if args.only:
        return [case for case in CASES if case.name in args.only]
    return [case for case in CASES if case.quick or not args.quick]


def _taking_part(case: Case, names: Sequence[str]) -> list[Contestant]:
    return [
        contestant
        for contestant in CONTESTANTS
        if contestant.name in names
        and contestant.name in case.contestants
        and contestant.missing(case.workload.codec) is None
    ]


def _missing(cases: Sequence[Case], names: Sequence[str]) -> list[str]:
    """Return who cannot take part in what, and how that can be changed."""
    texts: dict[str, None] = {}
    for contestant in CONTESTANTS:
        for case in cases:
            if contestant.name in names and contestant.name in case.contestants:
                reason = contestant.missing(case.workload.codec)
                if reason is not None:
                    hint = "" if contestant.name.startswith("aioshm") else "; `make bench-rivals` gets it"
                    texts[f"missing: {contestant.name} ({reason}{hint})"] = None
    return list(texts)


def _check_plot(path: Path) -> None:
    if path.suffix not in plot.SUFFIXES:
        raise plot.NoPlotError(f"a plot's name ends in {', '.join(sorted(plot.SUFFIXES))}, not {path.suffix or path}")
    plot.require()


def _loop_name() -> str:
    return "uvloop" if loop_factory() is not asyncio.new_event_loop else "asyncio"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _exit(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)  # unlike the default action, this ends the other processes first
