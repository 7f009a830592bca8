"""The report as a picture: throughput, fan-out, sizes, round trips, and latency and CPU at a cadence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.cases import CADENCES_MS, CASES, MSGPACK, PING_PONG, RAW, SMALL
from benchmarks.compare.measure import cadence_title
from benchmarks.compare.memcpy import NAME as MEMCPY
from benchmarks.framework.crew import BenchmarkError
from benchmarks.framework.report import Report

HOW_TO_GET_IT = "plots need matplotlib: `make bench-rivals` builds an environment with it"

SUFFIXES = {".svg", ".png", ".pdf"}


class NoPlotError(BenchmarkError):
    """A plot cannot be made; the text says why."""


def check(path: Path) -> None:
    """Raise `NoPlotError` unless a plot can be made, in a file of this name."""
    if path.suffix not in SUFFIXES:
        raise NoPlotError(f"a plot's name ends in {', '.join(sorted(SUFFIXES))}, not {path.suffix or path}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NoPlotError(HOW_TO_GET_IT) from None


def plot(report: Report, path: Path) -> None:
    """Write the picture to a file, of the kind that its ending says."""
    check(path)
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(result.contestant for result in report.results))
    colours = {name: mpl.colormaps["tab20"](n % 20) for n, name in enumerate(names)}
    styles = {name: "-" if name.startswith("aioshm") else "--" if n < 10 else ":" for n, name in enumerate(names)}
    figure, axes = plt.subplots(3, 2, figsize=(14, 15), layout="constrained")
    (rates, fan_out), (sizes, trips), (late, cpu) = axes
    _bars(rates, report, "1 reader: messages/s", "messages_per_s", [SMALL, MSGPACK, RAW], names, colours)
    _bars(trips, report, "64 B ping-pong: p50 in µs", "p50_us", [PING_PONG], names, colours)
    draw = _Lines(report, names, colours, styles)
    draw.lines(fan_out, "small dict: messages/s, by readers", "messages_per_s", [(n, SMALL, n) for n in (1, 2, 4)])
    tensors = [(case.workload.nbytes, case.title, 1) for case in CASES if case.by_bytes]
    draw.lines(sizes, "tensors: GB/s, by size", "volume_gb_per_s", tensors)
    ticks = [(period, cadence_title(period), 1) for period in CADENCES_MS]
    draw.lines(late, "sent to received: p50 in µs, by ms between messages", "p50_us", ticks)
    draw.lines(cpu, "CPU of the reader in % of a core, by ms between messages", "reader_cpu_percent", ticks)
    machine = report.machine
    figure.suptitle(f"{machine.get('cpu')}, {machine.get('usable_cpus')} CPUs, {machine.get('python')}")
    path.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(path)
    plt.close(figure)


def _bars(
    axes: Any,
    report: Report,
    title: str,
    figure: str,
    cases: Sequence[str],
    names: Sequence[str],
    colours: dict[str, Any],
) -> None:
    """Draw a bar for each contestant, with its spread, case by case."""
    ticks, labels, place = [], [], 0
    for case in cases:
        for name in names:
            result = report.find(case, name)
            if result is None or figure not in result.figures:
                continue
            values, middle = result.figures[figure], result.median(figure)
            spread = [[middle - min(values)], [max(values) - middle]]
            axes.barh(place, middle, color=colours[name], xerr=spread)
            ticks.append(place)
            labels.append(f"{name} ({case})" if len(cases) > 1 else name)
            place += 1
        place += 1
    axes.set_title(title)
    axes.set_xscale("log")
    axes.set_yticks(ticks, labels, fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)


class _Lines:
    """Draws a line for each contestant."""

    def __init__(self, report: Report, names: Sequence[str], colours: dict[str, Any], styles: dict[str, str]) -> None:
        self._report, self._names, self._colours, self._styles = report, names, colours, styles

    def lines(self, axes: Any, title: str, figure: str, points: Sequence[tuple[int, str, int]]) -> None:
        """Draw a figure's medians.

        Args:
            axes: Where.
            title: Above it.
            figure: Which.
            points: Where on the x axis, and which case and number of readers that is.
        """
        drawn = False
        for name in self._names:
            found = [(x, self._report.find(case, name, n_reader)) for x, case, n_reader in points]
            known = [(x, result.median(figure)) for x, result in found if result and figure in result.figures]
            if known:
                xs, ys = zip(*known, strict=True)
                style = ":" if name == MEMCPY else self._styles[name]
                axes.plot(xs, ys, style, marker="o", markersize=3, color=self._colours[name], label=name)
                drawn = True
        axes.set_title(title)
        axes.grid(alpha=0.3)
        if drawn:
            axes.set_xscale("log", base=2 if max(x for x, *_ in points) > 1000 else 10)
            axes.set_yscale("log")
            axes.set_xticks(
                [x for x, *_ in points], [case.removesuffix(" tensor") if x > 1000 else str(x) for x, case, _ in points]
            )
            axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
            axes.legend(fontsize=7, framealpha=0.5)
        else:
            axes.text(0.5, 0.5, "not measured", ha="center")
