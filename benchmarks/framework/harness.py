"""The command line that all benchmarks have in common."""

from __future__ import annotations

import argparse
import asyncio
import compileall
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import zmq

import aioshm
from aioshm.process.placement import usable_cpus
from benchmarks.framework.crew import BenchmarkError
from benchmarks.framework.report import Report

QUICK_SECONDS = 0.05
LOOPS = ["asyncio", "uvloop"]
STDOUT = "-"
PACKAGES = ("pyzmq", "uvloop", "numpy", "msgspec")


@dataclass(frozen=True)
class Settings:
    """The settings from the command line.

    Attributes:
        repeat: Repetitions.
        seconds: About how long each contestant is measured in each repetition of each case.
        quick: Only show that everything works; the figures mean nothing.
        loop_factory: Makes the event loops of all processes.
        names: Of the contestants that take part.
        more: All options, those of this benchmark among them.
    """

    repeat: int
    seconds: float
    quick: bool
    loop_factory: Callable[[], asyncio.AbstractEventLoop]
    names: Sequence[str]
    more: argparse.Namespace


def main(
    name: str,
    description: str | None,
    run: Callable[[Settings, Report], Coroutine[Any, Any, None]],
    *,
    repeat: int,
    seconds: float,
    contestants: Sequence[str] = (),
    loop: str = LOOPS[0],
    more: Callable[[argparse.ArgumentParser], None] | None = None,
    results: Path | None = None,
    packages: Sequence[str] = (),
) -> int:
    """Run a benchmark from the command line.

    Args:
        name: Of the benchmark.
        description: For ``--help``.
        run: Measures, and fills the report.
        repeat: Default number of repetitions.
        seconds: Default length of one measurement.
        contestants: Names for ``--contestants``, all of which take part by default.
        loop: Default event loop; asyncio where it is not installed.
        more: Adds options of this benchmark.
        results: Default file for JSON; None for no file.
        packages: More packages whose versions describe the machine.

    Returns:
        The exit code: 1 if a promise was missed and ``--check`` given, 2 if the benchmark could not be finished, or not
        by all contestants.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual = loop if find_spec(loop) else LOOPS[0]
    add = parser.add_argument
    add("--json", nargs="?", const=STDOUT, metavar="FILE", help="print JSON instead of the table, or write it to FILE")
    add("--check", action="store_true", help="exit with 1 if a promise was missed")
    add("--quick", action="store_true", help="show in seconds that it works; the figures mean nothing")
    add("--repeat", type=_positive_int, help=f"repetitions (default: {repeat})")
    add("--seconds", type=_positive_float, help=f"length of one measurement (default: {seconds:g})")
    add("--loop", choices=LOOPS, default=usual, help=f"event loop of every process (default: {usual})")
    if contestants:
        listed = ", ".join(contestants)
        add("--contestants", nargs="+", metavar="NAME", choices=contestants, help=f"who takes part, of {listed}")
    parser.set_defaults(contestants=contestants)
    if more is not None:
        more(parser)
    args = parser.parse_args()
    # As where it was installed: what is measured may start processes, and PYTHONDONTWRITEBYTECODE may be set.
    compileall.compile_dir(str(Path(aioshm.__file__).parent), quiet=1)
    settings = Settings(
        args.repeat or (1 if args.quick else repeat),
        args.seconds or (QUICK_SECONDS if args.quick else seconds),
        args.quick,
        loop_factory(args.loop),
        args.contestants,
        args,
    )
    report = Report(
        name,
        describe(args.loop, packages),
        {"repeat": settings.repeat, "seconds": settings.seconds, "quick": settings.quick},
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        with asyncio.Runner(loop_factory=settings.loop_factory) as runner:
            runner.run(_until_terminated(run(settings, report)))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except BenchmarkError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    _publish(report, args.json, results)
    if args.check and not all(promise.kept for promise in report.promises):
        return 1
    return 2 if report.failures else 0


def progress(text: str) -> None:
    """Say on stderr what is being done."""
    print(text, file=sys.stderr, flush=True)


def describe(loop: str, packages: Sequence[str] = ()) -> dict[str, str | int | float]:
    """Return processor, system, and versions, those of these packages too."""
    return {
        "date": date.today().isoformat(),
        "cpu": _cpu_model(),
        "usable_cpus": usable_cpus(),
        "load_1m": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "loop": loop,
        "aioshm": f"{aioshm.__version__} ({'native' if aioshm.native_core else 'portable'} core)",
        "libzmq": zmq.zmq_version(),
        **{package: _version(package) for package in (*PACKAGES, *packages)},
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass  # no Linux
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _publish(report: Report, to: str | None, results: Path | None) -> None:
    """Print the report, and write it to a file where there is one for it."""
    if to == STDOUT:
        print(json.dumps(report.as_dict(), indent=2))
        return
    report.show()
    path = results if to is None else Path(to)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
        progress(f"all figures: {path.resolve()}")


async def _until_terminated(measuring: Coroutine[Any, Any, None]) -> None:
    """Measure; SIGTERM cancels that, so that the other processes are ended first.

    What a plain handler raised could come up where nobody hears of it, as in what is run at a fork. Only the first
    signal counts: `timeout` sends two, and another one would break off what the first one began.
    """
    task = asyncio.create_task(measuring)

    def end() -> None:
        if not task.cancelling():
            task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    await task


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return what makes event loops of a kind."""
    if name == "uvloop":
        import uvloop

        return uvloop.new_event_loop
    return asyncio.new_event_loop


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {value:g}")
    return value
