"""``python -m tools.simulate``: thousands of seeds, one of them with its trace, or the planted bugs."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tools.simulate.bugs import BUGS, Bug, hunt, prepare, run_seed

SEEDS = 10_000
HUNTED_SEEDS = 1_000
"""So many seeds look for a planted bug, after the one that is known to find it."""
_BATCH = 50


def main() -> int:
    """Simulate; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, help=f"how many (default: {SEEDS}, for a planted bug {HUNTED_SEEDS})")
    parser.add_argument("--first", type=int, default=0, help="the first one (default: 0)")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="say what happens in it")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--mutants", action="store_true", help="plant each bug, and say which seed finds it")
    parser.add_argument("--mutant", choices=[bug.name for bug in BUGS], action="append", help="plant this bug")
    given = parser.parse_args()
    if given.mutants or given.mutant:
        bugs = [bug for bug in BUGS if not given.mutant or bug.name in given.mutant]
        return _mutants(bugs, given.first, HUNTED_SEEDS if given.seeds is None else given.seeds, given.jobs)
    if given.seed is not None:
        return _one(given.seed, traced=given.trace)
    return _all(given.first, SEEDS if given.seeds is None else given.seeds, given.jobs)


def _one(seed: int, *, traced: bool) -> int:
    prepare()
    world, figures, violation = run_seed(seed, traced=traced)
    for line in world.trace:
        print(line)
    print(f"seed {seed}: {violation or 'all holds'}; {figures}")
    return 1 if violation else 0


def _all(first: int, seeds: int, jobs: int) -> int:
    began = time.monotonic()
    figures: Counter[str] = Counter()
    bad: dict[int, str] = {}
    with ProcessPoolExecutor(jobs) as pool:
        starts = range(first, first + seeds, _BATCH)
        counts = [min(_BATCH, first + seeds - start) for start in starts]
        for found, violations in pool.map(_some, starts, counts):
            figures.update(found)
            bad |= violations
    for seed, text in sorted(bad.items()):
        print(f"seed {seed}: {text}")
    print(", ".join(f"{count} {what}" for what, count in sorted(figures.items())))
    print(
        f"{seeds} seeds in {time.monotonic() - began:.0f} s on {jobs} CPUs, {len(bad)} in which something does not hold"
    )
    if bad:
        print(f"again: python -m tools.simulate --trace --seed {min(bad)}")
    return 1 if bad else 0


def _some(first: int, count: int) -> tuple[Counter[str], dict[int, str]]:
    prepare()
    figures: Counter[str] = Counter()
    bad = {}
    for seed in range(first, first + count):
        _, found, violation = run_seed(seed)
        figures.update(found)
        if violation is not None:
            bad[seed] = str(violation)
    return figures, bad


def _mutants(bugs: list[Bug], first: int, seeds: int, jobs: int) -> int:
    began = time.monotonic()
    missed = 0
    fresh = multiprocessing.get_context("spawn")  # a bug is planted before its module is loaded
    with ProcessPoolExecutor(jobs, fresh, max_tasks_per_child=1) as pool:
        hunts = pool.map(hunt, bugs, itertools.repeat(first), itertools.repeat(seeds))
        for bug, (seed, text) in zip(bugs, hunts, strict=True):
            missed += seed is None
            found = "NOT FOUND" if seed is None else f"seed {seed:>4}"
            print(f"{bug.name:<13} {found}  {bug.breaks}: {text}", flush=True)
    print(f"{len(bugs) - missed} of {len(bugs)} planted bugs found, in {time.monotonic() - began:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
