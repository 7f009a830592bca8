"""Leases and ``async for`` against dequeue, and calls that block against those that do not, at every size.

Messages are leased by iterating over ``leases()``, and in blocks. Below 256 KiB a lease is a ``dequeue`` in a block, to
which nothing is promised. Two halves of the rounds of ``dequeue`` tell how much chance there is in a measurement.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from benchmarks.contestants.aioshm_ends import CONTESTANTS
from benchmarks.framework.contest import Contest, Turn
from benchmarks.framework.harness import Settings, main
from benchmarks.framework.loops import A_TURN, WAYS, Order, read_waiting, send
from benchmarks.framework.report import Report
from benchmarks.framework.stage import Stage
from benchmarks.framework.workload import KIB, MIB, Workload, block, lone_array, plain_bytes, small_dict, tensor

AWAITED, BLOCKING = "aioshm", "aioshm blocking"
LEASED = {AWAITED: "aioshm leased", BLOCKING: "aioshm blocking leased"}
ITERATED = {AWAITED: "aioshm iterated", BLOCKING: "aioshm blocking iterated"}
LEASES = {AWAITED: "aioshm leases iterated", BLOCKING: "aioshm blocking leases iterated"}
FACES = [contestant for contestant in CONTESTANTS if contestant.name in LEASED]

MIN_PAUSE_S = 0.001
"""How long the reader sleeps before each round, besides the time in which the ring fills."""

MIN_TURNS = 4
"""In each of which every way to read has `A_TURN` rounds, in one measurement."""

AT_LEAST = 1.0
"""The messages/s of ``async for``, against ``dequeue``, less what two halves of its rounds differ by."""

LEASED_AT_LEAST = 1.5
"""The messages/s of leases, in loops and in blocks, against ``dequeue``, from `VIEW_BYTES` on."""

VIEW_BYTES = 256 * KIB

MOST_CHANCE = 0.1
"""No more is put down to chance: from 1 MiB on, whether malloc has given its memory back before it takes it anew counts
for more than all the rest, and differs from round to round.
"""

BLOCKING_AT_LEAST = 0.95
"""The messages/s of calls that block, against those that are awaited."""

SIZES = [64, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 16 * MIB]
HELD = {64: 1024, 4 * KIB: 256, 64 * KIB: 16}
"""How many messages of a size a default ring holds, or fewer; 10 of larger ones."""

QUICK_SIZES = [4 * KIB, MIB]


Control = defaultdict[tuple[str, str], list[float]]


def workloads(quick: bool) -> list[Workload]:
    """Return bytes, arrays and tensors of every size, and arrays in MessagePack."""
    found = [replace(small_dict(codec), slots=HELD[64]) for codec in ("pickle", "msgpack")]
    for nbytes in QUICK_SIZES if quick else SIZES:
        slots, chunk_bytes = HELD.get(nbytes, 10), 24 * MIB
        found += [
            plain_bytes(nbytes, kinds=8, slots=slots, chunk_bytes=chunk_bytes),
            tensor(nbytes, slots=slots, chunk_bytes=chunk_bytes),
        ]
        if nbytes < MIB:
            found.append(lone_array(nbytes, slots=slots, chunk_bytes=chunk_bytes))
        if nbytes >= 64 * KIB:
            array = block(nbytes, slots=slots, chunk_bytes=chunk_bytes)
            found += [array, replace(array, name=f"{array.name}, msgpack", codec="msgpack")]
    return found


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the result against the promises."""
    works = workloads(settings.quick)
    against_itself: Control = defaultdict(list)
    async with Contest(settings, report, settings.chosen(FACES), works, pinned=True) as contest:
        for kind, work in enumerate(works):
            turn = await _waiting(settings, contest, kind, against_itself)
            for _ in contest.repetitions(work.name):
                await contest.each(turn)
    for work in works:
        hold = partial(_hold, report, work)
        for face in LEASED:
            if work.nbytes >= VIEW_BYTES:
                hold(LEASES[face], face, LEASED_AT_LEAST)
                hold(LEASED[face], face, LEASED_AT_LEAST)
        hold(ITERATED[AWAITED], AWAITED, AT_LEAST - chance(against_itself[work.name, AWAITED]))
        if work.nbytes >= 4 * KIB:
            hold(BLOCKING, AWAITED, BLOCKING_AT_LEAST)


def _hold(report: Report, work: Workload, ours: str, theirs: str, bound: float) -> None:
    ratio = report.ratio(work.name, ours, theirs, figure="messages_per_s", of_repetitions=True)
    report.hold(f"{work.name}: messages/s of {ours}, against {theirs}", ratio, "x", bound, at_least=True)


def chance(ratios: Sequence[float]) -> float:
    """Return what two halves of the same differ by in one repetition of two, given their ratios in all of them."""
    return min(MOST_CHANCE, 1 - math.exp(-median(abs(math.log(ratio)) for ratio in ratios))) if ratios else 0.0


async def _waiting(settings: Settings, contest: Contest, kind: int, against_itself: Control) -> Turn:
    """Return what measures how fast messages that wait are read with and without leases, in turn, in one stream.

    Where both ends are about as fast, the rate of a stream says more about which of them waits for the other.

    Args:
        settings: Of this run.
        contest: Who takes part.
        kind: Which workload.
        against_itself: Gets the ratio of the two halves of the rounds without leases, by workload and contestant.
    """
    work, plan, seeds = contest.workloads[kind], {}, itertools.count()
    count = work.slots // 2  # of a full ring: the last one wakes the writer, and no other one does

    async def rates(stage: Stage, pause_s: float, turns: int) -> list[float]:
        write = Order(send, (0, len(WAYS) * A_TURN * count * turns), kind)
        read = Order(read_waiting, (pause_s, count, turns, next(seeds)), kind)
        _, (seconds,) = await stage.perform(write, read)
        received = seconds[0]
        return [(count - 3) / median(times) for times in (*seconds, received[::2], received[1::2])]

    async def probe(stage: Stage) -> None:
        rate = min((await rates(stage, 0.05, 2))[: len(WAYS)])  # medians: the first round imports torch
        pause_s = MIN_PAUSE_S + 2 * work.slots / rate
        plan[stage.name] = pause_s, max(MIN_TURNS, int(settings.seconds / 4 / A_TURN / (pause_s + count / rate)))

    async def turn(stage: Stage) -> None:
        *measured, first, again = await rates(stage, *plan[stage.name])
        names = (stage.name, LEASED[stage.name], ITERATED[stage.name], LEASES[stage.name])
        for name, rate in zip(names, measured, strict=True):
            contest.report.result(work.name, name, 1).add(messages_per_s=rate)
        against_itself[work.name, stage.name].append(again / first)

    await contest.each(probe)
    return turn


if __name__ == "__main__":
    sys.exit(main("leases", __doc__, run, repeat=7, seconds=0.25, contestants=FACES, loop="uvloop"))
