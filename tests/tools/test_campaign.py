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
from tools.campaign.queues import body, content, message
from tools.campaign.stage import Journal, read

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


def queue(directory: Path, first: list[Note], second: list[Note], writer: list[Note] | None = None) -> set[str]:
    """Return which words there are for a queue with a writer, and two readers one after the other."""
    journals = {"comers_reader_0_2": first, "comers_reader_0_3": second, "comers_writer_1": writer or WRITER}
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


@pytest.mark.parametrize(("last", "words"), [(9, {"lost"}), (10, set()), (13, set())])
def test_a_writer_that_fails_closes_without_noting_all_that_it_sent(tmp_path: Path, last: int, words: set[str]) -> None:
    names = ["SharedMemoryError", "AioshmError", "OSError", "Exception", "BaseException", "object"]
    writer: list[Note] = [
        ("epoch", EPOCH),
        ("joined", 0, 3, 0),
        ("sent", 10),
        ("error", names, "[Errno 28] 0.0 MiB are needed", 28),
    ]
    reader: list[Note] = [("got", EPOCH, 0, last), ("end", "closed")]
    assert set(judge(tmp_path, comers_writer_1=writer, comers_reader_0_3=reader)) == words


@pytest.mark.parametrize(
    ("error", "limited", "words"),
    [
        (("ImportError", "x.so: cannot open shared object file: Too many open files"), set(), set()),
        (("ImportError", "x"), set(), {"nameless"}),
        (("SystemError", verdict.NO_FRAME), set(), {"nameless"}),
        (("SystemError", verdict.NO_FRAME), {1}, set()),
        (("KeyError", "'a'"), set(), {"nameless"}),
        (("MemoryError", ""), set(), set()),
    ],
)
def test_errors_that_name_no_cause(tmp_path: Path, error: tuple[str, str], limited: set[int], words: set[str]) -> None:
    Journal(tmp_path / "service.1.1").note("error", [error[0], "Exception"], error[1], None)
    assert {word for word, texts in verdict.judge(tmp_path, limited).wrong.items() if texts} == words


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


@pytest.mark.parametrize("word", ["hung", "nameless", "odd"])
def test_what_a_service_says(tmp_path: Path, word: str) -> None:
    assert set(judge(tmp_path, service_1=[("counts", {"requests": 3}), (word, "what")])) == {word}


def test_memory_that_grows(tmp_path: Path) -> None:
    class Later(Journal):
        at = 0.0

        def now(self) -> float:
            return self.at

    journal = Later(tmp_path / "service.1.1")
    for journal.at, mib in ((0.0, 10), (20.0, 40), (60.0, 100)):
        journal.note("health", mib << 10, 12)
    assert [text for texts in verdict.judge(tmp_path, set()).wrong.values() for text in texts] == [
        "service (1): 60 MiB, 0 descriptors"
    ]


def test_a_journal_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "service.1.1"
    journal = Journal(path)
    journal.note("sent", 1)
    journal.note("sent", 2)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert len(list(read(path))) == (length >= len(data) // 2)


@pytest.mark.parametrize(("limited", "words"), [(set(), {"odd"}), ({7}, set())])
def test_what_nobody_has_caught(tmp_path: Path, limited: set[int], words: set[str]) -> None:
    (tmp_path / "journals").mkdir()
    (tmp_path / "logs").mkdir()
    Journal(tmp_path / "journals" / "comers.writer.3.7").note("begins")
    (tmp_path / "logs" / "comers.writer.3").write_text("a warning\nException in callback Pump.run()\n")
    found = verdict.judge(tmp_path / "journals", limited).wrong
    assert {word for word, texts in found.items() if texts} == words


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_minute_of_it(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tools.campaign", "--minutes", "1", "--seed", "3", "--json", str(figures)]
    with tempfile.TemporaryDirectory(prefix="aioshm-") as work:  # for sockets, as the usual one's path is too long
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"TMPDIR": work})
        assert done.returncode == 0, done.stdout + done.stderr
        assert not os.listdir(work)
    told = json.loads(figures.read_text())
    assert not any(told["wrong"].values())
    strangers = [] if told["lacks"] else ["strangers"]
    for what in ("messages received", "batches received", "requests", "killed", *strangers):
        assert told["figures"][what] > 0, f"no {what}: {told}"


def test_messages_are_told_from_damaged_ones() -> None:
    for number in (0, 1, 5, 4, 17, 30, 7):
        sent = message(EPOCH, number)
        assert content(sent) == (EPOCH, number, body(number))
    kinds = {message(EPOCH, number).nbytes for number in (4, 17, 30)}
    assert len(kinds) == 3
    damaged = message(EPOCH, 17)
    damaged[-1] += 1
    assert content(damaged) == (EPOCH, 17, None)
    assert content(message(EPOCH, 17)[:-1]) == (EPOCH, 17, None)
    assert content(message(EPOCH, 17).astype("i4")) != (EPOCH, 17, body(17))
