"""How each kind of case is measured, with all contestants in turns."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from statistics import median
from types import TracebackType
from typing import Self, TypeAlias

from benchmarks.compare.cases import Case
from benchmarks.contestants import Contestant
from benchmarks.framework.crew import BenchmarkError
from benchmarks.framework.harness import Settings, progress
from benchmarks.framework.loops import (
    ROUNDS,
    Order,
    Ports,
    answer,
    ask,
    count_copied,
    listen,
    read,
    read_leased,
    read_waiting,
    send,
    tick,
)
from benchmarks.framework.report import Report, latencies, percentile
from benchmarks.framework.stage import Stage, on_stage, together
from benchmarks.framework.workload import MIB, Workload

WARM_UP = 0.1
"""The share of a measurement's messages that pass before the clock starts."""

MIN_MESSAGES, MAX_MESSAGES = 8, 400_000
MAX_BYTES, MAX_UNBOUNDED_BYTES = 4096 * MIB, 1024 * MIB
"""Bytes of one measurement at most; a contestant without a bound on messages under way may hold all of them."""

MIN_ROUND_TRIPS, MAX_ROUND_TRIPS = 20, 20_000

TICKS, QUICK_TICKS = 320, 8
"""Messages at least at a cadence. Between 50 messages the CPU time of a reader varies by 0.35% of a core (standard
deviation), between 320 by 0.09%.
"""

TURNS, QUICK_TURNS = 4, 1
"""Of reading messages that wait."""

SLOWEST_WRITER = 1e9
"""Bytes/s at least with which a ring is filled while its reader sleeps."""

MEMORY_MESSAGES = 50_000
"""More than a default ring holds, so that each of its slots is touched."""

_RING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ .*(?:/memfd:aioshm\b|/dev/shm/aioshm-)")
_RESIDENT = re.compile(r"^Rss: +([0-9]+) kB$")

Figures: TypeAlias = dict[str, float]


class Contest:
    """Contestants on stage together; one that fails is noted and left out from then on.

    Each repetition goes round all of them, in an order that is drawn. So another program on the machine disturbs all
    alike, and none always has the first turn, which may take a few per cent longer after a rest. Contestants that are
    not installed are left out, with a word on how to get them.
    """

    def __init__(
        self,
        settings: Settings,
        report: Report,
        contestants: Sequence[Contestant],
        workload: Workload,
        n_reader: int = 1,
        *,
        both_ways: bool = False,
        seed: int = 0,
    ) -> None:
        self._settings = settings
        self._report = report
        self._workload = workload
        self._n_reader = n_reader
        self._both_ways = both_ways
        self._contestants = available(contestants)
        self._stages: list[Stage] = []
        self._stacks: dict[str, AsyncExitStack] = {}
        self._draw = Random(seed)

    async def __aenter__(self) -> Self:
        names = ", ".join(contestant.name for contestant in self._contestants)
        progress(f"starting {self._n_reader} reader{'s' if self._n_reader > 1 else ''} of {names or 'nobody'}")
        try:
            stages = await together([self._open(contestant) for contestant in self._contestants])
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        self._stages = [stage for stage in stages if stage is not None]
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End all processes: kindly, or at once if the run is given up."""
        for name, stack in self._stacks.items():
            try:
                await stack.__aexit__(exc_type, exc, traceback)
            except BenchmarkError as error:
                if error is not exc:
                    self._note(name, error)

    async def _open(self, contestant: Contestant) -> Stage | None:
        stack = self._stacks[contestant.name] = AsyncExitStack()
        loop_factory, both_ways = self._settings.loop_factory, self._both_ways
        opening = on_stage(contestant, self._workload, self._n_reader, loop_factory, both_ways=both_ways)
        try:
            return await stack.enter_async_context(opening)
        except BenchmarkError as error:
            self._note(contestant.name, error)
            return None

    async def each(self, turn: Callable[[Stage], Awaitable[None]]) -> None:
        """Give each contestant a turn."""
        for stage in self._draw.sample(self._stages, len(self._stages)):
            try:
                await turn(stage)
            except BenchmarkError as error:
                self._note(stage.name, error)
                self._stages.remove(stage)
                try:
                    await self._stacks.pop(stage.name).__aexit__(type(error), error, error.__traceback__)
                except BenchmarkError:
                    pass  # is noted already

    def _note(self, name: str, error: BenchmarkError) -> None:
        text = f"{name}: {error}"
        self._report.failures.append(text)
        progress(f"FAILED: {text}")


def available(contestants: Sequence[Contestant]) -> list[Contestant]:
    """Return those that are installed, and log the others."""
    found = []
    for contestant in contestants:
        reason = contestant.missing()
        if reason is None:
            found.append(contestant)
        else:
            progress(f"missing: {contestant.name} ({reason})")
    return found


async def measure(
    settings: Settings, report: Report, case: Case, contestants: Sequence[Contestant], seed: int = 0
) -> None:
    """Run a case: every contestant has a turn in each repetition."""
    plan: dict[str, int] = {}
    number = 0

    async def probe(stage: Stage) -> None:
        plan[stage.name] = await fitting(case, stage, settings.seconds, settings.quick)

    async def turn(stage: Stage) -> None:
        found = await KINDS[case.kind](case, stage, plan[stage.name], seed + number)
        for name, figures in found.items():
            report.result(case.title, name, case.n_reader).add(**figures)

    both_ways = case.kind == "round trips"
    async with Contest(
        settings, report, contestants, case.workload, case.n_reader, both_ways=both_ways, seed=seed
    ) as contest:
        await contest.each(probe)
        for number in range(settings.repeat):
            progress(f"{case.name}: repetition {number + 1} of {settings.repeat}")
            await contest.each(turn)


async def fitting(case: Case, stage: Stage, seconds: float, quick: bool = False, ticks: int = TICKS) -> int:
    """Return how many messages, or turns, take about so many seconds."""
    if case.kind == "stream":
        work, bounded = case.workload, stage.contestant.bounded[case.n_reader > 1]
        most = MAX_MESSAGES
        if stage.contestant.copies:
            most = min(most, (MAX_BYTES if bounded else MAX_UNBOUNDED_BYTES) // work.nbytes)
        fit = int(await _rate(stage, work.slots, work.slots) * seconds)  # the warm-up touches each slot once
        return max(MIN_MESSAGES, min(most, fit))
    if case.kind == "round trips":
        times = await _round_trips(stage, MIN_ROUND_TRIPS)
        return max(MIN_ROUND_TRIPS, min(MAX_ROUND_TRIPS, int(seconds * 1e6 / percentile(times, 50))))
    if case.kind == "cadence":
        return QUICK_TICKS if quick else max(ticks, int(seconds * 1e3 / case.period_ms))
    if case.kind == "waiting":
        return QUICK_TURNS if quick else TURNS
    return MEMORY_MESSAGES


async def stream(_case: Case, stage: Stage, count: int, _seed: int) -> dict[str, Figures]:
    """Measure messages/s, and the bytes copied of loaned messages."""
    in_place = not stage.contestant.copies
    warm_up = max(1, int(count * WARM_UP))
    before = await _copied(stage) if in_place else 0
    rate = await _rate(stage, warm_up, count)
    figures = {"messages_per_s": rate}
    if stage.workload.codec == "tensor":
        figures["volume_gb_per_s"] = rate * stage.workload.nbytes / 1e9
    if in_place:
        figures["copied_bytes"] = (await _copied(stage) - before) / (warm_up + count)
    return {stage.name: figures}


async def round_trips(_case: Case, stage: Stage, count: int, _seed: int) -> dict[str, Figures]:
    """Measure messages there and back."""
    return {stage.name: latencies(await _round_trips(stage, count))}


async def cadence(case: Case, stage: Stage, count: int, seed: int) -> dict[str, Figures]:
    """Measure how late messages at a cadence arrive, and the CPU of their reader."""
    warm_up, period_s = max(2, count // 4), case.period_ms / 1e3
    _, [(late_us, percent)] = await stage.perform(
        Order(tick, (warm_up + count, period_s, seed)), Order(listen, (warm_up, count))
    )
    return {stage.name: {**latencies(late_us), "reader_cpu_percent": percent}}


async def waiting(_case: Case, stage: Stage, turns: int, _seed: int) -> dict[str, Figures]:
    """Measure messages/s of messages that wait, by `dequeue` and leased.

    In a stream the slower of writer and reader decides; here the reader does.
    """
    work = stage.workload
    count = work.slots // 2  # the last message of a round wakes the writer, and no other does
    pause_s = 0.001 + work.slots * work.nbytes / SLOWEST_WRITER
    write = Order(send, (0, 2 * ROUNDS * turns * count))
    _, [seconds] = await stage.perform(write, Order(read_waiting, (pause_s, count, turns)))
    names = (stage.name, f"{stage.name} leased")
    return {name: {"messages_per_s": (count - 3) / median(times)} for name, times in zip(names, seconds, strict=True)}


async def memory(_case: Case, stage: Stage, count: int, _seed: int) -> dict[str, Figures]:
    """Measure how much of the ring is resident in either process after so many messages."""
    await _rate(stage, 1, count)
    written, read = await stage.perform(Order(ring_mib), Order(ring_mib))
    return {stage.name: {"ring_mib": max(written, *read)}}


KINDS: dict[str, Callable[[Case, Stage, int, int], Awaitable[dict[str, Figures]]]] = {
    "stream": stream,
    "round trips": round_trips,
    "cadence": cadence,
    "waiting": waiting,
    "memory": memory,
}


async def ring_mib(_ports: Ports) -> float:
    """Return how much of this process' memory is mapped rings."""
    total, in_ring = 0, False
    lines = Path("/proc/self/smaps").read_text().splitlines()  # noqa: ASYNC240 - nothing else runs on this loop
    for line in lines:
        if not line[:1].isupper():  # where a mapping begins
            in_ring = _RING.match(line) is not None
        elif in_ring and (resident := _RESIDENT.match(line)) is not None:
            total += int(resident[1])
    return total / 1024


async def _rate(stage: Stage, warm_up: int, count: int) -> float:
    """Return the messages/s at the slowest reader."""
    loop = read_leased if stage.contestant.leased else read
    _, seconds = await stage.perform(Order(send, (0, warm_up + count)), Order(loop, (warm_up, count)))
    return count / float(max(seconds))


async def _round_trips(stage: Stage, count: int) -> list[float]:
    warm_up = max(1, int(count * WARM_UP))
    times, _ = await stage.perform(Order(ask, (warm_up, count)), Order(answer, (warm_up + count,)))
    return list(times)


async def _copied(stage: Stage) -> int:
    written, read = await stage.perform(Order(count_copied), Order(count_copied))
    return int(written + sum(read))
