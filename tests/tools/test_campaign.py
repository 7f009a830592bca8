"""The campaign: that its checks see what is wrong in journals, and a minute of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tools.campaign import verdict
from tools.campaign.stage import Journal

ROOT = Path(__file__).parents[2]
EPOCH = 4711

Note = tuple[object, ...]
WRITER: list[Note] = [
    ("epoch", EPOCH),
    ("joined", 0, 2, 0),
    ("sent", 10),
    ("died", 0, 2, 10, False),
    ("joined", 0, 3, 10),
    ("sent", 20),
    ("closing", 20),
]
FIRST: list[Note] = [("got", EPOCH, 0, 4), ("got", EPOCH, 4, 6)]
SECOND: list[Note] = [("got", EPOCH, 10, 10), ("end", "closed")]


def judge(directory: Path, **journals: list[Note]) -> dict[str, list[str]]:
    """Return what is wrong with these journals; each is named by its actor and its process id."""
    for name, notes in journals.items():
        actor, pid = name.rsplit("_", 1)
        journal = Journal(directory / f"{actor.replace('_', '.')}.1.{pid}")
        for note in (("begins", "1", False, 0), *notes):
            journal.note(*note)  # type: ignore[arg-type]
    found = verdict.judge(directory, set()).wrong
    return {word: texts for word, texts in found.items() if texts}


def queue(directory: Path, first: list[Note], second: list[Note]) -> set[str]:
    """Return which words there are for a queue with two readers one after the other."""
    journals = {"comers_reader_0_2": first, "comers_reader_0_3": second, "comers_writer_1": WRITER}
    return set(judge(directory, **journals))


def test_a_queue_in_order(tmp_path: Path) -> None:
    assert queue(tmp_path, FIRST, SECOND) == set()


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        ([("got", EPOCH, 0, 4), ("got", EPOCH, 5, 5)], SECOND, "lost"),
        (FIRST, [("got", EPOCH, 12, 8)], "lost"),
        (FIRST, [("got", EPOCH, 10, 9), ("end", "closed")], "lost"),
        (FIRST, [("got", EPOCH, 10, 3), ("end", "PeerDied")], "lost"),
        ([*FIRST, ("got", EPOCH, 3, 1)], SECOND, "doubled"),
        ([("got", EPOCH, 0, 12)], SECOND, "doubled"),  # the writer has it that it died at 10
        ([("got", EPOCH, 0, 4), ("got", EPOCH, 5, 1), ("got", EPOCH, 4, 1)], SECOND, "reordered"),
        (FIRST, [("got", EPOCH, 10, 30)], "wrong"),
        (FIRST, [("got", 1, 10, 3)], "wrong"),
        (FIRST, [("wrong", "another content")], "wrong"),
    ],
)
def test_what_a_reader_must_not_see(tmp_path: Path, first: list[Note], second: list[Note], word: str) -> None:
    assert word in queue(tmp_path, first, second)


def test_a_place_that_is_held_goes_on_where_it_was(tmp_path: Path) -> None:
    def wrong(name: str, first: int) -> set[str]:
        writer = [("epoch", EPOCH), ("died", 1, 2, 5, True), ("joined", 1, 3, first), ("sent", 9)]
        directory = tmp_path / name
        directory.mkdir()
        return set(judge(directory, holders_writer_1=writer))

    assert wrong("kept", 5) == set()
    assert wrong("skipped", 6) == {"lost"}


@pytest.mark.parametrize(
    ("notes", "words"),
    [
        ([("batch", 0, EPOCH), ("lost", 1, 3, "why"), ("batch", 4, EPOCH), ("again", 5), ("batch", 0, 2)], set()),
        ([("batch", 0, EPOCH), ("batch", 2, EPOCH)], {"lost"}),
        ([("batch", 0, EPOCH), ("batch", 0, EPOCH)], {"doubled"}),
        ([("batch", 0, EPOCH), ("again", 1), ("batch", 0, EPOCH)], {"doubled"}),
        ([("batch", 0, EPOCH), ("batch", 1, 2)], {"wrong"}),
        ([("batch", 0, EPOCH), ("again", 2)], {"wrong"}),
        ([("batch", 0, 1)], {"wrong"}),
    ],
)
def test_what_a_subscriber_is_told(tmp_path: Path, notes: list[Note], words: set[str]) -> None:
    journals = {
        "loop_publisher_1": [("epoch", EPOCH)],
        "loop_publisher_2": [("epoch", 2)],
        "loop_subscriber_0_3": notes,
    }
    assert set(judge(tmp_path, **journals)) == words


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_some_seconds_of_it(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tools.campaign", "--minutes", "0.3", "--seed", "3", "--json", str(figures)]
    with tempfile.TemporaryDirectory(prefix="aioshm-") as work:  # for sockets, as the usual one's path is too long
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"TMPDIR": work})
        assert done.returncode == 0, done.stdout + done.stderr
        assert not os.listdir(work)
    told = json.loads(figures.read_text())
    assert not any(told["wrong"].values())
    strangers = [] if told["lacks"] else ["strangers"]
    for what in ("messages received", "batches received", "requests", "killed", *strangers):
        assert told["figures"][what] > 0, f"no {what}: {told}"
