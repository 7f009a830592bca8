"""The promises of default rings against named rivals in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.compare.cases import Case
from benchmarks.framework.report import Report

RATE, P50, CPU, COPIED, RING = "messages_per_s", "p50_us", "reader_cpu_percent", "copied_bytes", "ring_mib"

TEXTS = {
    RATE: "messages/s",
    P50: "p50",
    CPU: "a core's share taken by the reader",
    COPIED: "bytes copied of each, none of them the array's",
    RING: "at either end",
}
UNITS = {CPU: "%", COPIED: "B", RING: "MiB"}

OURS, BLOCKING, LEASED, LOANED = "aioshm", "aioshm blocking", "aioshm leased", "aioshm loaned"
VLLM, ARENA, ICEORYX, PYZMQ = "vLLM", "vLLM arena", "iceoryx2 polling", "pyzmq"


@dataclass(frozen=True)
class Bound:
    """A promised bound of a figure, or of its ratio to a rival's.

    Attributes:
        case: The name of the case.
        figure: The figure.
        bound: At least where the figure is a rate, else at most.
        theirs: The rival; None for the figure itself.
        ours: The API of aioshm.
    """

    case: str
    figure: str
    bound: float
    theirs: str | None = None
    ours: str = OURS

    @property
    def contestants(self) -> list[str]:
        """The names of those whose figures are needed."""
        return [self.ours, *([self.theirs] if self.theirs else [])]


PROMISES = [
    Bound("dict", RATE, 7, VLLM),
    Bound("fanout-2", RATE, 6, VLLM),
    Bound("fanout-4", RATE, 6, VLLM),
    Bound("fanout-2", RATE, 1, PYZMQ),
    Bound("fanout-4", RATE, 1, PYZMQ),
    Bound("msgpack", RATE, 10, VLLM),
    Bound("raw", RATE, 4, ICEORYX),
    Bound("raw", RATE, 2, PYZMQ),
    Bound("pingpong", P50, 0.25, ICEORYX),
    Bound("4k", RATE, 1.3, VLLM),
    Bound("64k", RATE, 1.3, VLLM),
    Bound("1m", RATE, 1.2, VLLM),
    Bound("16m", RATE, 1, VLLM),
    Bound("64m", RATE, 2.5, VLLM),
    Bound("64m", RATE, 1, ARENA),
    Bound("loaned", RATE, 50, VLLM, LOANED),
    Bound("loaned", COPIED, 512, ours=LOANED),
    *(Bound(name, RATE, 1.5, OURS, LEASED) for name in ("lease-1m", "lease-16m")),
    *(Bound(f"{period_ms}ms", P50, 1, VLLM) for period_ms in (1, 5, 20)),
    *(Bound(f"{period_ms}ms", CPU, percent) for period_ms, percent in ((1, 20), (5, 12), (20, 6))),
    *(Bound(name, RATE, 0.95, OURS, BLOCKING) for name in ("dict", "4k", "64k", "1m", "16m")),
    Bound("memory", RING, 6),
]


def hold(report: Report, cases: Sequence[Case]) -> None:
    """Hold the report against every promise of these cases; name those that were not measured."""
    for promise in PROMISES:
        for case in cases:
            if case.name == promise.case:
                _hold(report, case, promise)


def _hold(report: Report, case: Case, promise: Bound) -> None:
    text = f"{case.title}{f' to {case.n_reader} readers' if case.n_reader > 1 else ''}: {TEXTS[promise.figure]}"
    if promise.theirs is None:
        found = report.find(case.title, promise.ours)
        values = found.figures.get(promise.figure, []) if found is not None else []
        text = f"{text}, {promise.ours}"
    else:
        values = report.ratios(case.title, promise.ours, promise.theirs, promise.figure, n_reader=case.n_reader)
        text = f"{text} of {promise.ours} against {promise.theirs}"
    unit = UNITS[promise.figure] if promise.theirs is None else "x"
    report.hold(text, values, unit, promise.bound, at_least=promise.figure == RATE)
