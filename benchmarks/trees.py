"""Two trees of aioshm against each other: the speed of the second as a ratio to the first, for every case.

    python -m benchmarks.trees PATH_BEFORE PATH_AFTER [--only throughput remote ...] [--within PERCENT] [--control]

Each tree is a checkout with its own ``.venv`` and build. ``--repeat`` is how many turns each takes, first one and then
the other in front; a turn is a run of its own with new processes, since much of the noise lasts as long as a process.
The benchmarks are those of this checkout, run with each tree's library; where they need what one of them has not got,
each tree's own ones. Above 1 the second tree is faster. A case counts as slower if both the median of the turns' ratios
and the ratio of the best turns say so, by more than ``--within`` percent. Rivals take part as a control: what they vary
by is the machine's doing. With ``--control`` the first tree runs twice in each turn, before and after the other: the
column "control" is one of these runs as a ratio to the other, which shows what a case varies by without any change.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

from benchmarks.framework.crew import BenchmarkError
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.report import Report, Result

HERE = Path(__file__).parents[1]
BENCHMARKS: dict[str, list[str]] = {
    "throughput": ["aioshm", "zmq.asyncio"],
    "latency": ["aioshm", "zmq.asyncio"],
    "remote": ["aioshm, secure=False", "aioshm, CURVE", "aioshm leased, secure=False", "bare zmq.asyncio"],
    "engine_roundtrip": [],
    "events_publish": [],
}
"""Who takes part in what; an empty list means everybody."""

OURS = ("aioshm", "ZmqEventPublisher", "ThreadedEventPublisher")
WITHIN = 5.0  # percent
NOISY = ("p99_us", "max_us", "parked_percent")
"""Endings of figures that say too little about so short a turn."""


Key: TypeAlias = tuple[str, str, str, int]
"""A case, a figure, a contestant, and the number of readers."""


@dataclass(frozen=True)
class Tree:
    """A checkout, and the folder that has its library and the benchmarks that measure it."""

    path: Path
    folder: Path

    async def start(
        self, *command: str, errors: int | IO[bytes] = asyncio.subprocess.PIPE
    ) -> asyncio.subprocess.Process:
        """Start its Python, with pipes to talk to it; its stderr goes to a file, if one is given."""
        pipe = asyncio.subprocess.PIPE
        python = self.path / ".venv/bin/python"
        return await asyncio.create_subprocess_exec(
            python, *command, cwd=self.folder, stdin=pipe, stdout=pipe, stderr=errors
        )

    async def run(self, *command: str) -> tuple[int | None, bytes, bytes]:
        """Run its Python; return the exit code and the output."""
        process = await self.start(*command)
        try:
            output, errors = await process.communicate()
            return process.returncode, output, errors
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()

    async def measure(self, benchmark: str, settings: Settings) -> dict[Key, float]:
        """Run a benchmark once; return its figures."""
        names = BENCHMARKS[benchmark]
        options = ["--json", "--repeat", "1", "--seconds", str(settings.seconds), "--loop", settings.more.loop]
        options += ["--quick"] * settings.quick + (["--rivals", *names] if names else [])
        _, output, errors = await self.run("-m", f"benchmarks.{benchmark}", *options)
        try:
            report: dict[str, Any] = json.loads(output)
        except ValueError:
            raise BenchmarkError(f"{benchmark} failed in {self.path}:\n{errors.decode()}") from None
        return {
            (result["case"], figure, result["contestant"], result["readers"]): values["median"]
            for result in report["results"]
            for figure, values in result["figures"].items()
            if not figure.endswith(NOISY)
        }


async def run(settings: Settings, report: Report) -> None:
    """Let both trees take turns, benchmark by benchmark."""
    paths = [path.resolve() for path in (settings.more.before, settings.more.after)]
    for path in paths:
        check_tree(path)
    for benchmark in settings.more.only or BENCHMARKS:
        with ExitStack() as stack:
            trees = [staged(path, Path(stack.enter_context(tempfile.TemporaryDirectory()))) for path in paths]
            for tree in list(trees):
                code, _, errors = await tree.run("-c", f"import benchmarks.{benchmark}")
                if code:
                    report.remarks.append(f"{benchmark}: each tree's own, for {errors.decode().splitlines()[-1]}")
                    trees = [Tree(path, path) for path in paths]
                    break
            turns: list[list[dict[Key, float]]] = []
            for number in range(settings.repeat):
                progress(f"{benchmark}: turn {number + 1} of {settings.repeat}")
                step = 1 if number % 2 else -1
                runs = [*trees, trees[0]] if settings.more.control else trees
                turns.append([await tree.measure(benchmark, settings) for tree in runs[::step]][::step])
        note(report, benchmark, turns, settings.more.within)


def check_tree(path: Path) -> None:
    """Refuse what no benchmark can be run with.

    Raises:
        BenchmarkError: It is that.
    """
    if not (path / ".venv/bin/python").exists() or not (path / "aioshm").is_dir():
        raise BenchmarkError(f"{path} is no checkout with a .venv of its own; `make .venv/.ready` there builds one")


def staged(path: Path, folder: Path) -> Tree:
    """Put a tree's library and this checkout's benchmarks side by side."""
    (folder / "aioshm").symlink_to(path / "aioshm")
    (folder / "benchmarks").symlink_to(HERE / "benchmarks")
    return Tree(path, folder)


def note(
    report: Report, benchmark: str, turns: Sequence[Sequence[Mapping[Key, float]]], within: float = WITHIN
) -> None:
    """Note what each tree found, turn by turn, and which cases got slower by more than so many percent.

    A turn has the figures of both trees, and of a second run of the first one if there is a control.
    """
    slower = 0
    for key in turns[0][0]:
        case, figure, contestant, n_reader = key
        found = [[run[key] for run in turn] for turn in turns if all(run.get(key) for run in turn)]
        if not found:
            report.remarks.append(f"not in both trees: {benchmark}: {case}, {figure}, {contestant}")
            continue
        power = 1 if figure.endswith("per_s") else -1
        result = report.result(f"{benchmark}: {case}, {figure}", contestant, n_reader)
        for before, after, *again in found:
            result.add(speed=(after / before) ** power)
            if again:
                result.add(control=(again[0] / before) ** power)
        best_before, best_after, *_ = (max(value**power for value in values) for values in zip(*found, strict=True))
        result.add(best_turns=best_after / best_before)
        if contestant.startswith(OURS) and max(map(result.median, ("speed", "best_turns"))) < 1 - within / 100:
            slower += 1
            speed = f"{result.median('speed'):.2f}x{_spread(result)}"
            report.remarks.append(f"SLOWER: {result.case}, {contestant}: {speed}")
    report.hold(f"{benchmark}: cases that are slower by more than {within:g}%", slower, "", 0)


def _spread(result: Result) -> str:
    """Return what the control says of a case, if there is one."""
    ratios = result.figures.get("control")
    return f" (control: {min(ratios):.2f}x to {max(ratios):.2f}x)" if ratios else ""


def percent(text: str) -> float:
    """Return a percentage of the command line."""
    value = float(text)
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"{text} is no percentage from 0 to below 100")
    return value


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, help="the tree that the other is compared with")
    parser.add_argument("after", type=Path, help="the tree that may be slower")
    parser.add_argument(
        "--within",
        type=percent,
        default=WITHIN,
        metavar="PERCENT",
        help=f"how much slower is not yet slower (default: {WITHIN:g})",
    )
    parser.add_argument("--control", action="store_true", help="run the first tree twice in each turn")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), help="benchmarks (default: all)")


if __name__ == "__main__":
    sys.exit(main("trees", __doc__, run, repeat=7, seconds=0.2, more=_add_options))
