"""The demo of a front end and its engines."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from aioshm.cli.app import run
from aioshm.cli.demo.engines import FrontEnd
from aioshm.cli.demo.engines_display import shown_engines
from aioshm.engine import CoreEngineState, StartupProgress, Waiting

LICENCE = Path(__file__).parents[2] / "LICENSE"


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize(("options", "loop"), [((), "uvloop"), (("--loop", "asyncio"), "asyncio")])
def test_json_tells_everything(start_demo, options, loop):
    output, errors, code = start_demo("--engines", "2", "--json", *options, without=("torch", "numpy")).end()
    assert (errors, code) == ("", 0)
    report = json.loads(output)
    lines = [line.split() for line in LICENCE.read_bytes().splitlines() if line.split()]
    assert report["verified"] is True
    assert (report["requests"], report["words"]) == (16, sum(map(len, lines[:16])))
    assert report["machine"]["loop"] == loop
    assert report["input"]["path"] == str(LICENCE)
    first, second = report["engines"]
    assert (first["engine"], second["engine"]) == (0, 1)
    assert (first["requests"], second["requests"]) == (8, 9)  # and the one after it was back
    assert first["words"] + second["words"] == report["words"] + len(lines[0])
    assert first["ready_s"] > 0
    killed = report["killed"]
    assert (killed["engine"], killed["requests"], killed["went_on"]) == (1, 2, 2)
    assert killed["error"] == f"engine 1 (pid {killed['pid']}) was killed by SIGKILL"
    assert second["pid"] == killed["new_pid"] != killed["pid"]
    assert killed["back_s"] > killed["noticed_ms"] / 1e3
    assert 0 < killed["noticed_ms"] < 2000


def test_plain_output(start_demo, tmp_path):
    text = tmp_path / os.fsdecode(b"not [UTF-8] \xff")
    text.write_bytes(b"\n[red]one\xff two\n\nthree")
    output, errors, code = start_demo("--engines", "3", "--input", str(text), without=("torch", "numpy")).end()
    assert (errors, code) == ("", 0)
    lines = output.splitlines()
    assert lines[0].startswith("aioshm ")
    assert "3 engines on " in lines[0]
    assert "3 of 3 engines connected, 3 ready" in lines
    assert {line.partition(": ")[2] for line in lines if line.startswith("engine 1: ")} <= {
        "[red]one\ufffd two",
        "three",
    }
    assert "engine 2 is killed now, with more requests in flight" in lines
    assert any(line.startswith("engine 2 (pid ") and line.endswith(") was killed by SIGKILL") for line in lines)
    assert any("was killed by SIGKILL; the others go on" in line for line in lines)
    assert any(line.startswith("engine 2 is back after ") for line in lines)
    assert "its 2 requests in flight were told so" in output
    assert "4 requests of the other engines went on" in output
    assert lines[-1].startswith("24 requests, all 36 words as they must be; ")
    assert "\x1b" not in output


@pytest.fixture
def long_text(tmp_path):
    """Return options that keep the engines busy for a long time."""
    text = tmp_path / "long"
    text.write_bytes(b"begun\n" + b"word " * 5000)
    return "--engines", "2", "--input", str(text)


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_an_interrupt_ends_everything(start_demo, long_text, signum, code):
    demo = start_demo(*long_text)
    demo.wait_for_line("2 of 2 engines connected, 2 ready")
    assert len(demo.workers) == 2
    demo.process.send_signal(signum)
    _, errors, returned = demo.end()
    assert (errors, returned) == ("aioshm: interrupted\n" if signum == signal.SIGINT else "aioshm: terminated\n", code)
    demo.wait_until_none_is_left()


def test_an_engine_that_somebody_else_kills_is_named(start_demo, long_text):
    demo = start_demo(*long_text)
    demo.wait_for_line("engine ")  # a line is told: there was nothing before that could say who has ended, and how
    victims = demo.workers
    for victim in victims:  # one of them has a request that takes long
        victim.kill()
    _, errors, code = demo.end()
    assert code == 1
    assert errors.startswith("aioshm: engine ")
    assert any(f"(pid {victim.pid}) was killed by SIGKILL" in errors for victim in victims)
    demo.wait_until_none_is_left()


def test_killing_the_front_end_ends_all(start_demo, long_text):
    demo = start_demo(*long_text)
    demo.wait_for_line("engine ")
    demo.process.kill()
    demo.wait_until_none_is_left()


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--engines", "0"], "--engines must be at least 1, not 0"),
        (["--engines", "17"], "--engines must be at most 16, not 17"),
        (["--engines", "2", "--readers", "2"], "--engines does not go with --readers"),
        (["--engines", "2", "--repeat", "2"], "--engines does not go with --repeat"),
        (["--engines", "2", "--input", "/nowhere/at/all"], "cannot be read"),
    ],
)
def test_bad_arguments_are_one_line(capsys, args, complaint):
    assert run(["demo", *args]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert complaint in err


def test_the_table_shows_every_engine():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, force_interactive=True, width=120, _environ={})
    front_end = FrontEnd(b"text", [b"line"], 2, "asyncio")
    with shown_engines(console, front_end):
        waiting = (Waiting(0, CoreEngineState.NEW, 0, 7), Waiting(1, CoreEngineState.CONNECTED, 0, 8))
        front_end.progressed(StartupProgress(2, 1, 0, waiting, moved=1))
        assert front_end.states == ["starting", "connected"]
        front_end.progressed(StartupProgress(2, 2, 1, waiting[:1], moved=1))
        front_end.progressed(StartupProgress(2, 2, 2, (), moved=0))
        assert front_end.states == ["ready", "ready"]
        front_end.heard(0, b"hello")
        front_end.heard(0, b"wor\x1bld")
        front_end.states[1], front_end.latest[1] = "killed", "EngineCore_1 is gone"
    last_refresh = screen.getvalue().rpartition("state")[2]
    for part in ("hello wor?ld", "ready", "killed", "EngineCore_1 is gone", "7", "8"):
        assert part in last_refresh
