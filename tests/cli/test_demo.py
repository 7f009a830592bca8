from __future__ import annotations

import json
import os
import signal
from itertools import islice
from pathlib import Path

import pytest

from aioshm import config
from aioshm.cli import demo as script
from aioshm.cli.app import run

LONG = ("--repeat", "100")
ARRAYS = 182


@pytest.mark.slow
def test_json_has_the_measurements_of_every_reader(start_demo):
    output, errors, code = start_demo("--readers", "1", "--remote", "1", "--json").end()
    assert (errors, code) == ("", 0)
    report = json.loads(output)
    assert report["verified"]
    assert report["messages"] == script.PACED + script.LINES + ARRAYS
    assert [len(report[name]) for name in ("readers", "multiprocessing")] == [2, 2]
    for reader in (*report["readers"], *report["multiprocessing"]):
        assert reader["messages"] >= script.PACED + script.LINES + ARRAYS
        assert min(reader["lines_per_s"], reader["gb_per_s"], reader["p50_us"]) > 0


def test_piped_output_fits_80_columns_and_has_no_escapes(start_demo):
    output, errors, code = start_demo("--readers", "1", without=("numpy", "uvloop")).end()
    assert (errors, code) == ("", 0)
    lines = output.splitlines()
    assert lines[0].endswith(", asyncio")
    total = script.PACED + script.LINES + ARRAYS
    assert f"MessageQueue: every reader checked all {total:,} messages" in lines
    assert f"multiprocessing.Queue: the same with {total:,} messages" in lines
    assert any(line.startswith("lines per second") for line in lines)
    assert all(len(line) <= 80 for line in lines)
    assert "\x1b" not in output


# Ends of a run


@pytest.mark.parametrize(
    ("options", "line", "kill", "signum", "error"),
    [
        (LONG, "writer:", os.kill, signal.SIGTERM, "terminated"),
        ((), "1 writer", os.killpg, signal.SIGINT, "interrupted"),
        (("--engines", "2"), "sending", os.killpg, signal.SIGINT, "interrupted"),
    ],
    ids=["of the first process", "of the group during the start", "of engines"],
)
def test_interrupt_ends_everything(start_demo, options, line, kill, signum, error):
    demo = start_demo(*options)
    demo.wait_for_line(line)
    kill(demo.process.pid, signum)
    _, errors, code = demo.end()
    assert (errors, code) == (f"aioshm: {error}\n", 128 + signum)
    demo.wait_until_none_is_left()


def test_killed_reader_is_named(start_demo):
    demo = start_demo(*LONG)
    demo.wait_for_line("writer:")
    victim = demo.workers[-1]
    victim.kill()
    _, errors, code = demo.end()
    assert (errors, code) == (f"aioshm: reader_1 (pid {victim.pid}) was killed by SIGKILL\n", 1)
    demo.wait_until_none_is_left()


def test_stopped_reader_is_named_while_the_demo_waits(start_demo, monkeypatch):
    monkeypatch.setenv("AIOSHM_STALL_WARNING_S", "1")
    demo = start_demo(*LONG)
    demo.wait_for_line("writer:")
    victim = demo.workers[-1]
    victim.suspend()
    assert any(f"reader_1 (pid {victim.pid}) is stopped" in line for line in demo.process.stderr)
    os.kill(demo.process.pid, signal.SIGTERM)
    victim.resume()
    demo.end()
    demo.wait_until_none_is_left()


def test_killing_the_first_process_ends_all(start_demo):
    directory = Path(config.default_runtime_dir())
    before = set(directory.glob("*"))
    demo = start_demo(*LONG)
    demo.wait_for_line("writer:")
    demo.process.kill()
    demo.wait_until_none_is_left()
    _, errors, _ = demo.end()
    assert errors == ""
    assert set(directory.glob("*")) <= before


# Engines


def test_piped_output_of_engines_fits_80_columns(start_demo):
    output, errors, code = start_demo("--engines", "2").end()
    assert (errors, code) == ("", 0)
    lines = output.splitlines()
    assert "2 of 2 engines connected, 2 ready" in lines
    assert any(line.endswith(") was killed by SIGKILL") for line in lines)
    assert lines[-1].startswith("engine 1 answers again after ")
    assert lines[-1].endswith("; requests that continued: 1")
    assert all(len(line) <= 80 for line in lines)


# Arguments


@pytest.mark.parametrize(
    ("args", "env", "complaint"),
    [
        (["--readers", "0"], {}, "aioshm: --readers must be at least 1"),
        (["--readers", "-1"], {}, "'--readers'"),
        (["--remote", "65"], {}, "'--remote'"),
        (["--bogus"], {}, "--bogus"),
        ([], {"AIOSHM_WAIT": "bogus"}, "bogus"),
        ([], {"AIOSHM_RUNTIME_DIR": __file__, "AIOSHM_LIFELINE": "directory"}, __file__),
    ],
)
def test_bad_arguments_and_an_unusable_environment_are_one_line(capsys, monkeypatch, args, env, complaint):
    for variable, value in {"COLUMNS": "200", **env}.items():
        monkeypatch.setenv(variable, value)
    assert run(["demo", *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("aioshm: ")
    assert complaint in err
    assert err.count("\n") == 1


# Messages


@pytest.mark.parametrize("wrong", ["one bit", "an earlier message", "a later message"])
def test_wrong_message_fails_the_check(wrong):
    first, second, third = islice(script.messages(1), 3)
    reader = script.Reader(0)
    reader.check((*first[:2], 0, *first[2:]))
    messages = {"one bit": second, "an earlier message": first, "a later message": third}
    phase, number, checksum, content = messages[wrong]
    if wrong == "one bit":
        content = bytes([content[0] ^ 1]) + content[1:]
    with pytest.raises(ValueError, match="message 1 "):
        reader.check((phase, number, 0, checksum, content))
