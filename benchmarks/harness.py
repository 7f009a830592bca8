"""What every benchmark's command line has in common."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from benchmarks.crew import BenchmarkError
from benchmarks.machine import describe
from benchmarks.payloads import PAYLOADS, QUICK_PAYLOADS, Payload
from benchmarks.report import Report
from benchmarks.rivals import RIVALS, Rival

QUICK_SECONDS = 0.05

_LOOPS = ["asyncio", "uvloop"]


@dataclass(frozen=True)
class Settings:
    """What the command line asks for.

    Attributes:
        repeat: Repetitions.
        seconds: About how long each contestant is measured in each repetition of each case.
        quick: Only show that everything works; the figures mean nothing.
        loop_factory: What makes the event loops of all processes.
        rivals: The contestants.
        payloads: The kinds of messages.
    """

    repeat: int
    seconds: float
    quick: bool
    loop_factory: Callable[[], asyncio.AbstractEventLoop]
    rivals: Sequence[Rival]
    payloads: Sequence[Payload]


def main(
    name: str,
    description: str | None,
    run: Callable[[Settings, Report], Coroutine[Any, Any, None]],
    *,
    repeat: int,
    seconds: float,
    rivals: Sequence[Rival] = RIVALS,
    payloads: Sequence[Payload] | None = None,
) -> int:
    """Run a benchmark from the command line.

    Args:
        name: Of the benchmark.
        description: For ``--help``.
        run: Measures, and notes what it finds.
        repeat: Repetitions, unless the command line says otherwise.
        seconds: Of one measurement, unless the command line says otherwise.
        rivals: The contestants to choose from.
        payloads: The kinds of messages; None: the usual ones.

    Returns:
        The exit code: 1 if a promise was missed and ``--check`` given, 2 if the benchmark could not be finished.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a promise was missed")
    parser.add_argument("--quick", action="store_true", help="show in seconds that it works; the figures mean nothing")
    parser.add_argument("--repeat", type=positive_int, default=None, help=f"repetitions (default: {repeat})")
    parser.add_argument(
        "--seconds", type=positive_float, default=None, help=f"length of one measurement (default: {seconds:g})"
    )
    parser.add_argument("--loop", choices=_LOOPS, default=_LOOPS[0], help="event loop of every process")
    names = [rival.name for rival in rivals]
    parser.add_argument("--rivals", nargs="+", choices=names, default=names, help="contestants (default: all)")
    args = parser.parse_args()
    settings = Settings(
        repeat=args.repeat or (1 if args.quick else repeat),
        seconds=args.seconds or (QUICK_SECONDS if args.quick else seconds),
        quick=args.quick,
        loop_factory=_loop_factory(args.loop),
        rivals=[rival for rival in rivals if rival.name in args.rivals],
        payloads=payloads or (QUICK_PAYLOADS if args.quick else PAYLOADS),
    )
    report = Report(
        name,
        describe(args.loop),
        {"repeat": settings.repeat, "seconds": settings.seconds, "quick": settings.quick},
    )
    signal.signal(signal.SIGTERM, _exit)
    try:
        with asyncio.Runner(loop_factory=settings.loop_factory) as runner:
            runner.run(run(settings, report))
    except BenchmarkError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if args.json:
        print(report.to_json())
    else:
        report.show()
    return 1 if args.check and not all(promise.kept for promise in report.promises) else 0


def progress(text: str) -> None:
    """Say on stderr what is being done."""
    print(text, file=sys.stderr, flush=True)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def _exit(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)  # unlike the default action, this ends the other processes first


def _loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if name == "uvloop":
        import uvloop

        return uvloop.new_event_loop
    return asyncio.new_event_loop


def positive_int(text: str) -> int:
    """Return an argument that must be a positive whole number."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def positive_float(text: str) -> float:
    """Return an argument that must be a positive number."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {value:g}")
    return value
