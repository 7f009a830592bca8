"""Two trees of aioshm against each other: the speed of the second as a ratio to the first, for every case.

    python -m benchmarks.trees PATH_BEFORE PATH_AFTER [--only throughput remote ...]

Each tree is a checkout with its own ``.venv`` and build. ``--repeat`` is how many turns each takes, first one and then
the other in front; a turn is a run of its own with new processes, since much of the noise lasts as long as a process.
The benchmarks are those of this checkout, run with each tree's library; where they need what one of them has not got,
each tree's own ones. Above 1 the second tree is faster. A case counts as slower if both the median of the turns' ratios
and the ratio of the best turns say so. Rivals take part as a control: what they vary by is the machine's doing.
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
from typing import Any, TypeAlias

from benchmarks.framework.crew import BenchmarkError
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.report import Report

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
TOLERANCE = 0.05
NOISY = ("p99_us", "max_us", "parked_percent")
"""Endings of figures that say too little about so short a turn."""


Key: TypeAlias = tuple[str, str, str, int]
"""A case, a figure, a contestant, and the number of readers."""


@dataclass(frozen=True)
class Tree:
    """A checkout, and the folder that has its library and the benchmarks that measure it."""

    path: Path
    folder: Path

    async def run(self, *command: str) -> tuple[int | None, bytes, bytes]:
        """Run its Python; return the exit code and the output."""
        process = await asyncio.create_subprocess_exec(
            self.path / ".venv/bin/python",
            *command,
            cwd=self.folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
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
        if not (path / ".venv/bin/python").exists() or not (path / "aioshm").is_dir():
            raise BenchmarkError(f"{path} is no checkout with a .venv of its own; `make .venv/.ready` there builds one")
    for benchmark in settings.more.only or BENCHMARKS:
        with ExitStack() as stack:
            trees = [_staged(path, Path(stack.enter_context(tempfile.TemporaryDirectory()))) for path in paths]
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
                turns.append([await tree.measure(benchmark, settings) for tree in trees[::step]][::step])
        note(report, benchmark, turns)


def _staged(path: Path, folder: Path) -> Tree:
    """Put a tree's library and this checkout's benchmarks side by side."""
    (folder / "aioshm").symlink_to(path / "aioshm")
    (folder / "benchmarks").symlink_to(HERE / "benchmarks")
    return Tree(path, folder)


def note(report: Report, benchmark: str, turns: Sequence[Sequence[Mapping[Key, float]]]) -> None:
    """Note what each tree found, turn by turn, and which cases got slower."""
    slower = 0
    for key in turns[0][0]:
        case, figure, contestant, n_reader = key
        found = [(before[key], after[key]) for before, after in turns if before.get(key) and after.get(key)]
        if not found:
            report.remarks.append(f"not in both trees: {benchmark}: {case}, {figure}, {contestant}")
            continue
        power = 1 if figure.endswith("per_s") else -1
        result = report.result(f"{benchmark}: {case}, {figure}", contestant, n_reader)
        for before, after in found:
            result.add(speed=(after / before) ** power)
        best_before, best_after = (max(value**power for value in values) for values in zip(*found, strict=True))
        result.add(best_turns=best_after / best_before)
        if contestant.startswith(OURS) and max(map(result.median, result.figures)) < 1 - TOLERANCE:
            slower += 1
            report.remarks.append(f"SLOWER: {result.case}, {contestant}: {result.median('speed'):.2f}x")
    report.hold(f"{benchmark}: cases that are slower by more than {TOLERANCE:.0%}", slower, "", 0)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, help="the tree that the other is compared with")
    parser.add_argument("after", type=Path, help="the tree that may be slower")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), help="benchmarks (default: all)")


if __name__ == "__main__":
    sys.exit(main("trees", __doc__, run, repeat=7, seconds=0.2, more=_add_options))
