"""``aioshm events``: each command against a live publisher."""

from __future__ import annotations

import io
import json
import math
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import eventually

from aioshm.cli.app import run
from aioshm.cli.events import lines_of
from aioshm.errors import CodecError
from aioshm.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEventBatch,
    Lost,
    PublisherGone,
    Received,
    Restarted,
    Source,
    ThreadedEventPublisher,
    UnknownEvent,
)
from aioshm.events.recording import MAGIC, Record, read_records, write_record

from .helpers import ANY

ROOT = Path(__file__).parents[2]


def invoke(*arguments: str) -> Any:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = run(["events", *arguments])
    texts = {"stdout": out.getvalue(), "stderr": err.getvalue(), "output": out.getvalue() + err.getvalue()}
    return SimpleNamespace(exit_code=code, **texts)


@pytest.fixture
def publisher() -> Iterator[ThreadedEventPublisher]:
    with ThreadedEventPublisher(1, ANY, ANY, bind=True) as made:
        for n in range(3):
            stored = BlockStored([n, b"\x01"], None, [7], 1, None, "GPU", extra_keys=[(b"k", 1)])
            later = UnknownEvent("Later", {"type": "Later", "x": b"\x02"})
            made.publish(EventBatch(float(n), [stored, BlockRemoved([n], "GPU"), AllBlocksCleared(), later]))
        made.flush(10)
        yield made


def where(publisher: ThreadedEventPublisher) -> list[str]:
    return [publisher.endpoint, "--replay", str(publisher.replay_endpoint), "--from-start", "--duration", "20"]


def test_tail_filters_and_speaks_json(publisher: ThreadedEventPublisher) -> None:
    result = invoke("tail", *where(publisher), "--count", "3", "--json", "--type", "BlockStored", "--type", "Later")
    found = [json.loads(line) for line in result.output.splitlines()]
    assert [(one["seq"], one["type"]) for one in found] == [(n, t) for n in range(3) for t in ("BlockStored", "Later")]
    assert found[0]["block_hashes"] == [0, "01"]
    assert found[0]["rank"] == 1
    assert found[0]["replayed"] is True
    nobody = invoke("tail", publisher.endpoint, "--rank", "7", "--duration", "0.05")
    assert (nobody.exit_code, nobody.output) == (0, "")
    lines = invoke("tail", *where(publisher), "--count", "3").output.splitlines()
    assert len(lines) == 12
    assert "rank 1 #0 BlockStored block_hashes=[0, '01']" in lines[0]


def test_tail_without_publisher_reports_that(
    publisher: ThreadedEventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioshm.cli.events._PATIENCE_S", 0.5)
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # and does not listen
        nowhere = f"tcp://127.0.0.1:{unheard.getsockname()[1]}"
        result = invoke("tail", nowhere, publisher.endpoint, "--duration", "0.8")
        assert result.exit_code == 0, result.output
        assert result.stderr == f"{nowhere}: no publisher is connected yet; waiting for one\n"
        assert result.stdout == ""
        result = invoke("tail", nowhere, "--duration", "0.8", "--json")
        [line] = result.stdout.splitlines()
        assert json.loads(line)["type"] == "nobody"
        assert json.loads(line)["endpoint"] == nowhere
        assert result.stderr == ""


def test_tail_ends_quietly_when_nobody_reads_its_output() -> None:
    command = [sys.executable, "-m", "aioshm", "events", "tail", "tcp://127.0.0.1:1", "--json", "--duration", "20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 1


SOURCE = Source("tcp://h:1", b"pod", 2)


def test_line_of_a_strangers_batch_is_valid_json_and_cannot_control_a_terminal() -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    strange = UnknownEvent("A\nB", {"x": [math.inf, 1.5], "y": deep}, "\x1b[2J")
    item = Received(Source("tcp://h:1", b"t\x1b[2J", 0), 3, KVEventBatch(math.nan, [strange]), b"", False)
    (line,) = lines_of(item, set(), as_json=True)
    found = json.loads(line, parse_constant=pytest.fail)
    assert (found["ts"], found["data"]["x"], "..." in line) == (None, [None, 1.5], True)
    (line,) = lines_of(item, set(), as_json=False)
    assert line.isprintable()
    assert r"topic t\x1b[2J rank 0 #3 A\nB" in line


@pytest.mark.parametrize(
    ("item", "kind", "fields"),
    [
        (Lost(SOURCE, 3, 7, "silence"), "lost", {"first": 3, "last": 7, "reason": "silence"}),
        (Restarted(SOURCE, 7), "restarted", {"expected": 7, "reason": "its numbers went back"}),
        (PublisherGone(SOURCE, 7, 60.02), "gone", {"expected": 7, "after_s": 60.02}),
    ],
)
def test_line_of_a_loss_or_an_end_names_the_publisher(item: Any, kind: str, fields: dict[str, Any]) -> None:
    text = " ".join(f"{name}={value}" for name, value in fields.items())
    assert lines_of(item, set(), as_json=False) == [f"tcp://h:1 topic pod rank 2: {kind} {text}"]
    (line,) = lines_of(item, set(), as_json=True)
    assert json.loads(line) == {"endpoint": "tcp://h:1", "rank": 2, "type": kind, **fields}


def replayed(file: Path, tmp_path: Path, count: int) -> list[bytes]:
    """Replay a recording of so many batches, record that, and return the payloads."""
    live, replay, again = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replayed", tmp_path / "again.rec"
    sending = ["--endpoint", live, "--replay", replay, "--speed", "0", "--wait", "0", "--hold", "60"]
    player = subprocess.Popen([sys.executable, "-m", "aioshm", "events", "replay", str(file), *sending], cwd=ROOT)
    try:
        options = ["--from-start", "--duration", "20", "--count", str(count)]
        result = invoke("record", live, "--replay", replay, *options, "-o", str(again))
        assert result.exit_code == 0, result.output
    finally:
        player.kill()
        player.wait()
    with again.open("rb") as second:
        return [one.payload for one in read_records(second)]


def test_recording_is_replayed_with_the_same_payloads(publisher: ThreadedEventPublisher, tmp_path: Path) -> None:
    file = tmp_path / "events.rec"
    assert "3 batches recorded" in invoke("record", *where(publisher), "--count", "3", "-o", str(file)).output
    result = invoke("record", *where(publisher), "--count", "3", "-o", str(file), "--json")
    assert json.loads(result.output) == {"recorded": 3, "file": str(file), "gaps": 0}
    with file.open("rb") as first:
        assert [one.payload for one in read_records(first)] == replayed(file, tmp_path, 3)
    endpoint = f"ipc://{tmp_path}/x"
    result = invoke("replay", str(file), "--endpoint", endpoint, "--speed", "1000", "--wait", "0", "--json")
    began, done = map(json.loads, result.output.splitlines())
    assert began == {"endpoint": endpoint, "replay_endpoint": None, "wire": "vllm-0.24+", "encoding": "map"}
    assert done == {"published": 3}


@pytest.mark.parametrize(("wire", "form"), [("vllm-0.9", "array"), ("vllm-0.24", "map")])
def test_replay_keeps_the_encoding(tmp_path: Path, wire: Any, form: str) -> None:
    file = tmp_path / "events.rec"
    with ThreadedEventPublisher(0, ANY, ANY, bind=True, wire=wire) as publisher:
        publisher.publish(EventBatch(1.0, []))
        publisher.publish(EventBatch(2.0, [BlockRemoved([1], None)]))
        publisher.flush(10)
        invoke("record", *where(publisher), "--count", "2", "-o", str(file))
    arguments = ["replay", str(file), "--endpoint", f"ipc://{tmp_path}/x", "--speed", "0", "--wait", "0"]
    assert f"publishing {form}s" in invoke(*arguments).output
    assert "publishing maps" in invoke(*arguments, "--wire", "vllm-0.24+").output
    assert "publishing arrays" in invoke(*arguments, "--wire", "vllm-0.9").output
    wrong = invoke(*arguments, "--wire", "vllm-1")
    assert (wrong.exit_code, "wire must be one of" in wrong.output) == (2, True)


def test_recording_with_wrong_arguments_leaves_an_older_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    file.write_bytes(MAGIC)
    result = invoke("record", "nonsense", "-o", str(file))
    assert result.exit_code != 0
    assert "nonsense" in result.stderr
    assert file.read_bytes() == MAGIC


def recorded(file: Path) -> list[int]:
    with suppress(CodecError, FileNotFoundError), file.open("rb") as found:
        return [one.seq for one in read_records(found)]
    return []


def test_interrupted_recording_is_readable(publisher: ThreadedEventPublisher, tmp_path: Path) -> None:
    file = tmp_path / "events.rec"
    recording = subprocess.Popen(
        [sys.executable, "-m", "aioshm", "events", "record", *where(publisher)[:-2], "-o", str(file)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: len(recorded(file)) == 3, "three batches are recorded", 20)
        recording.send_signal(signal.SIGTERM)
        assert recording.communicate(timeout=20)[0] == f"3 batches recorded in {file}, 0 gaps\n"
        assert recording.returncode == 128 + signal.SIGTERM
    finally:
        recording.kill()
        recording.wait()
    assert recorded(file) == [0, 1, 2]


def stats(publisher: ThreadedEventPublisher, word: str, *options: str) -> str:
    """Return the output of half a second, or of a longer time until a word is in the output."""
    for duration_s in ("0.5", "5", "20"):
        output: str = invoke("stats", *where(publisher)[:-1], duration_s, "--interval", "0.2", *options).output
        if word in output:
            break
    return output


def test_stats(publisher: ThreadedEventPublisher) -> None:
    last = json.loads(stats(publisher, '"batches": 3', "--json").splitlines()[-1])
    (line,) = last["publishers"].values()
    assert line["batches"] == 3
    assert line["types"] == {"BlockStored": 3, "BlockRemoved": 3, "AllBlocksCleared": 3, "Later": 3}
    assert last["subscriber"]["delivered"] == 3
    text = stats(publisher, "batches_per_s")
    assert "batches_per_s" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "arguments", [["tail", "nowhere"], ["replay", "/dev/null"], ["replay", "/no/file"], ["record", "x", "-o", "/no/f"]]
)
def test_usage_error_is_one_line(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@given(st.binary(max_size=60), st.integers(0, 80))
def test_damaged_recordings_are_refused(tmp_path_factory: Any, junk: bytes, cut: int) -> None:
    file = tmp_path_factory.mktemp("rec") / "f"
    with file.open("wb") as out:
        out.write(MAGIC)
        write_record(out, Record(1.0, "tcp://x:1", b"", 3, b"payload"))
    whole = file.read_bytes()
    for data in (MAGIC + junk, whole[:cut], whole + junk, junk):
        file.write_bytes(data)
        with file.open("rb") as damaged:
            try:
                for one in read_records(damaged):
                    assert isinstance(one, Record)
            except CodecError:
                continue
