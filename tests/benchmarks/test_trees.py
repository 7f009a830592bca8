"""The comparison of two trees tells what got slower from what only varied."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import trees
from benchmarks.framework.harness import Settings, main
from benchmarks.framework.report import Report
from benchmarks.trees import Tree, note

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


@pytest.mark.parametrize(("within", "kept"), [(3, False), (5, True)])
def test_how_much_slower_is_too_slow_can_be_said(within: float, kept: bool) -> None:
    report = Report("trees", {}, {})
    note(report, "latency", [({RATE: 100.0}, {RATE: 96.0})] * 3, within)
    assert report.promises[0].kept is kept
    assert f"slower by more than {within}%" in str(report.promises[0])


def test_a_control_shows_what_a_tree_varies_by_that_did_not_change() -> None:
    report = Report("trees", {}, {})
    note(report, "latency", [({TIME: 10.0}, {TIME: 20.0}, {TIME: again}) for again in (8.0, 10.0, 12.5)])
    assert report.results[0].figures["control"] == pytest.approx([1.25, 1, 0.8])
    assert report.results[0].figures["speed"] == pytest.approx([0.5] * 3)
    assert report.remarks == ["SLOWER: latency: 64 B, p50_us, aioshm: 0.50x (control: 0.80x to 1.25x)"]
    assert not report.promises[0].kept


def test_a_control_that_is_slow_is_not_flagged() -> None:
    report = Report("trees", {}, {})
    note(report, "latency", [({TIME: 10.0}, {TIME: 10.0}, {TIME: 20.0})])
    assert report.promises[0].kept


def test_the_order_of_a_turn_and_what_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []

    async def measure(tree: Tree, benchmark: str, settings: Settings) -> dict[trees.Key, float]:
        ran.append(tree.path.name)
        return {RATE: 96.0 if tree.path.name == "after" else 100.0}

    async def imports(tree: Tree, *command: str) -> tuple[int, bytes, bytes]:
        return 0, b"", b""

    monkeypatch.setattr(Tree, "measure", measure)
    monkeypatch.setattr(Tree, "run", imports)
    for name in ("before", "after"):
        (tmp_path / name / ".venv/bin").mkdir(parents=True)
        (tmp_path / name / ".venv/bin/python").touch()
        (tmp_path / name / "aioshm").mkdir()
    arguments = [str(tmp_path / "before"), str(tmp_path / "after"), "--only", "latency", "--repeat", "2", "--check"]
    monkeypatch.setattr(sys, "argv", ["trees", *arguments, "--control", "--within", "3"])
    code = main("trees", "", trees.run, repeat=7, seconds=0.2, more=trees._add_options)
    assert ran == ["before", "after", "before"] * 2
    assert code == 1, "4% are more than 3%"
    monkeypatch.setattr(sys, "argv", ["trees", *arguments])
    assert main("trees", "", trees.run, repeat=7, seconds=0.2, more=trees._add_options) == 0, "and less than 5%"
    assert ran[6:] == ["after", "before", "before", "after"]
