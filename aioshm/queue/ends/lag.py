"""Names the reader that holds a writer back, although every reader moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

SHARE = 0.5
"""A reader holds the writer back as long as the writer spends at least so much of its time waiting for it."""

SAMPLE_S = 0.01
"""How often to ask for whom the writer waits: with many readers, and short waits, asking takes as long as the wait."""


class _Run:
    """The time in which one reader has held the writer back, by ``time.monotonic()``."""

    __slots__ = ("began", "report_at", "waited_s")

    def __init__(self, began: float, report_at: float) -> None:
        self.began = began
        # The writer's waiting time within the run.
        self.waited_s = 0.0
        self.report_at = report_at


class LagWatch:
    """Adds up the writer's waits by reader; reports rank, seconds of a run, seconds waited."""

    def __init__(self, after_s: float, stall_s: float, report: Callable[[int, float, float], None]) -> None:
        self._after_s = after_s
        # Longer waits are reported as stalls, and do not count.
        self._stall_s = stall_s
        self._report = report
        self._runs: dict[int, _Run] = {}
        self._slowest: Sequence[int] = ()
        self._ask_at = 0.0

    def slowest(self, now: float, ask: Callable[..., Sequence[int]], room: Iterable[Any]) -> Sequence[int]:
        """Return the readers that are furthest behind, as ``ask(*room)`` said not long before ``now``."""
        if now >= self._ask_at:
            self._slowest, self._ask_at = ask(*room), now + SAMPLE_S
        return self._slowest

    def waited(self, ranks: Sequence[int], began: float, ended: float) -> None:
        """Count one wait of the writer for the readers that were furthest behind."""
        if ended - began >= self._stall_s:
            self._runs.clear()
            return
        for rank in ranks:
            run = self._runs.get(rank)
            if run is None or run.waited_s + ended - began < SHARE * (ended - run.began):
                run = self._runs[rank] = _Run(began, began + self._after_s)
            run.waited_s += ended - began
            if ended >= run.report_at:
                run.report_at = ended + self._after_s
                self._report(rank, ended - run.began, run.waited_s)
