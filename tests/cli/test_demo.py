from __future__ import annotations

import json
import os
import pty
import signal
import time
from pathlib import Path

import pytest
from support import slowdown

from aioshm import config
from aioshm.cli import demo as script
from aioshm.cli.app import run

LONG = ("--repeat", "2000")
ARRAYS = 182


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / os.fsdecode(b"not [UTF-8] \xff")
    path.write_bytes(b"\n\xff\n\nthe last, without an end")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_json_has_the_measurements_of_every_reader(start_demo, text, loop):
    options = ("--input", str(text), "--repeat", "50", "--loop", loop, "--remote", "1", "--json")
    output, errors, code = start_demo(*options).end()
    assert (errors, code) == ("", 0)
    report = json.loads(output)
    assert (report["verified"], report["loop"], report["lines"]) == (True, loop, 4)
    assert report["input"].endswith("not [UTF-8] \ufffd")
    assert report["messages"] == script.PACED + 200 + ARRAYS
    assert [reader["remote"] for reader in report["readers"]] == [False, False, True]
    assert len(report["multiprocessing"]) == 3
    for reader in (*report["readers"], *report["multiprocessing"]):
        assert reader["messages"] == report["messages"]
        assert reader["lines_per_s"] > 0
        assert reader["arrays_gb_per_s"] > 0
        assert 0 < reader["p50_us"] <= reader["p99_us"]


def test_piped_output_fits_80_columns_and_has_no_escapes(start_demo, text):
    options = ("--input", str(text), "--readers", "1", "--repeat", "3", "--loop", "asyncio")
    output, errors, code = start_demo(*options, without=("numpy",)).end()
    assert (errors, code) == ("", 0)
    total = script.PACED + 12 + ARRAYS
    lines = output.splitlines()
    assert "asyncio" in lines[0]
    assert lines[1].endswith("not [UTF-8] \ufffd")
    assert f"MessageQueue: every reader checked all {total} messages" in lines
    assert f"multiprocessing.Queue: the same with {total} messages" in lines
    assert any(line.startswith("lines per second") for line in lines)
    assert all(len(line) <= 80 for line in lines if str(text.parent) not in line)
    assert "\x1b" not in output


@pytest.mark.slow
def test_there_may_be_remote_readers_only(start_demo):
    output, errors, code = start_demo("--readers", "0", "--remote", "1", "--repeat", "2").end()
    assert (errors, code) == ("", 0)
    assert "1 writer, 0 readers, 1 over TCP (encrypted)" in output


def test_terminal_shows_progress_of_a_long_run(start_demo):
    ours, theirs = pty.openpty()
    demo = start_demo(*LONG, stdout=theirs)
    os.close(theirs)
    shown = b""
    while b"messages sent\r" not in shown:
        shown += os.read(ours, 4096)
    demo.process.send_signal(signal.SIGINT)
    assert demo.end()[1:] == ("aioshm: interrupted\n", 130)
    os.close(ours)


# What ends a run


@pytest.mark.parametrize(
    ("signum", "whole_group", "code"),
    [
        (signal.SIGINT, True, 130),
        pytest.param(signal.SIGINT, False, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, 143, marks=pytest.mark.slow),
    ],
)
def test_interrupt_ends_everything_within_a_second(start_demo, signum, whole_group, code):
    def ends_after() -> float:
        demo = start_demo(*LONG)
        demo.wait_for_line("writer:")
        assert len(demo.workers) == 2
        began = time.monotonic()
        (os.killpg if whole_group else os.kill)(demo.process.pid, signum)
        _, errors, returned = demo.end()
        took_s = time.monotonic() - began
        assert returned == code
        assert errors == f"aioshm: {'interrupted' if signum == signal.SIGINT else 'terminated'}\n"
        assert not [worker for worker in demo.workers if worker.is_running()]
        return took_s

    # A second is meant where the CPUs are free: a slower try is repeated, and measured by how scarce they are.
    took_s = ends_after()
    if took_s >= 1:
        before = slowdown()
        again_s = ends_after()
        scarcity = max(before, slowdown())
        assert again_s < scarcity, (took_s, again_s, scarcity)


def test_interrupt_during_start_ends_everything(start_demo):
    demo = start_demo()
    demo.wait_for_line("1 writer")  # the readers are only starting
    os.killpg(demo.process.pid, signal.SIGINT)
    _, errors, code = demo.end()
    assert (errors, code) == ("aioshm: interrupted\n", 130)
    demo.wait_until_none_is_left()


@pytest.mark.parametrize("readers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_killed_reader_is_named(start_demo, readers):
    demo = start_demo(*LONG, "--readers", str(readers))
    demo.wait_for_line("writer:")
    victim = demo.workers[-1]
    victim.kill()
    _, errors, code = demo.end()
    name = f"reader_{readers - 1}"
    assert errors == f"aioshm: {name} (pid {victim.pid}) was killed by SIGKILL\n"
    assert code == 1
    demo.wait_until_none_is_left()


@pytest.mark.slow
def test_killed_reader_of_the_yardstick_is_named(start_demo):
    demo = start_demo("--readers", "1")
    demo.wait_for_line("MessageQueue:")
    reader = demo.workers[0]
    while not (forked := reader.children()):
        time.sleep(0.01)
    forked[0].kill()
    _, errors, code = demo.end()
    assert f"reader of multiprocessing.Queue (PID: {forked[0].pid}) died with" in errors
    assert (errors.count("\n"), code) == (1, 1)
    demo.wait_until_none_is_left()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (LONG, "writer:"),
        pytest.param((), "MessageQueue:", marks=pytest.mark.slow),
        (("--engines", "2"), "sending"),
    ],
)
def test_killing_the_first_process_ends_all(start_demo, options, line):
    directory = Path(config.default_runtime_dir())
    before = set(directory.glob("*"))
    demo = start_demo(*options)
    demo.wait_for_line(line)
    demo.process.kill()
    demo.wait_until_none_is_left()
    _, errors, _ = demo.end()
    assert errors == ""
    assert set(directory.glob("*")) <= before


# Engines


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_json_of_engines_has_the_death_and_the_replacement(start_demo, tmp_path, loop):
    text = tmp_path / "text"
    text.write_bytes(b"\none\xff two\n\nthree")
    options = ("--engines", "3", "--input", str(text), "--loop", loop, "--json")
    output, errors, code = start_demo(*options).end()
    assert (errors, code) == ("", 0)
    report = json.loads(output)
    assert (report["verified"], report["loop"]) == (True, loop)
    assert (report["requests"], report["words"], report["continued"]) == (24, 36, 4)
    assert report["error"] == f"engine 2 (pid {report['killed']}) was killed by SIGKILL"
    assert report["new_pid"] != report["killed"]
    assert 0 < report["noticed_ms"] < report["back_s"] * 1e3


def test_piped_output_of_engines_fits_80_columns(start_demo):
    output, errors, code = start_demo("--engines", "2").end()
    assert (errors, code) == ("", 0)
    lines = output.splitlines()
    assert "2 of 2 engines connected, 2 ready" in lines
    assert any(line.endswith(") was killed by SIGKILL") for line in lines)
    assert "2 requests of other engines continued" in lines
    assert lines[-1].startswith("engine 1 came back after ")
    assert all(len(line) <= 80 for line in lines[:1] + lines[2:])


def test_engine_that_somebody_else_kills_is_named(start_demo, tmp_path):
    text = tmp_path / "long"
    text.write_bytes(b"word " * 5000)
    demo = start_demo("--engines", "2", "--input", str(text))
    demo.wait_for_line("sending")
    for victim in demo.workers:
        victim.kill()
    _, errors, code = demo.end()
    assert code == 1
    assert errors.startswith("aioshm: engine ")
    assert any(f"(pid {victim.pid}) was killed by SIGKILL" in errors for victim in demo.workers)
    demo.wait_until_none_is_left()


def test_interrupt_ends_the_engines(start_demo):
    demo = start_demo("--engines", "2")
    demo.wait_for_line("sending")
    demo.process.send_signal(signal.SIGINT)
    _, errors, code = demo.end()
    assert (errors, code) == ("aioshm: interrupted\n", 130)
    demo.wait_until_none_is_left()


# Arguments


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--readers", "0"], "--readers must be at least 1 without --remote"),
        (["--readers", "-1"], "'--readers'"),
        (["--remote", "65"], "'--remote'"),
        (["--readers", "two"], "'--readers'"),
        (["--repeat", "0"], "'--repeat'"),
        (["--engines", "17"], "'--engines'"),
        (["--engines", "2", "--readers", "3"], "--engines does not go with --readers"),
        (["--loop", "trio"], "'trio' is not one of"),
        (["--bogus"], "--bogus"),
        (["--input", "/nowhere/at/all"], "--input /nowhere/at/all is not a readable file"),
        (["--input", "/"], "--input / is not a readable file"),
        (["--input", "/dev/null"], "--input /dev/null is not a readable file"),
        (["--input", "zero\0byte"], "embedded null"),
    ],
)
def test_bad_arguments_are_one_line(capsys, args, complaint):
    assert run(["demo", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("aioshm: ")
    assert complaint in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [("AIOSHM_WAIT", "bogus"), ("AIOSHM_RUNTIME_DIR", __file__)],
)
def test_unusable_environment_is_one_line(capsys, monkeypatch, variable, value):
    monkeypatch.setenv("AIOSHM_LIFELINE", "directory")
    monkeypatch.setenv(variable, value)
    assert run(["demo"]) == 2
    err = capsys.readouterr().err
    assert value in err
    assert err.count("\n") == 1


def test_missing_uvloop_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert run(["demo", "--loop", "uvloop"]) == 2
    assert "pip install 'aioshm[uvloop]'" in capsys.readouterr().err


# Messages


def test_messages_are_numbered_and_every_one_passes_the_check():
    checker = script.Checker()
    messages = list(script.Script([b"one\n", b"", b"two"], 5).messages())
    for phase, number, checksum, content in messages:
        checker.check((phase, number, 0, checksum, content))
    assert [number for _, number, _, _ in messages] == list(range(script.PACED + 15 + ARRAYS))
    assert sorted(len(content) for phase, _, _, content in messages if phase == "arrays") == sorted(
        size for size, count in script.ARRAYS.items() for _ in range(count)
    )
    assert checker.report()["messages"] == len(messages)


@pytest.mark.parametrize("wrong", ["one bit", "an earlier message", "a later message"])
def test_wrong_message_fails_the_check(wrong):
    first, second, third = list(script.Script([b"one", b"two", b"three"], 1).messages())[:3]
    checker = script.Checker()
    checker.check((*first[:2], 0, *first[2:]))
    messages = {"one bit": second, "an earlier message": first, "a later message": third}
    phase, number, checksum, content = messages[wrong]
    if wrong == "one bit":
        content = bytes([content[0] ^ 1]) + content[1:]
    with pytest.raises(script.Mismatch, match="message 1 "):
        checker.check((phase, number, 0, checksum, content))
