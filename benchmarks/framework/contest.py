"""All contestants of a case on stage together, each repetition going round them, in an order drawn for it.

So whatever else happens on the machine happens to all of them, and nobody has the first turn, or the same neighbour,
each time: a turn after a rest, or after a certain other's, may take a few per cent longer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from random import Random
from types import TracebackType
from typing import Any, Self, TypeAlias

from benchmarks.contestants.contestant import Contestant
from benchmarks.framework.crew import BenchmarkError
from benchmarks.framework.harness import Settings, progress
from benchmarks.framework.loops import Order, answer, ask, read, read_leased, send
from benchmarks.framework.report import Report, latencies, percentile
from benchmarks.framework.stage import Stage, on_stage, together
from benchmarks.framework.workload import MIB, Workload

MIN_MESSAGES, MAX_MESSAGES = 8, 400_000
MAX_BYTES, MAX_UNBOUNDED_BYTES = 4096 * MIB, 1024 * MIB
"""What one measurement sends at most; a contestant without a bound on what is under way may hold all of it."""

PROBE_ROUND_TRIPS = 20
MIN_ROUND_TRIPS, MAX_ROUND_TRIPS = 20, 20_000

WARM_UP = 0.1
"""The share of a measurement's messages that pass before the clock starts."""

Turn: TypeAlias = Callable[[Stage], Awaitable[None]]
"""What one contestant does while the others wait."""


class Contest:
    """Contestants on stage together; one that fails is noted and left out from then on.

    Args:
        settings: What the command line asks for.
        report: Where figures and failures go.
        contestants: Who takes part. Those that are not installed are left out, with a word on how to get them.
        workloads: The kinds of messages.
        n_reader: Readers.
        both_ways: Whether there are lines back from the first reader.
        pinned: Whether each process is held to one core, where there are enough of them.
        seed: Which orders of turns are drawn.

    Attributes:
        stages: Who is still there.
    """

    def __init__(
        self,
        settings: Settings,
        report: Report,
        contestants: Sequence[Contestant],
        workloads: Sequence[Workload],
        n_reader: int = 1,
        *,
        both_ways: bool = False,
        pinned: bool = False,
        seed: int = 0,
    ) -> None:
        self.report, self.workloads, self.n_reader = report, workloads, n_reader
        self.stages: list[Stage] = []
        self._settings, self._how = settings, {"both_ways": both_ways, "pinned": pinned}
        self._contestants = available(contestants, workloads)
        self._stacks: dict[str, AsyncExitStack] = {}
        self._draw = Random(seed)

    async def __aenter__(self) -> Self:
        names = ", ".join(contestant.name for contestant in self._contestants)
        progress(f"starting {self.n_reader} reader{'s' if self.n_reader > 1 else ''} of {names or 'nobody'}")
        try:
            stages = await together([self._open(contestant) for contestant in self._contestants])
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        self.stages = [stage for stage in stages if stage is not None]
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
        loop_factory = self._settings.loop_factory
        opening = on_stage(contestant, self.workloads, self.n_reader, loop_factory, **self._how)
        try:
            return await stack.enter_async_context(opening)
        except BenchmarkError as error:
            self._note(contestant.name, error)
            return None

    def repetitions(self, what: str) -> Iterator[int]:
        """Yield the number of each repetition, and say so."""
        for number in range(self._settings.repeat):
            progress(f"{what}: repetition {number + 1} of {self._settings.repeat}")
            yield number

    async def each(self, turn: Turn) -> None:
        """Give each contestant a turn."""
        for stage in self._draw.sample(self.stages, len(self.stages)):
            try:
                await turn(stage)
            except BenchmarkError as error:
                self._note(stage.name, error)
                self.stages.remove(stage)
                try:
                    await self._stacks.pop(stage.name).__aexit__(type(error), error, error.__traceback__)
                except BenchmarkError:
                    pass  # is noted already

    async def streams(self, kind: int = 0, case: str | None = None) -> Turn:
        """Find out how many messages each sends in the time of one measurement; return what measures messages/s."""
        work, plan = self.workloads[kind], {}

        async def probe(stage: Stage) -> None:
            slots = work.slots  # each is touched once
            plan[stage.name] = self._messages(stage, work, await self._rate(stage, kind, slots, slots))

        async def turn(stage: Stage) -> None:
            count = plan[stage.name]
            rate = await self._rate(stage, kind, max(1, int(count * WARM_UP)), count)
            result = self.report.result(case or work.name, stage.name, self.n_reader)
            result.add(messages_per_s=rate)
            if work.codec == "tensor":
                result.add(volume_gb_per_s=rate * work.nbytes / 1e9)

        await self.each(probe)
        return turn

    async def round_trips(self, kind: int = 0, case: str | None = None, *, slowest: bool = False) -> Turn:
        """Find out how many there are in the time of one measurement; return what measures how long one takes."""
        plan = {}

        async def probe(stage: Stage) -> None:
            times = await _round_trips(stage, kind, int(PROBE_ROUND_TRIPS * WARM_UP), PROBE_ROUND_TRIPS)
            fit = int(self._settings.seconds * 1e6 / percentile(times, 50))
            plan[stage.name] = max(MIN_ROUND_TRIPS, min(MAX_ROUND_TRIPS, fit))

        async def turn(stage: Stage) -> None:
            count = plan[stage.name]
            times = await _round_trips(stage, kind, max(1, int(count * WARM_UP)), count)
            result = self.report.result(case or self.workloads[kind].name, stage.name)
            result.add(**latencies(times, slowest=slowest))

        await self.each(probe)
        return turn

    def _messages(self, stage: Stage, work: Workload, rate: float) -> int:
        bounded = stage.contestant.bounded[self.n_reader > 1]
        most = MAX_MESSAGES
        if stage.contestant.copies:
            most = min(most, (MAX_BYTES if bounded else MAX_UNBOUNDED_BYTES) // work.nbytes)
        return max(MIN_MESSAGES, min(most, int(rate * self._settings.seconds)))

    async def _rate(self, stage: Stage, kind: int, warm_up: int, count: int) -> float:
        """Return the messages/s at the slowest reader."""
        loop = read_leased if stage.contestant.leased else read
        write, listen = Order(send, (0, warm_up + count), kind), Order(loop, (warm_up, count), kind)
        _, seconds = await stage.perform(write, listen)
        return count / float(max(seconds))

    def _note(self, name: str, error: BenchmarkError) -> None:
        text = f"{name}: {error}"
        self.report.failures.append(text)
        progress(f"FAILED: {text}")


def available(contestants: Sequence[Contestant], workloads: Sequence[Workload]) -> list[Contestant]:
    """Return those that can carry all of this here, and say who cannot."""
    found = []
    for contestant in contestants:
        reasons = dict.fromkeys(contestant.missing(work.codec) for work in workloads)
        lacking = [reason for reason in reasons if reason is not None]
        if lacking:
            progress(f"missing: {contestant.name} ({lacking[0]})")
        else:
            found.append(contestant)
    return found


async def measure_streams(
    settings: Settings,
    report: Report,
    contestants: Sequence[Contestant],
    workloads: Sequence[Workload],
    readers: Sequence[int],
) -> None:
    """Note the messages/s of each contestant, for each kind of message and each number of readers."""
    for n_reader in readers:
        async with Contest(settings, report, contestants, workloads, n_reader) as contest:
            for kind, work in enumerate(workloads):
                turn = await contest.streams(kind)
                for _ in contest.repetitions(f"{work.name} to {n_reader} reader{'s' if n_reader > 1 else ''}"):
                    await contest.each(turn)


async def _round_trips(stage: Stage, kind: int, warm_up: int, count: int) -> list[float]:
    times: Any
    times, _ = await stage.perform(Order(ask, (warm_up, count), kind), Order(answer, (warm_up + count,), kind))
    return list(times)
