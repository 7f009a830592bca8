from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import uvloop

import aioshm
from aioshm.cli import app
from aioshm.cli.app import run

WITHOUT = """
import sys
class Without:
    def find_spec(name, *_):
        if name == "{0}":
            raise ModuleNotFoundError("No module named {0}", name="{0}")
sys.meta_path.insert(0, Without)
from aioshm.__main__ import main
sys.exit(main())
"""


def test_version_by_the_command():
    done = subprocess.run([sys.executable, "-m", "aioshm", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"aioshm {aioshm.__version__}\n", "")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["demo", "doctor", "events", "export", "ls", "inspect", "top", "who", "dump"]),
        (["events"], ["tail", "record", "replay", "stats"]),
        (["demo", "--help"], ["--readers", "--remote", "--repeat", "--engines", "--json"]),
    ],
    ids=str,
)
def test_help_names_commands_and_options(capsys, args, words):
    assert run(args) == 0
    out, err = capsys.readouterr()
    assert [word for word in words if f" {word} " not in out] == []
    assert err == ""


@pytest.mark.parametrize(
    ("args", "word", "command"),
    [
        (["demmo"], "'demmo'", "aioshm"),
        (["inspect"], "queue", "aioshm inspect"),
        (["events", "replay", "--sped"], "--sped", "aioshm events replay"),
    ],
)
def test_wrong_command_line_is_one_line(capsys, monkeypatch, args, word, command):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert run(args) == 2
    err = capsys.readouterr().err
    assert word in err.lower()
    assert err.endswith(f" (see {command} --help)\n")
    assert err.count("\n") == 1


def test_error_is_folded_to_the_columns(capsys, monkeypatch):
    name = "a-name-of-a-queue-that-is-longer-than-a-line"
    monkeypatch.setenv("COLUMNS", "40")
    assert run(["inspect", name]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if len(line) > 40 and " " in line.strip()] == []
    assert f"aioshm: there is no queue '{name}'; queues of this user on this host: " in " ".join(map(str.strip, lines))


def test_error_is_folded_on_a_terminal():
    master, slave = pty.openpty()
    with open(master, "rb", buffering=0) as terminal:
        command = [sys.executable, "-m", "aioshm", "inspect", "a-name-of-a-queue-that-nobody-has"]
        env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=slave, env=env)
        os.close(slave)
        lines = terminal.read(4096).decode().splitlines()
    assert done.returncode == 2
    assert lines[0] == "aioshm: there is no queue 'a-name-of-a-queue-that-nobody-has'; queues of this"
    assert lines[1].startswith("  user on this host: ")


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_missing_extra_is_named(name):
    done = subprocess.run([sys.executable, "-c", WITHOUT.format(name)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"aioshm: the command line needs {name}: pip install 'aioshm[cli]'\n"


def test_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "aioshm", "doctor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


NEEDS_FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


@pytest.mark.parametrize(
    ("command", "error"),
    [
        pytest.param("{} >/dev/full", "cannot write the output: No space left on device", marks=NEEDS_FULL),
        ("{} >&-", "standard output is closed"),
        ("AIOSHM_NATIVE=2 {}", "AIOSHM_NATIVE='2': it must be 0 or 1"),
    ],
)
def test_command_that_cannot_work_says_so_in_one_line(command, error):
    command = command.format(f"'{sys.executable}' -m aioshm doctor")
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"aioshm: {error}\n")


def test_output_without_unicode_works():
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "aioshm", "--help"], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


def test_command_imports_only_its_own_modules() -> None:
    code = "import sys; from aioshm.cli.app import run; run(['who', 'nobody-of-this-name']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "aioshm.observe.suspects" in loaded
    assert not {name for name in loaded if name.startswith(("aioshm.engine", "aioshm.events", "aioshm.queue", "zmq"))}
    assert "there is no queue 'nobody-of-this-name'" in done.stderr


# Interrupts


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def strike(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Return a function that sends a signal to this process; check the signal handlers afterwards."""
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    yield lambda: os.kill(os.getpid(), request.param)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_more_signals_do_not_interrupt_the_cleaning_up(
    make_loop: Callable[[], asyncio.AbstractEventLoop], strike: Callable[[], None]
) -> None:
    cleaned: list[str] = []

    async def work() -> None:
        try:
            strike()
            await asyncio.sleep(20)
        finally:
            for _ in range(3):
                strike()
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)
                    cleaned.append("the work")

    with pytest.raises(app.CommandFailed, match=r"interrupted|terminated"):
        app.run_interruptibly(work(), make_loop)
    assert cleaned == ["the work"] * 3


def test_error_after_a_signal_is_an_interruption(strike: Callable[[], None]) -> None:
    async def work() -> None:
        strike()
        raise BrokenPipeError("a process that the signal has reached, too, is gone")

    with pytest.raises(app.CommandFailed, match=r"interrupted|terminated"):
        app.run_interruptibly(work())
