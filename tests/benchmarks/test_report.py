"""What is made of the figures."""

from __future__ import annotations

import json

import pytest

from benchmarks.harness import percentile
from benchmarks.payloads import PAYLOADS, SHORT_BYTES, WrongMessageError
from benchmarks.report import Promise, Report


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


@pytest.mark.parametrize("payload", [*PAYLOADS, SHORT_BYTES], ids=lambda payload: payload.name)
def test_a_message_that_is_not_the_expected_one_is_noticed(payload) -> None:  # type: ignore[no-untyped-def]
    payload.check(payload.message(7), 7)
    with pytest.raises(WrongMessageError):
        payload.check(payload.message(8), 7)
