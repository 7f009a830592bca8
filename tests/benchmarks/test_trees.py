"""The comparison of two trees tells what got slower from what only varied."""

from __future__ import annotations

import pytest

from benchmarks.framework.report import Report
from benchmarks.trees import note

RATE = ("small dict", "messages_per_s", "aioshm", 1)
TIME = ("64 B", "p50_us", "aioshm", 1)
RIVAL = ("64 B", "p50_us", "zmq.asyncio", 1)


def noted(turns: list[tuple[float, float]], key: tuple[str, str, str, int]) -> Report:
    report = Report("trees", {}, {})
    note(report, "latency", [({key: before}, {key: after}) for before, after in turns])
    return report


def test_what_is_slower_in_the_median_and_at_its_best_is_flagged() -> None:
    report = noted([(100, 90), (110, 90), (90, 80)], RATE)
    assert [promise.kept for promise in report.promises] == [False]
    assert report.remarks == ["SLOWER: latency: small dict, messages_per_s, aioshm: 0.89x"]


def test_a_time_that_grows_is_a_speed_that_falls() -> None:
    report = noted([(10, 12), (10, 12), (11, 12)], TIME)
    assert [promise.kept for promise in report.promises] == [False]
    assert report.results[0].figures["speed"] == pytest.approx([10 / 12, 10 / 12, 11 / 12])


def test_noise_and_what_a_rival_does_are_not_flagged() -> None:
    assert noted([(100, 80), (100, 80), (90, 99)], RATE).promises[0].kept  # as good as the other at its best
    assert noted([(10, 12), (10, 12)], RIVAL).promises[0].kept


def test_a_case_that_one_tree_has_not_got_is_named() -> None:
    report = Report("trees", {}, {})
    note(report, "latency", [({RATE: 1.0, TIME: 1.0}, {RATE: 1.0})])
    assert report.remarks == ["not in both trees: latency: 64 B, p50_us, aioshm"]
