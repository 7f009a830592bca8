"""The report of a benchmark: figures over repetitions, promises, and how both are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Result:
    """The figures of one contestant in one case, such as ``"small dict"``, in each repetition.

    The name of a figure ends in its unit.
    """

    case: str
    contestant: str
    n_reader: int
    figures: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **figures: float) -> None:
        """Note one repetition."""
        for name, value in figures.items():
            self.figures.setdefault(name, []).append(value)

    def median(self, figure: str) -> float:
        """Return the median over the repetitions."""
        return median(self.figures[figure])


@dataclass(frozen=True)
class Promise:
    """A promise, and the figure that was measured, a median where it was measured several times."""

    text: str
    measured: float
    unit: str
    bound: float
    at_least: bool = False  # whether the bound is a lower one
    spread: tuple[float, float] | None = None  # the least and the largest of several measurements

    @property
    def kept(self) -> bool:
        """Whether the figure is within the bound."""
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def __str__(self) -> str:
        gap = "" if self.unit in _TIGHT else " "
        spread = f" ({_number(self.spread[0])} to {_number(self.spread[1])})" if self.spread else ""
        return f"{'ok' if self.kept else 'MISSED':6}  {_number(self.measured)}{gap}{self.unit}{spread}: {self.text}"


@dataclass
class Report:
    """The findings of one run of a benchmark."""

    benchmark: str
    machine: dict[str, str | int | float]
    settings: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def find(self, case: str, contestant: str, n_reader: int = 1) -> Result | None:
        """Return what this contestant did in this case, if it was run."""
        for result in self.results:
            if (result.case, result.contestant, result.n_reader) == (case, contestant, n_reader):
                return result
        return None

    def result(self, case: str, contestant: str, n_reader: int = 1) -> Result:
        """Return where to note what this contestant does in this case."""
        found = self.find(case, contestant, n_reader)
        if found is None:
            found = Result(case, contestant, n_reader)
            self.results.append(found)
        return found

    def ratios(self, case: str, ours: str, theirs: str, figure: str, *, n_reader: int = 1) -> list[float]:
        """Return the ratio of two contestants' figures in each repetition; empty if one was not measured."""
        both = [self.find(case, name, n_reader) for name in (ours, theirs)]
        values = [result.figures[figure] for result in both if result is not None and figure in result.figures]
        return [one / other for one, other in zip(*values, strict=False)] if len(values) == 2 else []

    def hold(
        self, text: str, measured: float | Sequence[float], unit: str, bound: float, *, at_least: bool = False
    ) -> None:
        """Note a promise, or that it could not be held against a measurement.

        Args:
            text: The promise; its bound is added.
            measured: The figure, or that of each repetition, whose median counts. Empty: it was not measured.
            unit: Follows the figure, ``"x"`` for a ratio.
            bound: The promised figure.
            at_least: Whether the bound is a lower one.
        """
        gap = "" if unit in _TIGHT else " "
        text = f"{text} ({'at least' if at_least else 'at most'} {bound:.4g}{gap}{unit})"
        values = measured if isinstance(measured, Sequence) else [measured]
        if not values:
            self.remarks.append(f"not measured: {text}")
            return
        spread = (min(values), max(values)) if len(values) > 1 else None
        self.promises.append(Promise(text, median(values), unit, bound, at_least, spread))

    def as_dict(self) -> dict[str, Any]:
        """Return everything, with each figure's median, least, largest and all repetitions."""
        return {
            "benchmark": self.benchmark,
            "machine": self.machine,
            "settings": self.settings,
            "results": [_result_as_dict(result) for result in self.results],
            "promises": [{**asdict(promise), "kept": promise.kept} for promise in self.promises],
            "remarks": self.remarks,
            "failures": self.failures,
        }

    def show(self) -> None:
        """Print everything as text: for each kind of case one table."""
        print(f"{self.benchmark} on " + ", ".join(f"{key} {value}" for key, value in self.machine.items()))
        plain = {key: value for key, value in self.settings.items() if not isinstance(value, list)}
        print("settings: " + ", ".join(f"{key} {value}" for key, value in plain.items()))
        for results in _tables(self.results):
            columns = list(dict.fromkeys(name for result in results for name in result.figures))
            head = ["case", "readers", "contestant", *(_heading(name) for name in columns)]
            rows = [
                [result.case, str(result.n_reader), result.contestant, *(_cell(result.figures.get(c)) for c in columns)]
                for result in sorted(results, key=_case_order(results))
            ]
            _print_table(head, rows)
        for promise in self.promises:
            print(promise)
        for remark in self.remarks:
            print(remark)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def latencies(times_us: Sequence[float]) -> dict[str, float]:
    """Return p50 and p99 of times in microseconds."""
    return {"p50_us": percentile(times_us, 50), "p99_us": percentile(times_us, 99)}


def _tables(results: Sequence[Result]) -> list[list[Result]]:
    """Return the results by table: cases share one if they begin with the same figure."""
    first: dict[str, str] = {}
    for result in results:
        first.setdefault(result.case, next(iter(result.figures)))
    figures = dict.fromkeys(first.values())
    return [[result for result in results if first[result.case] == figure] for figure in figures]


def _case_order(results: Sequence[Result]) -> Callable[[Result], int]:
    """Put a case's contestants together, cases in the order in which they were first met."""
    order = {key: n for n, key in enumerate(dict.fromkeys((r.n_reader, r.case) for r in results))}
    return lambda result: order[result.n_reader, result.case]


def _result_as_dict(result: Result) -> dict[str, Any]:
    figures = {
        name: {"median": median(values), "min": min(values), "max": max(values), "repetitions": values}
        for name, values in result.figures.items()
    }
    return {
        "case": result.case,
        "contestant": result.contestant,
        "readers": result.n_reader,
        "figures": figures,
    }


_TIGHT = {"", "x", "%"}
"""Units that follow a figure without a blank."""

_UNITS = {"gb_per_s": "GB/s", "per_s": "1/s", "us": "µs", "ms": "ms", "s": "s", "mib": "MiB", "percent": "%"}


def _heading(figure: str) -> str:
    """Return ``"p50, µs"`` for ``"p50_us"``."""
    for ending, unit in _UNITS.items():
        if figure.endswith(f"_{ending}"):
            return f"{figure.removesuffix(f'_{ending}').replace('_', ' ')}, {unit}"
    return figure.replace("_", " ")


def _cell(values: Sequence[float] | None) -> str:
    """Return a figure's median and, in parentheses, the least and the largest of its repetitions."""
    if not values:
        return ""
    if len(values) == 1:
        return _number(values[0])
    return f"{_number(median(values))} ({_number(min(values))} to {_number(max(values))})"


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    return f"{value:,.0f}" if abs(value) >= 99.5 else f"{value:.3g}"


def _print_table(head: list[str], rows: list[list[str]]) -> None:
    print("\nmedian of the repetitions (least to largest)")
    widths = [max(len(row[n]) for row in [head, *rows]) for n in range(len(head))]
    for row in [head, ["-" * width for width in widths], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()
