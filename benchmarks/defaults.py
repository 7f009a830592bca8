"""What every ring promises with the sizes that it has if nobody gives it any, in one run.

Small messages against rivals, the default ring against the best of those that are made for their messages, and calls
that block against those that are awaited. Each ratio is the median of the repetitions' ratios, told with the least and
the largest of them; "aioshm again" is the default ring a second time, whose ratio to the first is chance. The best of
several rings is the one with the highest median, which is a little above what any of them does on average.

Every repetition has processes of its own, and is the median of a few turns of theirs: two that do the same differ by up
to a tenth for as long as they live, by how their memory happens to lie in the caches.

    make bench-defaults ARGS=--check     in .venv-rivals, which has every rival in its pinned version
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.compare.cases import CASES, RIVAL_PACKAGES, SIZED, Case
from benchmarks.compare.promises import AS_SIZED, RATE
from benchmarks.contestants import CONTESTANTS
from benchmarks.contestants.contestant import Contestant
from benchmarks.framework import harness
from benchmarks.framework.contest import Contest
from benchmarks.framework.harness import Settings
from benchmarks.framework.report import Report, Result

AWAITED, BLOCKING, AGAIN = "aioshm", "aioshm blocking", "aioshm again"
BLOCKING_AT_LEAST = 0.95

DICTS, ARRAYS = ["dict", "fanout-2", "fanout-4"], ["4k", "64k", "1m", "16m"]
WANTED = [*DICTS, "raw", *ARRAYS]

TURNS = 3
"""Of each contestant, in one repetition."""

Best = Sequence[str]
"""Rivals of which the best counts."""


@dataclass(frozen=True)
class Line:
    """A promised ratio of messages/s: of which face, to the best of which rivals."""

    case: str
    ours: str
    theirs: Best
    bound: float


def _lines() -> Iterator[Line]:
    for name, least in zip(DICTS, (7, 6, 6), strict=True):
        yield Line(name, AWAITED, ["vLLM"], least)
    for name in DICTS[1:]:
        yield Line(name, AWAITED, ["pyzmq"], 1)
    for name in [*DICTS, *ARRAYS]:
        yield Line(name, AWAITED, SIZED, AS_SIZED)
    yield Line("raw", AWAITED, ["iceoryx2 polling"], 5)
    yield Line("raw", AWAITED, ["pyzmq"], 3)
    for name in ARRAYS:
        yield Line(name, BLOCKING, [AWAITED], BLOCKING_AT_LEAST)


LINES = list(_lines())


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the result against the promises."""
    everybody = [*CONTESTANTS, *(replace(one, name=AGAIN) for one in CONTESTANTS if one.name == AWAITED)]
    for case in CASES:
        if case.name not in (settings.more.only or WANTED):
            continue
        lines = [line for line in LINES if line.case == case.name]
        names = {AGAIN, *(name for line in lines for name in (line.ours, *line.theirs))}
        contestants = [one for one in everybody if one.name in names]
        for number in range(settings.repeat):
            harness.progress(f"{case.name}: repetition {number + 1} of {settings.repeat}")
            await _repeat(settings, report, case, contestants, number)
        for line in lines:
            hold(report, case, line)


async def _repeat(
    settings: Settings, report: Report, case: Case, contestants: Sequence[Contestant], number: int
) -> None:
    """Note the rate of each contestant, in processes that are started for that."""
    turns = Report(report.benchmark, {}, {})
    async with Contest(
        settings, turns, contestants, [case.workload], case.n_reader, pinned=True, seed=number
    ) as contest:
        turn = await contest.streams(case=case.title)
        for _ in range(TURNS):
            await contest.each(turn)
    for result in turns.results:
        report.result(result.case, result.contestant, result.n_reader).add(
            **{name: median(values) for name, values in result.figures.items()}
        )
    report.failures += turns.failures


def hold(report: Report, case: Case, line: Line) -> None:
    """Note one promise, and with which spread it was measured beside which control."""
    title = case.title if case.n_reader == 1 else f"{case.title} to {case.n_reader} readers"
    found = [report.find(case.title, name, case.n_reader) for name in (line.ours, AWAITED, AGAIN)]
    rivals = [report.find(case.title, name, case.n_reader) for name in line.theirs]
    known = [one for one in rivals if one is not None and RATE in one.figures]
    ours, first, again = found
    text = f"{title}: messages/s of {line.ours} against {_called(line.theirs)}"
    if ours is None or not known or len(known) < len(rivals):
        report.remarks.append(f"not measured: {text}")
        return
    best = max(known, key=lambda one: one.median(RATE))
    ratios = _ratios(ours, best)
    report.hold(text, median(ratios), "x", line.bound, at_least=True)
    control = f"; control {_spread(_ratios(again, first))}" if again is not None and first is not None else ""
    report.remarks.append(f"{title}, {line.ours} / {best.contestant}: {_spread(ratios)}{control}")


def _called(theirs: Best) -> str:
    return theirs[0] if len(theirs) == 1 else "the best sized ring"


def _ratios(ours: Result, theirs: Result) -> list[float]:
    """Return the ratio in each repetition in which both were there."""
    return [one / other for one, other in zip(ours.figures[RATE], theirs.figures[RATE], strict=False)]


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=WANTED, help=f"cases, of {', '.join(WANTED)}")


if __name__ == "__main__":
    sys.exit(
        harness.main(
            "defaults", __doc__, run, repeat=5, seconds=0.2, loop="uvloop", more=_add_options, packages=RIVAL_PACKAGES
        )
    )
