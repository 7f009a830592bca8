"""Compares two trees of aioshm, in each stream, round trip and cadence of `benchmarks.compare`.

    python -m benchmarks.before_after PATH_BEFORE PATH_AFTER [--only dict raw ...] [--within PERCENT]

Each tree is a checkout with its own ``.venv`` and build; the benchmarks are those of this checkout. Disturbances of the
machine last for seconds, and the layout of a process in memory lasts as long as the process. So the processes of both
trees exist at the same time, and are idle except in their slice of 50 ms. A round is a slice of each tree there and
back: before, after, after, before. After some rounds all processes are replaced: that is a life, and ``--repeat`` sets
the number of lives. The first tree takes part twice: the column "control" is its second self.

The speed of a case is the second tree's as a ratio to the first: the median over the rounds of a life, and the mean
over lives. Above 1 the second tree is faster. The interval holds 95% of the speeds that come from drawing lives and
rounds again at random. A case is slower if all of its interval is slower by more than ``--within`` per cent and the
control's interval reaches no further than that either way. It is not slower if none of its interval is. Otherwise the
verdict is "not told".
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import IO, Any, Self, TypeAlias

from benchmarks.compare.slices import PLAYED
from benchmarks.framework.crew import BenchmarkError
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.report import Report

HERE = Path(__file__).parents[1]
NAMES = ["aioshm", "aioshm blocking", "aioshm leased", "aioshm loaned"]
WITHIN = 3.0  # percent
ROUNDS, QUICK_ROUNDS = 8, 1
DRAWS = 2000

ANSWER_S = 300.0
"""The longest answer takes until every contestant of a case is on stage and was probed."""

END_S = 30.0
TAIL_BYTES = 8192

Lives: TypeAlias = list[list[float]]
"""Logarithms of ratios, for each round of each life."""


@dataclass(frozen=True)
class Tree:
    """A checkout, and the folder that has its library and this checkout's benchmarks."""

    path: Path
    folder: Path

    async def start(self, *command: str, errors: IO[bytes]) -> asyncio.subprocess.Process:
        """Start its Python, with pipes to talk to it; its stderr goes to a file."""
        pipe, python = asyncio.subprocess.PIPE, self.path / ".venv/bin/python"
        return await asyncio.create_subprocess_exec(
            python, *command, cwd=self.folder, stdin=pipe, stdout=pipe, stderr=errors
        )


def check_tree(path: Path) -> None:
    """Raise `BenchmarkError` unless this is a checkout that can be measured."""
    if not (path / ".venv/bin/python").exists() or not (path / "aioshm").is_dir():
        raise BenchmarkError(f"{path} is no checkout with a .venv of its own; `make .venv/.ready` there builds one")


def staged(path: Path, folder: Path) -> Tree:
    """Put a tree's library and this checkout's benchmarks side by side."""
    (folder / "aioshm").symlink_to(path / "aioshm")
    (folder / "benchmarks").symlink_to(HERE / "benchmarks")
    return Tree(path, folder)


class Player:
    """A tree's processes, for one case.

    Attributes:
        fitting: How many messages of each contestant make a slice, once the processes are ready.
    """

    def __init__(self, tree: Tree, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._tree = tree
        self._process = process
        self._errors = errors
        self.fitting: dict[str, int] = {}

    @classmethod
    async def start(cls, tree: Tree, case: str, settings: Settings) -> Self:
        """Start them."""
        command = ["-m", "benchmarks.compare.slices", case, str(settings.seconds), settings.more.loop]
        return await cls.of(tree, *command, *settings.names)

    @classmethod
    async def of(cls, tree: Tree, *command: str) -> Self:
        """Start a tree's Python with these arguments."""
        with ExitStack() as stack:  # a pipe for stderr that nobody reads would be full some day, and block who writes
            errors = stack.enter_context(tempfile.TemporaryFile())
            process = await tree.start(*command, errors=errors)
            stack.pop_all()
            return cls(tree, process, errors)

    async def ready(self) -> None:
        """Wait until they are."""
        self.fitting = dict(await self._answer())

    async def play(self, name: str, count: int) -> float:
        """Return how many microseconds a message took, of so many."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{list(self.fitting).index(name)} {count}\n".encode())
        return float(await self._answer())

    async def _answer(self) -> Any:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise BenchmarkError(f"{self._tree.path}: no answer within {ANSWER_S:g} s\n{self._said()}") from None
        if not line:
            raise BenchmarkError(f"{self._tree.path}: {self._said()}")
        return json.loads(line)

    def _said(self) -> str:
        """Return the end of their stderr."""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - TAIL_BYTES))
        return self._errors.read().decode(errors="replace")

    async def end(self) -> None:
        """End them; those that do not end by themselves are killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await self._process.communicate()
        except TimeoutError:
            self._process.kill()  # who plays for it ends with it
            await self._process.wait()
        finally:
            self._errors.close()


async def run(settings: Settings, report: Report) -> None:
    """Measure both trees in turns, case by case, life by life."""
    paths = [path.resolve() for path in (settings.more.before, settings.more.after)]
    for path in paths:
        check_tree(path)
    verdicts = {"slower": 0, "not told": 0}
    for case in PLAYED:
        if settings.more.only and case.name not in settings.more.only:
            continue
        if not set(case.contestants) & set(settings.names):
            continue
        with ExitStack() as folders:
            trees = [staged(path, Path(folders.enter_context(tempfile.TemporaryDirectory()))) for path in paths]
            found: dict[str, tuple[Lives, Lives]] = {}
            for life in range(settings.repeat):
                progress(f"{case.name}: life {life + 1} of {settings.repeat}")
                await _live([*trees, trees[0]], case.name, settings, found)
        for name, (after, control) in found.items():
            speed, low, high = estimate(after)
            again, again_low, again_high = estimate(control)
            result = report.result(case.title, name, case.n_reader)
            result.add(speed=speed, lowest=low, highest=high)
            result.add(control=again, control_lowest=again_low, control_highest=again_high)
            verdict = judge(low, high, settings.more.within, (again_low, again_high))
            controlled = f"control {again:.3f}x, {again_low:.3f} to {again_high:.3f}"
            speeds = f"{speed:.3f}x ({low:.3f} to {high:.3f}; {controlled})"
            text = f"{verdict.upper()}: {case.title}, {name}, {case.n_reader} readers: {speeds}"
            progress(text)
            if verdict in verdicts:
                verdicts[verdict] += 1
                report.remarks.append(text)
    within = settings.more.within
    report.hold(f"cases that are slower by more than {within:g}%", verdicts["slower"], "", 0)
    report.hold(f"cases of which it is not told whether they are slower by {within:g}%", verdicts["not told"], "", 0)


async def _live(trees: Sequence[Tree], case: str, settings: Settings, found: dict[str, tuple[Lives, Lives]]) -> None:
    """Play some rounds with new processes, and note their ratios."""
    rounds = QUICK_ROUNDS if settings.quick else settings.more.rounds
    async with AsyncExitStack() as stack:
        players = []
        for tree in trees:
            players.append(player := await Player.start(tree, case, settings))
            stack.push_async_callback(player.end)
        for player in players:
            await player.ready()
        both = [name for name in players[0].fitting if all(name in player.fitting for player in players)]
        counts = {name: max(player.fitting[name] for player in players) for name in both}
        for name in counts:
            for lives in found.setdefault(name, ([], [])):
                lives.append([])
        for number in range(rounds):
            order = [0, 1, 2] if number % 2 else [2, 1, 0]
            for name, count in counts.items():
                took: list[list[float]] = [[], [], []]
                for which in order + order[::-1]:
                    took[which].append(log(await players[which].play(name, count)))
                before, after, again = (sum(logs) / len(logs) for logs in took)
                for lives, other in zip(found[name], (after, again), strict=True):
                    lives[-1].append(before - other)


def estimate(lives: Lives) -> tuple[float, float, float]:
    """Return the speed, and the interval that holds 95% of the speeds from drawing lives and rounds again."""
    rng = random.Random(len(lives))
    drawn = sorted(
        _mean([rng.choices(life, k=len(life)) for life in rng.choices(lives, k=len(lives))]) for _ in range(DRAWS)
    )
    return exp(_mean(lives)), exp(drawn[int(0.025 * DRAWS)]), exp(drawn[int(0.975 * DRAWS)])


def _mean(lives: Lives) -> float:
    return statistics.fmean(map(statistics.median, lives))


def judge(low: float, high: float, within: float, control: tuple[float, float]) -> str:
    """Return the verdict on an interval of speeds and its control's: "slower", "not slower" or "not told".

    Where the control's interval reaches further than ``within``, so may chance: nothing is called slower there.
    """
    bound = 1 - within / 100
    if high < bound:
        return "slower" if bound <= control[0] and control[1] <= 1 / bound else "not told"
    return "not slower" if low >= bound else "not told"


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
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each life (default: {ROUNDS})")
    names = [case.name for case in PLAYED]
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=names, help=f"of {', '.join(names)}")


if __name__ == "__main__":
    sys.exit(
        main(
            "before_after",
            __doc__,
            run,
            repeat=5,
            seconds=0.05,
            contestants=NAMES,
            loop="uvloop",
            more=_add_options,
        )
    )
