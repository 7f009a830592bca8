"""What aioshm promises against named rivals, held against what the same run measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.compare.cases import (
    CPU_BOUNDS,
    LOANED,
    MSGPACK,
    PING_PONG,
    RAW,
    SIZED,
    SMALL,
    T_1M,
    T_4K,
    T_16M,
    T_64K,
    T_64M,
)
from benchmarks.compare.measure import cadence_title
from benchmarks.compare.memcpy import NAME as MEMCPY
from benchmarks.framework.report import Report, bounded

AS_SIZED = 0.95
"""What a ring with the sizes that every ring has reaches at least of one that is made for the messages."""

RATE, VOLUME, P50, CPU = "messages_per_s", "volume_gb_per_s", "p50_us", "reader_cpu_percent"


@dataclass(frozen=True)
class Bound:
    """A promised bound of a figure, or of its ratio to a rival's.

    Attributes:
        case: In which case.
        ours: Which face of aioshm.
        figure: Which figure.
        bound: What must be reached, or must not be exceeded.
        theirs: The rival; None for the figure itself.
        at_least: Whether the bound is a lower one.
        n_reader: Readers.
    """

    case: str
    ours: str
    figure: str
    bound: float
    theirs: str | None = None
    at_least: bool = False
    n_reader: int = 1

    @property
    def unit(self) -> str:
        """The unit of the bound."""
        return "%" if self.theirs is None else "x"

    @property
    def text(self) -> str:
        """What is promised, without its bound."""
        if self.theirs is None:
            return f"{self.case}: a core's share taken by a reader of {self.ours}"
        what = {RATE: "messages/s", VOLUME: "bytes/s", P50: "p50"}[self.figure]
        readers = "" if self.n_reader == 1 else f" to {self.n_reader} readers"
        return f"{self.case}{readers}: {what} of {self.ours} against {self.theirs}"

    def measured(self, report: Report) -> float | None:
        """Return what was measured, or None if something was not."""
        if self.theirs is not None:
            return report.ratio(self.case, self.ours, self.theirs, self.figure, n_reader=self.n_reader)
        ours = report.find(self.case, self.ours)
        return ours.median(self.figure) if ours is not None else None


def _all() -> Iterator[Bound]:
    def faster(case: str, theirs: str, figure: str, bound: float, ours: str = "aioshm", n_reader: int = 1) -> Bound:
        return Bound(case, ours, figure, bound, theirs, True, n_reader)

    yield faster(SMALL, "vLLM", RATE, 7)
    yield faster(SMALL, "zmq.asyncio", RATE, 8)
    yield faster(MSGPACK, "vLLM", RATE, 12)
    yield faster(RAW, "iceoryx2 polling", RATE, 5)
    yield faster(RAW, "pyzmq", RATE, 3)
    for n_reader in (2, 4):
        yield faster(SMALL, "vLLM", RATE, 6, n_reader=n_reader)
        yield faster(SMALL, "pyzmq", RATE, 1, n_reader=n_reader)
    for sized in SIZED:
        for n_reader in (1, 2, 4):
            yield faster(SMALL, sized, RATE, AS_SIZED, n_reader=n_reader)
        for size in (T_4K, T_64K, T_1M, T_16M):
            yield faster(size, sized, VOLUME, AS_SIZED)
    for ours in ("aioshm", "aioshm blocking"):
        yield Bound(PING_PONG, ours, P50, 1 / 4, "iceoryx2 polling")
        yield Bound(PING_PONG, ours, P50, 1 / 50, "zmq.asyncio")
    for period_ms, percent in CPU_BOUNDS.items():
        yield Bound(cadence_title(period_ms), "aioshm", P50, 1, "vLLM")
        yield Bound(cadence_title(period_ms), "aioshm", CPU, percent)
    for size in (T_1M, T_16M):
        yield faster(size, "vLLM", VOLUME, 5)
        yield faster(size, MEMCPY, VOLUME, 0.5)
    yield faster(T_16M, MEMCPY, VOLUME, 0.8, "aioshm leased")
    yield faster(T_64M, "vLLM", VOLUME, 2.5)
    for theirs, bound in (("vLLM", 100), ("vLLM arena", 1)):
        yield faster(LOANED, theirs, RATE, bound, "aioshm loaned")


PROMISES: list[Bound] = list(_all())


def hold(report: Report) -> list[str]:
    """Note every promise that can be held against the report; return those that cannot."""
    return [
        bounded(one.text, one.unit, one.bound, one.at_least)
        for one in PROMISES
        if not report.hold(one.text, one.measured(report), one.unit, one.bound, at_least=one.at_least)
    ]
