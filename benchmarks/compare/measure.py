"""Runs cases: all contestants of a case are on stage together, and every repetition goes round them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType

from benchmarks.compare.cases import CADENCES_MS, QUICK_CADENCES_MS, Case
from benchmarks.compare.contestant import Contestant
from benchmarks.compare.loops import Heard, Order
from benchmarks.compare.memcpy import BLOCK_BYTES, NAME, QUICK_BLOCK_BYTES, memcpy_on_stage
from benchmarks.compare.troupe import Troupe, on_stage
from benchmarks.crew import BenchmarkError, Hand
from benchmarks.harness import percentile, progress
from benchmarks.report import Report

MIN_MESSAGES, MAX_MESSAGES = 8, 400_000
MAX_BYTES = 4 << 30
PROBE_ROUND_TRIPS = 50
MIN_ROUND_TRIPS, MAX_ROUND_TRIPS = 50, 20_000
MIN_TICKS, QUICK_TICKS = 30, 8
TICKS_S = 1.0
"""How long a contestant is listened to at a cadence, unless that is less than `MIN_TICKS` messages."""

WARM_UP = 0.1
TICKS_WARM_UP = 0.25
"""The share of a measurement's messages that pass before the clock starts."""

MEMCPY_BLOCKS = 4


@dataclass
class Run:
    """A run in progress.

    Attributes:
        report: Where figures go.
        repeat: Repetitions.
        seconds: About how long each contestant is measured in each repetition.
        quick: Only show that everything works.
        failures: What went wrong with whom.
    """

    report: Report
    repeat: int
    seconds: float
    quick: bool
    failures: list[str] = field(default_factory=list)


async def measure(run: Run, case: Case, contestants: Sequence[Contestant]) -> None:
    """Run a case. A contestant that fails is noted and left out from then on."""
    progress(f"{case.name}: starting {', '.join(contestant.name for contestant in contestants)}")
    async with AsyncExitStack() as everybody:
        copier = None
        if case.by_bytes:
            block = QUICK_BLOCK_BYTES if run.quick else BLOCK_BYTES
            copier = await everybody.enter_async_context(memcpy_on_stage(block))
        stages = [_Stage(run, case, contestant) for contestant in contestants]
        for stage in stages:
            everybody.push_async_exit(stage.close)
            await stage.open()
        for repetition in range(run.repeat):
            progress(f"{case.name}: repetition {repetition + 1} of {run.repeat}")
            if copier is not None:
                await _copy(run, case, copier)
            for stage in stages:
                await stage.perform()


class _Stage:
    """One contestant in one case, from its start to its end or first failure."""

    def __init__(self, run: Run, case: Case, contestant: Contestant) -> None:
        self._run, self._case, self._contestant = run, case, contestant
        self._stack = AsyncExitStack()
        self._troupe: Troupe | None = None
        self._plan = 0

    async def open(self) -> None:
        case = self._case
        try:
            self._troupe = await self._stack.enter_async_context(
                on_stage(self._contestant, case.workload, case.n_reader, both_ways=case.kind == "round trips")
            )
            self._plan = await self._planned(self._troupe)
        except BenchmarkError as error:
            await self._fail(error)

    async def perform(self) -> None:
        if self._troupe is None:
            return
        try:
            if self._case.kind == "stream":
                await self._stream(self._troupe)
            elif self._case.kind == "round trips":
                await self._round_trips(self._troupe)
            else:
                await self._cadences(self._troupe)
        except BenchmarkError as error:
            await self._fail(error)

    async def close(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End its processes: kindly, or at once if the run is given up."""
        try:
            await self._stack.__aexit__(exc_type, exc, traceback)
        except BenchmarkError as error:
            self._note(error)

    async def _fail(self, error: BenchmarkError) -> None:
        self._note(error)
        self._troupe = None
        stack, self._stack = self._stack, AsyncExitStack()
        try:
            await stack.__aexit__(type(error), error, error.__traceback__)
        except BenchmarkError:
            pass  # is noted already

    def _note(self, error: BenchmarkError) -> None:
        text = f"{self._contestant.name} in {self._case.name}: {error}"
        self._run.failures.append(text)
        progress(text)

    async def _planned(self, troupe: Troupe) -> int:
        """Return how many messages take about as long as was asked for. That also touches every slot once."""
        case, seconds = self._case, self._run.seconds
        if case.kind == "stream":
            rate = await _rate(troupe, case.workload.slots, case.workload.slots)
            most = min(MAX_MESSAGES, MAX_BYTES // case.workload.nbytes)
            return max(MIN_MESSAGES, min(most, int(rate * seconds)))
        if case.kind == "round trips":
            times = await _times(troupe, PROBE_ROUND_TRIPS, PROBE_ROUND_TRIPS)
            return max(MIN_ROUND_TRIPS, min(MAX_ROUND_TRIPS, int(seconds * 1e6 / percentile(times, 50))))
        return 0

    async def _stream(self, troupe: Troupe) -> None:
        case = self._case
        rate = await _rate(troupe, max(1, int(self._plan * WARM_UP)), self._plan)
        result = self._run.report.result(case.title, self._contestant.name, case.n_reader)
        result.add(messages_per_s=rate)
        if case.by_bytes:
            result.add(volume_gb_per_s=rate * case.workload.nbytes / 1e9)

    async def _round_trips(self, troupe: Troupe) -> None:
        times = await _times(troupe, max(1, int(self._plan * WARM_UP)), self._plan)
        result = self._run.report.result(self._case.title, self._contestant.name)
        result.add(p50_us=percentile(times, 50), p99_us=percentile(times, 99))

    async def _cadences(self, troupe: Troupe) -> None:
        for period_ms in cadences(self._run.quick):
            count = QUICK_TICKS if self._run.quick else max(MIN_TICKS, int(TICKS_S * 1e3 / period_ms))
            warm_up = max(2, int(count * TICKS_WARM_UP))
            tick = Order("tick", warm_up, count, period_ms / 1e3)
            _, [heard] = await troupe.perform(tick, Order("listen", warm_up, count))
            assert isinstance(heard, Heard)
            result = self._run.report.result(cadence_title(period_ms), self._contestant.name)
            result.add(
                p50_us=percentile(heard.late_us, 50),
                p99_us=percentile(heard.late_us, 99),
                reader_cpu_percent=heard.cpu_percent,
            )


def cadences(quick: bool) -> list[int]:
    """Return the periods that are measured, in milliseconds."""
    return QUICK_CADENCES_MS if quick else CADENCES_MS


def cadence_title(period_ms: int) -> str:
    """Return what reports call the messages at this cadence."""
    return f"every {period_ms} ms"


async def _rate(troupe: Troupe, warm_up: int, count: int) -> float:
    """Return the messages/s at the slowest reader."""
    _, seconds = await troupe.perform(Order("send", warm_up, count), Order("read", warm_up, count))
    return count / float(max(seconds))


async def _times(troupe: Troupe, warm_up: int, count: int) -> list[float]:
    times, _ = await troupe.perform(Order("ask", warm_up, count), Order("answer", warm_up, count))
    assert isinstance(times, list)
    return times


async def _copy(run: Run, case: Case, copier: Hand) -> None:
    copier.order(1 if run.quick else MEMCPY_BLOCKS)
    speed = float(await copier.reply())
    run.report.result(case.title, NAME, case.n_reader).add(volume_gb_per_s=speed / 1e9)
