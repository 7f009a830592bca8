from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hiding import hiding

import aioshm
from aioshm.cli.app import run

MAIN = """
from aioshm.__main__ import main
sys.exit(main())
"""


def test_version_by_the_command():
    done = subprocess.run([sys.executable, "-m", "aioshm", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"aioshm {aioshm.__version__}\n", "")


@pytest.mark.parametrize("args", [["--help"], []])
def test_help_names_the_commands(capsys, args):
    assert run(args) == 0
    out, err = capsys.readouterr()
    assert "demo" in out
    assert "doctor" in out
    assert err == ""


def test_help_of_a_command(capsys):
    assert run(["demo", "--help"]) == 0
    out = capsys.readouterr().out
    for option in ("--input", "--readers", "--repeat", "--loop", "--json"):
        assert option in out


def test_unknown_command_is_one_line(capsys):
    assert run(["demmo"]) == 2
    err = capsys.readouterr().err
    assert "'demmo'" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_missing_extra_is_named(name):
    done = subprocess.run([sys.executable, "-c", hiding({name}) + MAIN], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"aioshm: the command line needs {name}: pip install 'aioshm[cli]'\n"


def test_other_missing_modules_are_not_blamed_on_the_extra():
    done = subprocess.run([sys.executable, "-c", hiding({"zmq"}) + MAIN], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'zmq" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "aioshm", "doctor"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "aioshm: cannot write the output: No space left on device\n"


def test_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "aioshm", "doctor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_closed_output_is_one_line():
    command = f"'{sys.executable}' -m aioshm doctor >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "aioshm: standard output is closed\n")


def test_output_without_unicode_works():
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "aioshm", "--help"], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


def test_a_command_imports_what_it_needs_alone() -> None:
    code = "import sys; from aioshm.cli.app import run; run(['who', 'nobody-of-this-name']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "aioshm.observe.suspects" in loaded
    assert not {name for name in loaded if name.startswith(("aioshm.engine", "aioshm.events", "aioshm.queue", "zmq"))}
    assert "there is no queue 'nobody-of-this-name'" in done.stderr


def test_every_command_is_in_the_help() -> None:
    done = subprocess.run([sys.executable, "-m", "aioshm", "--help"], capture_output=True, text=True, check=True)
    for name in ("demo", "doctor", "events", "export", "ls", "inspect", "top", "who", "dump"):
        assert f" {name} " in done.stdout
