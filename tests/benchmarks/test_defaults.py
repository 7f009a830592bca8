"""What is promised of rings that nobody sized is held against what was measured, and told where it was not."""

from __future__ import annotations

import pytest

from benchmarks.compare.cases import CASES, SIZED
from benchmarks.defaults import AGAIN, AWAITED, LINES, Line, hold
from benchmarks.framework.report import Report

CASE = next(case for case in CASES if case.name == "fanout-2")
RATES = {AWAITED: [700.0, 600.0, 650.0], "vLLM": [100.0, 100.0, 100.0], AGAIN: [700.0, 630.0, 650.0]}


def report_of(rates: dict[str, list[float]]) -> Report:
    report = Report("defaults", {}, {})
    for name, values in rates.items():
        for value in values:
            report.result(CASE.title, name, CASE.n_reader).add(messages_per_s=value)
    return report


@pytest.mark.parametrize(("bound", "verdict"), [(6.5, "ok"), (6.6, "MISSED")])
def test_the_median_of_the_ratios_counts_and_their_spread_is_told(bound: float, verdict: str) -> None:
    report = report_of(RATES)
    hold(report, CASE, Line(CASE.name, AWAITED, ["vLLM"], bound))
    [promise] = report.promises
    assert promise.measured == 6.5
    assert str(promise).split()[0] == verdict
    [remark] = report.remarks
    assert "6.50x (6.00 to 7.00); control 1.00x (1.00 to 1.05)" in remark


def test_the_best_of_several_rings_counts() -> None:
    rates = {name: [600.0 + n] * 3 for n, name in enumerate(SIZED)}
    report = report_of({**RATES, **rates, SIZED[1]: [1300.0] * 3})
    hold(report, CASE, Line(CASE.name, AWAITED, SIZED, 0.95))
    assert report.promises[0].measured == 0.5
    assert SIZED[1] in report.remarks[0]


@pytest.mark.parametrize("missing", [[AWAITED], ["vLLM"], SIZED[:1]])
def test_what_was_not_measured_is_told_and_keeps_no_promise(missing: list[str]) -> None:
    rates = {**RATES, **{name: [600.0] * 3 for name in SIZED}}
    report = report_of({name: values for name, values in rates.items() if name not in missing})
    hold(report, CASE, Line(CASE.name, AWAITED, SIZED if missing == SIZED[:1] else ["vLLM"], 1))
    assert report.promises == []
    assert report.remarks[0].startswith("not measured: ")


def test_every_line_has_a_case_in_which_all_of_it_takes_part() -> None:
    cases = {case.name: set(case.contestants) for case in CASES}
    assert [line for line in LINES if not {line.ours, *line.theirs} <= cases[line.case]] == []
