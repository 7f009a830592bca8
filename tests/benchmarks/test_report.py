"""What is made of the figures: a table, promises, pictures, and what a comparison of two trees tells."""

from __future__ import annotations

import json
import random
import re
import shutil
from math import log
from pathlib import Path

import pytest

from benchmarks import pictures
from benchmarks.before_after import estimate
from benchmarks.compare.cases import CASES
from benchmarks.compare.promises import PROMISES, Bound, hold
from benchmarks.framework.report import Promise, Report
from benchmarks.framework.workload import Workload, WrongMessageError, plain_bytes, small_dict, tensor
from benchmarks.throughput import MESSAGES

ROOT = Path(__file__).parents[2]


def report() -> Report:
    found = Report("throughput", {"cpu": "abacus"}, {"repeat": 3})
    for rate in [30.0, 10.0, 2000.0]:
        found.result("small dict", "aioshm").add(messages_per_s=rate)
    return found


def test_the_table_has_units_and_the_spread(capsys: pytest.CaptureFixture[str]) -> None:
    found = report()
    found.promises.append(Promise("against the abacus (at least 5x)", 6.123, "x", 5, at_least=True))
    found.promises.append(Promise("switches (at most 5)", 6, "", 5))
    found.show()
    text = capsys.readouterr().out
    assert "cpu abacus" in text
    assert "messages, 1/s" in text
    assert "30 (10 to 2,000)" in text
    assert "ok      6.12x: against the abacus (at least 5x)" in text
    assert "MISSED  6: switches (at most 5)" in text


KINDS = [*MESSAGES, small_dict("msgpack"), plain_bytes(64), tensor(4)]


@pytest.mark.parametrize("work", KINDS, ids=lambda work: work.name)
def test_a_message_that_is_not_the_expected_one_is_noticed(work: Workload) -> None:
    [message] = work.numbered([7])
    work.check(message, 7)
    [message] = work.numbered([8])
    with pytest.raises(WrongMessageError):
        work.check(message, 7)


@pytest.mark.slow
def test_the_committed_pictures_are_those_of_the_committed_figures(tmp_path: Path) -> None:
    """A picture names machine and date of the report beside it, and has its medians."""
    assets = ROOT / "docs/assets"
    shutil.copy(assets / "throughput.json", tmp_path)
    assert pictures.main([str(tmp_path / "throughput.json")]) == 0
    drawn, committed = ((where / "throughput.svg").read_text() for where in (tmp_path, assets))
    assert _texts(drawn) == _texts(committed)
    machine = json.loads((assets / "throughput.json").read_text())["machine"]
    assert any(machine["date"] in text and machine["cpu"] in text for text in _texts(drawn))


def _texts(svg: str) -> list[str]:
    """Return the texts of a picture, which matplotlib draws as shapes and names in comments."""
    return re.findall(r"<!-- +(.+?) -->", svg)


# Promises are held against the measurements of a run, and named where something was not measured


CASE = next(case for case in CASES if case.name == "fanout-2")
RATES = {"aioshm": [700.0, 600.0, 650.0], "vLLM": [100.0, 100.0, 100.0], "pyzmq": [700.0, 600.0, 700.0]}


def rates_of(rates: dict[str, list[float]]) -> Report:
    report = Report("defaults", {}, {})
    for name, values in rates.items():
        for value in values:
            report.result(CASE.title, name, CASE.n_reader).add(messages_per_s=value)
    return report


def test_promise_is_held_against_the_median_of_the_ratios_and_has_their_spread() -> None:
    report = rates_of(RATES)
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
    report = rates_of({name: values for name, values in RATES.items() if name != missing})
    hold(report, [CASE])
    assert len(report.promises) == 2 - unmeasured
    assert len([remark for remark in report.remarks if remark.startswith("not measured: small dict")]) == unmeasured


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: f"{promise.case}-{promise.figure}-{promise.theirs}")
def test_every_promise_has_a_case_in_which_its_contestants_take_part(promise: Bound) -> None:
    [case] = [case for case in CASES if case.name == promise.case]
    measured = {*case.contestants, *(f"{name} leased" for name in case.contestants if case.kind == "waiting")}
    assert set(promise.contestants) <= measured


# Two trees, compared in slices


def lives_of(speed: float, noise: float, lives: int = 6, rounds: int = 10) -> list[list[float]]:
    chance = random.Random(lives)
    return [[log(speed) + chance.gauss(0, noise) for _ in range(rounds)] for _ in range(lives)]


@pytest.mark.parametrize("speed", [0.9, 1.0, 1.2])
def test_the_interval_has_the_speed(speed: float) -> None:
    found, low, high = estimate(lives_of(speed, 0.02))
    assert low < found < high
    assert low < speed < high
    assert high / low < 1.03
