"""The report as text: for each kind of case one table, a contestant a line."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.compare.cases import Case
from benchmarks.compare.measure import cadence_title, cadences
from benchmarks.report import Report, cell, print_table

SPREAD = "median of the repetitions (least to largest)"


def show(report: Report, cases: Sequence[Case], quick: bool) -> None:
    """Print where the figures come from, the tables and the promises."""
    print(f"{report.benchmark} on " + ", ".join(f"{key} {value}" for key, value in report.machine.items()))
    print("settings: " + ", ".join(f"{key} {report.settings[key]}" for key in ["repeat", "seconds", "quick"]))
    streams = [case for case in cases if case.kind == "stream"]
    _show_streams(report, "messages/s", "messages_per_s", [case for case in streams if not case.by_bytes])
    _show_streams(report, "GB/s", "volume_gb_per_s", [case for case in streams if case.by_bytes])
    trips = [(case.title, 1, case.title) for case in cases if case.kind == "round trips"]
    _show(report, f"round trips, p50 in µs, {SPREAD}", "p50_us", trips)
    _show(report, f"round trips, p99 in µs, {SPREAD}", "p99_us", trips)
    ticks = [(cadence_title(ms), 1, cadence_title(ms)) for ms in cadences(quick)]
    _show(report, f"one message at a time, sent to received: p50 in µs, {SPREAD}", "p50_us", ticks)
    _show(report, f"one message at a time, sent to received: p99 in µs, {SPREAD}", "p99_us", ticks)
    _show(report, f"one message at a time: CPU of the reader in % of a core, {SPREAD}", "reader_cpu_percent", ticks)
    for promise in report.promises:
        print(promise)


def _show_streams(report: Report, unit: str, figure: str, cases: Sequence[Case]) -> None:
    columns = [
        (case.title, case.n_reader, f"{case.title}, {case.n_reader} reader{'s' if case.n_reader > 1 else ''}")
        for case in cases
    ]
    _show(report, f"{unit}, {SPREAD}", figure, columns)


def _show(report: Report, title: str, figure: str, columns: Sequence[tuple[str, int, str]]) -> None:
    """Print a table of those contestants that have this figure in one of these cases."""
    names = dict.fromkeys(result.contestant for result in report.results)
    rows = []
    for name in names:
        found = [report.find(case, name, n_reader) for case, n_reader, _ in columns]
        cells = [cell(result.figures.get(figure)) if result else "" for result in found]
        if any(cells):
            rows.append([name, *cells])
    if rows:
        print_table(title, ["contestant", *(heading for _, _, heading in columns)], rows, left={0})
