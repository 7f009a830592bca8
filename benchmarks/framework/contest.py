"""All contestants of a case on stage together, each repetition going round them, in an order drawn for it.

So whatever else happens on the machine happens to all of them, and none has the first turn, or the same neighbour,
each time: a turn after a rest may take a few per cent longer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from random import Random
from types import TracebackType
from typing import Self, TypeAlias

from benchmarks.contestants.contestant import Contestant
from benchmarks.framework.crew import BenchmarkError
from benchmarks.framework.harness import Settings, progress
from benchmarks.framework.report import Report
from benchmarks.framework.stage import Stage, on_stage, together
from benchmarks.framework.workload import Codec, Workload

Turn: TypeAlias = Callable[[Stage], Awaitable[None]]
"""What one contestant does while the others wait."""


class Contest:
    """Contestants on stage together; one that fails is noted and left out from then on.

    Args:
        settings: From the command line.
        report: Where failures are noted.
        contestants: Who takes part. Those that are not installed are left out, with a word on how to get them.
        workload: The kind of messages.
        n_reader: Readers.
        both_ways: Whether there is a line back from the first reader.
        seed: Determines the orders of turns.
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
        self._contestants = available(contestants, workload.codec)
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

    async def each(self, turn: Turn) -> None:
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


def available(contestants: Sequence[Contestant], codec: Codec) -> list[Contestant]:
    """Return those that can carry this here, and say who cannot."""
    found = []
    for contestant in contestants:
        reason = contestant.missing(codec)
        if reason is None:
            found.append(contestant)
        else:
            progress(f"missing: {contestant.name} ({reason})")
    return found
