"""Promises are held against the measurements of a run, and named where something was not measured."""

from __future__ import annotations

import pytest

from benchmarks.compare.cases import CASES
from benchmarks.compare.promises import PROMISES, Bound, hold
from benchmarks.framework.report import Report

CASE = next(case for case in CASES if case.name == "fanout-2")
RATES = {"aioshm": [700.0, 600.0, 650.0], "vLLM": [100.0, 100.0, 100.0], "pyzmq": [700.0, 600.0, 700.0]}


def report_of(rates: dict[str, list[float]]) -> Report:
    report = Report("defaults", {}, {})
    for name, values in rates.items():
        for value in values:
            report.result(CASE.title, name, CASE.n_reader).add(messages_per_s=value)
    return report


def test_promise_is_held_against_the_median_of_the_ratios_and_has_their_spread() -> None:
    report = report_of(RATES)
    hold(report, [CASE])
    against_vllm, against_pyzmq = report.promises
    assert against_vllm.measured == 6.5
    assert against_vllm.spread == (6, 7)
    assert str(against_vllm) == (
        "ok      6.5x (6 to 7): small dict to 2 readers: messages/s of aioshm against vLLM (at least 6x)"
    )
    assert against_pyzmq.measured == 1
    assert against_pyzmq.kept


@pytest.mark.parametrize(("missing", "unmeasured"), [("aioshm", 2), ("vLLM", 1)])
def test_promise_without_a_measurement_is_named_and_not_kept(missing: str, unmeasured: int) -> None:
    report = report_of({name: values for name, values in RATES.items() if name != missing})
    hold(report, [CASE])
    assert len(report.promises) == 2 - unmeasured
    assert len([remark for remark in report.remarks if remark.startswith("not measured: small dict")]) == unmeasured


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: f"{promise.case}-{promise.figure}-{promise.theirs}")
def test_every_promise_has_a_case_in_which_its_contestants_take_part(promise: Bound) -> None:
    [case] = [case for case in CASES if case.name == promise.case]
    measured = {*case.contestants, *(f"{name} leased" for name in case.contestants if case.kind == "waiting")}
    assert set(promise.contestants) <= measured
