"""What a benchmark found: figures over repetitions, promises, and how both are shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Result:
    """What one contestant did in one case.

    Attributes:
        case: What was measured, such as ``"small dict"``.
        contestant: Its name.
        n_reader: Readers.
        figures: Each figure's values, one for each repetition. A figure's name ends in its unit.
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

    def worst(self, figure: str) -> float:
        """Return the largest value over the repetitions."""
        return max(self.figures[figure])


@dataclass(frozen=True)
class Promise:
    """What is promised, and what was measured.

    Attributes:
        text: What is promised, with its bound.
        measured: The figure.
        unit: Follows the figure, ``"x"`` for a ratio.
        bound: The promised figure.
        at_least: Whether the bound is a lower one.
    """

    text: str
    measured: float
    unit: str
    bound: float
    at_least: bool = False

    @property
    def kept(self) -> bool:
        """Whether the figure is within the bound."""
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def __str__(self) -> str:
        gap = "" if self.unit in {"", "x", "%"} else " "
        return f"{'ok' if self.kept else 'MISSED':6}  {_number(self.measured)}{gap}{self.unit}: {self.text}"


@dataclass
class Report:
    """Everything that one run of a benchmark found."""

    benchmark: str
    machine: dict[str, str | int | float]
    settings: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

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

    def to_json(self) -> str:
        """Return everything, with each figure's median, least, largest and all repetitions."""
        return json.dumps(
            {
                "benchmark": self.benchmark,
                "machine": self.machine,
                "settings": self.settings,
                "results": [_result_as_dict(result) for result in self.results],
                "promises": [
                    {
                        "promise": promise.text,
                        "measured": promise.measured,
                        "unit": promise.unit,
                        "bound": promise.bound,
                        "at_least": promise.at_least,
                        "kept": promise.kept,
                    }
                    for promise in self.promises
                ],
                "remarks": self.remarks,
            },
            indent=2,
        )

    def show(self) -> None:
        """Print everything as text."""
        print(f"{self.benchmark} on " + ", ".join(f"{key} {value}" for key, value in self.machine.items()))
        print("settings: " + ", ".join(f"{key} {value}" for key, value in self.settings.items()))
        columns = list(dict.fromkeys(name for result in self.results for name in result.figures))
        head = ["case", "readers", "contestant", *(_heading(name) for name in columns)]
        rows = [
            [result.case, str(result.n_reader), result.contestant, *(cell(result.figures.get(c)) for c in columns)]
            for result in sorted(self.results, key=_case_order(self.results))
        ]
        print_table("median of the repetitions (least to largest)", head, rows)
        for promise in self.promises:
            print(promise)
        for remark in self.remarks:
            print(remark)


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


_UNITS = {"gb_per_s": "GB/s", "per_s": "1/s", "us": "µs", "ms": "ms", "s": "s", "percent": "%"}


def _heading(figure: str) -> str:
    """Return ``"p50, µs"`` for ``"p50_us"``."""
    for ending, unit in _UNITS.items():
        if figure.endswith(f"_{ending}"):
            return f"{figure.removesuffix(f'_{ending}').replace('_', ' ')}, {unit}"
    return figure.replace("_", " ")


def cell(values: Sequence[float] | None) -> str:
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


def print_table(title: str, head: list[str], rows: list[list[str]], *, left: Set[int] = frozenset({0, 2})) -> None:
    """Print a table: by rich on a terminal, if it is installed, and as plain text everywhere else.

    Args:
        title: Above it.
        head: The columns' names.
        rows: As many cells each.
        left: Which columns are words, not figures.
    """
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _print_plain_table(title, head, rows)
        return
    console = Console()
    if not console.is_terminal:  # rich would wrap the cells at 80 columns
        _print_plain_table(title, head, rows)
        return
    table = Table(title=title)
    for n, name in enumerate(head):
        table.add_column(name, justify="left" if n in left else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _print_plain_table(title: str, head: list[str], rows: list[list[str]]) -> None:
    print(f"\n{title}")
    widths = [max(len(row[n]) for row in [head, *rows]) for n in range(len(head))]
    for row in [head, ["-" * width for width in widths], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()
