"""What aioshm promises against named rivals, held against what the same run measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.compare.cases import MSGPACK, PING_PONG, RAW, SMALL, T_1M, T_16M, T_64M
from benchmarks.compare.measure import cadence_title
from benchmarks.compare.memcpy import NAME as MEMCPY
from benchmarks.report import Promise, Report

RATE, VOLUME, P50, CPU = "messages_per_s", "volume_gb_per_s", "p50_us", "reader_cpu_percent"


@dataclass(frozen=True)
class Ratio:
    """A promised ratio of two contestants' medians.

    Attributes:
        case: In which case.
        ours: Which face of aioshm.
        theirs: Which rival.
        figure: Of which figure.
        bound: What the ratio must reach, or must not exceed.
        at_least: Whether the bound is a lower one.
        n_reader: Readers.
        their_case: The rival's case, if that is another one.
    """

    case: str
    ours: str
    theirs: str
    figure: str
    bound: float
    at_least: bool = True
    n_reader: int = 1
    their_case: str | None = None

    @property
    def text(self) -> str:
        """What is promised."""
        what = {RATE: "messages/s", VOLUME: "bytes/s", P50: "p50"}[self.figure]
        readers = "" if self.n_reader == 1 else f" to {self.n_reader} readers"
        how = "at least" if self.at_least else "at most"
        return f"{self.case}{readers}: {what} of {self.ours} against {self.theirs} ({how} {self.bound:.3g}x)"

    def against(self, report: Report) -> Promise | None:
        """Return the promise with what was measured, or None if one of the two was not."""
        ours = report.find(self.case, self.ours, self.n_reader)
        theirs = report.find(self.their_case or self.case, self.theirs, self.n_reader)
        if ours is None or theirs is None or self.figure not in ours.figures or self.figure not in theirs.figures:
            return None
        ratio = ours.median(self.figure) / theirs.median(self.figure)
        return Promise(self.text, ratio, "x", self.bound, self.at_least)


@dataclass(frozen=True)
class Cpu:
    """A promised bound of what a reader takes of a core at a cadence."""

    case: str
    ours: str
    percent: float

    @property
    def text(self) -> str:
        """What is promised."""
        return f"{self.case}: a core's share taken by a reader of {self.ours} (at most {self.percent:g}%)"

    def against(self, report: Report) -> Promise | None:
        """Return the promise with what was measured, or None if nothing was."""
        ours = report.find(self.case, self.ours)
        return None if ours is None else Promise(self.text, ours.median(CPU), "%", self.percent)


def _all() -> Iterator[Ratio | Cpu]:
    yield Ratio(SMALL, "aioshm", "vLLM", RATE, 6)
    yield Ratio(SMALL, "aioshm", "zmq.asyncio", RATE, 8)
    yield Ratio(MSGPACK, "aioshm", "vLLM", RATE, 12)
    yield Ratio(RAW, "aioshm", "iceoryx2 polling", RATE, 5)
    yield Ratio(RAW, "aioshm", "pyzmq", RATE, 3)
    for n_reader in (2, 4):
        yield Ratio(SMALL, "aioshm", "vLLM", RATE, 4, n_reader=n_reader)
    for ours in ("aioshm", "aioshm blocking"):
        yield Ratio(PING_PONG, ours, "iceoryx2 polling", P50, 1 / 4, at_least=False)
        yield Ratio(PING_PONG, ours, "zmq.asyncio", P50, 1 / 50, at_least=False)
    for period_ms, percent in ((5, 10), (20, 5)):
        yield Ratio(cadence_title(period_ms), "aioshm", "vLLM", P50, 1, at_least=False)
        yield Cpu(cadence_title(period_ms), "aioshm", percent)
    for size in (T_1M, T_16M):
        yield Ratio(size, "aioshm", "vLLM", VOLUME, 5)
        yield Ratio(size, "aioshm", MEMCPY, VOLUME, 0.5)
    yield Ratio(T_16M, "aioshm leased", MEMCPY, VOLUME, 0.8)
    yield Ratio(T_64M, "aioshm", "vLLM", VOLUME, 2.5)


PROMISES: list[Ratio | Cpu] = list(_all())


def hold(report: Report) -> list[str]:
    """Note every promise that can be held against the report; return those that cannot."""
    unheld = []
    for promised in PROMISES:
        promise = promised.against(report)
        if promise is None:
            unheld.append(promised.text)
        else:
            report.promises.append(promise)
    return unheld
