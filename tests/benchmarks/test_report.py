"""What is made of the figures."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import pictures
from benchmarks.framework.report import Promise, Report, percentile
from benchmarks.framework.workload import (
    BYTES_4K,
    SHORT_BYTES,
    USUAL,
    Workload,
    WrongMessageError,
    plain_bytes,
    small_dict,
    tensor,
)


def report() -> Report:
    found = Report("throughput", {"cpu": "abacus"}, {"repeat": 3})
    for rate in [30.0, 10.0, 2000.0]:
        found.result("small dict", "aioshm").add(messages_per_s=rate)
    return found


def test_a_result_is_the_median_of_its_repetitions() -> None:
    result = report().find("small dict", "aioshm")
    assert result is not None
    assert result.median("messages_per_s") == 30
    assert result.worst("messages_per_s") == 2000
    assert report().find("small dict", "aioshm", n_reader=2) is None


def test_json_has_every_repetition() -> None:
    (result,) = json.loads(report().to_json())["results"]
    assert result["figures"]["messages_per_s"] == {
        "median": 30,
        "min": 10,
        "max": 2000,
        "repetitions": [30, 10, 2000],
    }


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


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (50, 51), (99, 100), (100, 100)])
def test_percentile(percent: float, value: float) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == value


KINDS = [*USUAL, SHORT_BYTES, BYTES_4K, small_dict("msgpack"), plain_bytes(64), tensor(4)]


@pytest.mark.parametrize("work", KINDS, ids=lambda work: work.name)
def test_a_message_that_is_not_the_expected_one_is_noticed(work: Workload) -> None:
    [message] = work.numbered([7])
    work.check(message, 7)
    [message] = work.numbered([8])
    with pytest.raises(WrongMessageError):
        work.check(message, 7)


@pytest.mark.parametrize("work", KINDS, ids=lambda work: work.name)
def test_a_message_that_is_cut_off_is_noticed(work: Workload) -> None:
    [message] = work.numbered([7])
    if work.body is None:
        message = message[:-1]
    else:
        message[work.body] = message[work.body][:-1]
    with pytest.raises(WrongMessageError):
        work.check(message, 7)


def test_a_ratio_and_a_promise_need_both_contestants() -> None:
    found = report()
    assert found.ratio("small dict", "aioshm", "the abacus", "messages_per_s") is None
    assert not found.hold("against the abacus", None, "x", 5, at_least=True)
    for rate in [10.0, 10.0, 100.0]:
        found.result("small dict", "the abacus").add(messages_per_s=rate)
    ratio = found.ratio("small dict", "aioshm", "the abacus", "messages_per_s")
    assert ratio == 3
    assert found.ratio("small dict", "aioshm", "the abacus", "messages_per_s", of_repetitions=True) == 3
    assert found.hold("against the abacus", ratio, "x", 5, at_least=True)
    assert [(promise.text, promise.kept) for promise in found.promises] == [("against the abacus (at least 5x)", False)]


def test_cases_with_other_figures_have_a_table_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = report()
    found.result("64 B", "aioshm").add(p50_us=1.0)
    found.show()
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[-1] for row in rows if row.startswith(("small dict", "64 B"))] == ["2,000)", "1"]


@pytest.mark.slow
def test_the_committed_pictures_are_those_of_the_committed_figures(tmp_path: Path) -> None:
    """A picture names machine and date of the report beside it, and has its medians."""
    assets = Path(__file__).parents[2] / "docs/assets"
    for name in ("throughput", "latency"):
        shutil.copy(assets / f"{name}.json", tmp_path)
        assert pictures.main([str(tmp_path / f"{name}.json")]) == 0
        drawn, committed = ((where / f"{name}.svg").read_text() for where in (tmp_path, assets))
        assert _texts(drawn) == _texts(committed)
        machine = json.loads((assets / f"{name}.json").read_text())["machine"]
        assert any(machine["date"] in text and machine["cpu"] in text for text in _texts(drawn))


def _texts(svg: str) -> list[str]:
    """Return the texts of a picture, which matplotlib draws as shapes and names in comments."""
    return re.findall(r"<!-- +(.+?) -->", svg)
