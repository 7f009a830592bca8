"""What is made of the figures."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import pictures
from benchmarks.framework.report import Promise, Report
from benchmarks.framework.workload import (
    Workload,
    WrongMessageError,
    plain_bytes,
    small_dict,
    tensor,
)
from benchmarks.throughput import MESSAGES


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
    assets = Path(__file__).parents[2] / "docs/assets"
    shutil.copy(assets / "throughput.json", tmp_path)
    assert pictures.main([str(tmp_path / "throughput.json")]) == 0
    drawn, committed = ((where / "throughput.svg").read_text() for where in (tmp_path, assets))
    assert _texts(drawn) == _texts(committed)
    machine = json.loads((assets / "throughput.json").read_text())["machine"]
    assert any(machine["date"] in text and machine["cpu"] in text for text in _texts(drawn))


def _texts(svg: str) -> list[str]:
    """Return the texts of a picture, which matplotlib draws as shapes and names in comments."""
    return re.findall(r"<!-- +(.+?) -->", svg)
