"""``aioshm ls``, ``inspect``, ``top``, ``who`` and ``dump``."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from aioshm import MessageQueue, Options
from aioshm.cli import tables
from aioshm.cli.app import run
from aioshm.cli.inspection import KEYS, ordered
from aioshm.process import proc

NAME = "inspected"
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name the queue of each test differently: commands see the queues of all processes, also of other tests."""
    monkeypatch.setitem(globals(), "NAME", f"inspected-{os.getpid()}-{next(_numbers)}")


@asynccontextmanager
async def queue() -> AsyncIterator[None]:
    """Open a queue with one message, unread by reader 1."""
    async with MessageQueue(2, 2, codec="msgpack", name=NAME, options=Options(max_readers=5)) as writer:
        async with MessageQueue.attach(NAME, 0) as one, MessageQueue.attach(NAME, 1):
            await writer.wait_until_ready()
            await writer.enqueue("the only one")
            await one.dequeue()
            yield


Call = Callable[..., Any]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command while there is a queue; return the exit code, the output, and the errors."""
    monkeypatch.setenv("COLUMNS", "400")  # the longest command included

    def call(*args: str) -> tuple[int, str, str]:
        async def main() -> int:
            async with queue():
                return run(args)  # blocks the loop: the command reads the queue from outside

        code = asyncio.run(main())
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def own(queues: list[dict[str, Any]]) -> dict[str, Any]:
    [found] = [each for each in queues if each["header"]["name"] == NAME]
    return found


class TestLs:
    def test_table(self, call: Call) -> None:
        code, out, _ = call("ls", "--interval", "0")
        assert code == 0
        assert re.search(r"queue +readers +backlog +rate +writer +bytes/s +age +memory", out)
        assert re.search(rf"{NAME} +2 +1 +0/s +{os.getpid()} +0 B +\S+ \w+ +[\d.]+ \w?i?B", out)
        code, out, _ = call("ls", "--json", "--interval", "0")
        found = json.loads(out)
        assert (code, found["version"], found["skipped"] >= 0) == (0, 1, True)
        assert own(found["queues"])["header"]["writer"]["messages"] == 1

    def test_nothing_there(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aioshm.observe.queues.find_rings", lambda *_: ([], 3))
        assert run(["ls", "--interval", "0"]) == 0
        out = capsys.readouterr().out
        assert "no queue of this user is open on this host" in out
        assert "of other users not looked at: 3" in out


class TestInspect:
    def test_table(self, call: Call) -> None:
        code, out, _ = call("inspect", NAME, "--interval", "0")
        assert code == 0
        for part in ("msgpack", "4,096 slots of 1.0 KiB", "10 of 24.0 MiB", "0 segments", "1 messages", "open in"):
            assert part in out
        assert re.search(rf"writer +{os.getpid()} +\w+", out)
        assert re.search(rf"reader 0 +{os.getpid()} +\w+ +0 +0/s +1 +[\d.]+ \w+ +[\d.]+ \w+", out)
        assert re.search(rf"reader 1 +{os.getpid()} +\w+ +1 +0/s +0 +- +-", out)
        assert re.search(r"reader 2-4 +- +absent", out)

    def test_json(self, call: Call) -> None:
        code, out, _ = call("inspect", NAME, "--json", "--interval", "0")
        found = json.loads(out)
        assert (code, found["version"]) == (0, 1)
        one = found["queue"]
        assert set(one) == {
            "label", "codec", "header", "writer", "readers", "holders", "memory_bytes", "overflow_segments",
            "overflow_bytes", "taken_ns", "bytes_per_s",
        }  # fmt: skip
        assert (one["codec"], one["writer"]["lag"], one["header"]["slots"]) == ("msgpack", 1, 4096)
        assert one["bytes_per_s"] >= 0
        assert [each["rank"] for each in one["readers"]] == [0, 1, 2, 3, 4]
        assert sum(one["header"]["readers"][0]["latency"]["counts"]) == 1
        assert set(one["readers"][0]) >= {"rank", "pid", "state", "lag", "messages_per_s", "cpu_share"}

    @pytest.mark.parametrize("command", ["inspect", "who", "dump"])
    def test_no_such_queue(self, call: Call, command: str) -> None:
        code, out, err = call(command, "nothing")
        assert (code, out) == (2, "")
        assert "aioshm: there is no queue 'nothing'; queues of this user on this host: " in err
        assert f"{NAME} (pid {os.getpid()})" in err

    @pytest.mark.parametrize("args", [["ls"], ["inspect", "x"], ["top", "--once"], ["who"], ["dump", "x"]], ids=str)
    def test_a_system_without_proc(
        self, args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(proc, "PROC", tmp_path)
        assert run(args) == 2
        assert "aioshm: there is no /proc on this system" in capsys.readouterr().err


class TestDump:
    def test_bodies(self, call: Call) -> None:
        _, out, _ = call("dump", NAME, "--last", "3")
        assert re.search(r"0 +inline +msgpack +13 B +0 +slot +\S+ \w+ +1 *$", out, re.MULTILINE)
        assert "the only one" not in out
        _, out, _ = call("dump", NAME, "--bodies")
        assert "ac 74 68 65 20 6f" in out

    def test_json(self, call: Call) -> None:
        _, out, _ = call("dump", NAME, "--json", "--bodies")
        found = json.loads(out)
        assert (found["version"], found["queue"]) == (1, NAME)
        [message] = found["messages"]
        assert bytes.fromhex(message["preview_hex"])[1:] == b"the only one"
        assert (message["unread_by"], message["preview_text"]) == ([1], None)
        _, out, _ = call("dump", NAME, "--json")
        assert json.loads(out)["messages"][0]["preview_hex"] is None

    def test_an_empty_queue(self, capsys: pytest.CaptureFixture[str]) -> None:
        async def main() -> None:
            async with MessageQueue(0, 0, name=NAME):
                assert run(["dump", NAME]) == 0

        asyncio.run(main())
        assert f"{NAME}: no message was published yet" in capsys.readouterr().out


class TestWho:
    def test_json(self, call: Call) -> None:
        _, out, _ = call("who", NAME, "--window", "0.02")
        text = " ".join(out.split())  # the command of the tests may take several lines
        assert re.search(rf"{NAME}: reader 1, pid {os.getpid()} \(.+\): took nothing in the last", text)
        _, out, _ = call("who", "--json", "--window", "0.02")
        found = json.loads(out)
        [one] = [each for each in found["queues"] if each["queue"]["label"] == NAME]
        assert (found["version"], found["process"], one["held_up"]) == (1, None, True)
        assert (one["suspects"][0]["kind"], one["suspects"][0]["rank"]) == ("blocked", 1)

    def test_healthy_queue_is_counted_and_described_only_when_asked_for(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "200")

        async def main() -> None:
            async with MessageQueue(1, 1, name=NAME) as writer, MessageQueue.attach(NAME, 0):
                await writer.wait_until_ready()
                for args in (["who"], ["who", NAME]):
                    # In a thread: the loop waits, as that of an idle writer does.
                    assert await asyncio.to_thread(run, [*args, "--window", "0.02"]) == 0
                    said.append(capsys.readouterr().out)

        said: list[str] = []
        asyncio.run(main())
        assert NAME not in said[0]
        assert re.search(r"^healthy: (?!0)\d+ queues?, \d+ process", said[0], re.M)
        assert f"{NAME}: no end holds the queue up (0 messages/s, 0 unread; the writer has nothing" in said[1]
        assert "healthy" not in said[1]

    def test_a_process_without_a_queue(self, call: Call) -> None:
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as child:
            code, out, _ = call("who", str(child.pid))
            child.kill()
        assert code == 0
        assert f"pid {child.pid} (" in out
        assert "has no queue" in out


class TestTop:
    def test_once(self, call: Call) -> None:
        _, out, _ = call("top", "--once", "--interval", "0.05", "--sort", "rate")
        assert re.search(rf"{NAME} +reader 1 +{os.getpid()}", out)
        _, out, _ = call("top", "--once", "--json", "--interval", "0.05")
        [line] = out.splitlines()
        found = json.loads(line)
        assert found["version"] == 1
        assert own(found["queues"])["writer"]["messages_per_s"] >= 0

    def test_no_such_order(self, call: Call) -> None:
        code, _, err = call("top", "--sort", "colour")
        assert (code, "--sort must be one of name, rate" in err) == (2, True)

    async def test_orders(self) -> None:
        from aioshm.observe import Watch

        a, b = f"a-{NAME}", f"b-{NAME}"
        async with MessageQueue(0, 0, name=b) as busy, MessageQueue(0, 0, name=a):
            watch = Watch()
            watch.look()
            for _ in range(10):
                await busy.enqueue(b"x")
            both = [queue for queue in watch.look() if queue.label in (a, b)]
            assert [queue.label for queue in ordered(both, "name")] == [a, b]
            assert [queue.label for queue in ordered(both, "rate")] == [b, a]
            assert [queue.label for queue in ordered(both, "age")] == [b, a]
            for key in KEYS:
                assert len(ordered(both, key)) == 2

    @pytest.mark.slow
    def test_top_without_a_terminal_prints_until_interrupted(self) -> None:
        command = [sys.executable, "-m", "aioshm", "top", "--json", "--interval", "0.05"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as top:
            assert top.stdout is not None
            for _ in range(2):
                assert json.loads(top.stdout.readline())["version"] == 1
            top.send_signal(signal.SIGINT)
            _, errors = top.communicate()
            assert (top.returncode, errors) == (0, "")

    @pytest.mark.one_loop
    @pytest.mark.parametrize(("end", "code"), [("q", 0), (signal.SIGTERM, 143), (signal.SIGINT, 0)])
    async def test_on_a_terminal_names_are_whole(self, end: str | signal.Signals, code: int) -> None:
        is_dumb = end == signal.SIGINT
        master, slave = pty.openpty()
        command = [sys.executable, "-m", "aioshm", "top", "--interval", "1" if is_dumb else "30"]
        environment = {**os.environ, "TERM": "dumb" if is_dumb else "xterm", "COLUMNS": "12", "LINES": "2000"}
        async with queue():
            top = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
            os.close(slave)
            if not is_dumb:
                _read_until(master, "\x1b[?1049h")
                os.write(master, b"\x1b[Am")  # an arrow, which is not Esc
                _read_until(master, "sort", "memory", "quit", NAME)
            if isinstance(end, str):
                os.write(master, b"r" + end.encode())  # one read returns both keys
            else:
                _read_until(master, *[NAME, "notlookedat"] * is_dumb)
                top.send_signal(end)
            _read_until(master, *["\x1b[?1049l"] * (not is_dumb))  # the former screen is back
            assert top.wait() == code
        os.close(master)


def _read_until(fd: int, *wanted: str) -> str:
    seen = ""
    end = time.monotonic() + 30
    while not all(text in seen for text in wanted):
        assert time.monotonic() < end, seen
        if select.select([fd], [], [], 0.1)[0]:
            seen += "".join(os.read(fd, 65536).decode(errors="replace").split())  # as if no line was folded
    return seen


class TestWidth:
    """Piped output fits 80 columns, and no name is cut."""

    @pytest.fixture(autouse=True)
    def a_pipe(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("COLUMNS")

    @pytest.mark.parametrize(
        "command", ["ls", "inspect NAME", "who NAME --window 0.02", "dump NAME --bodies", "top --once"]
    )
    def test_piped_lines_fit_and_have_whole_names(
        self, command: str, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(globals(), "NAME", NAME.ljust(70, "x"))
        code, out, _ = call(*command.replace("NAME", NAME).split())
        assert code == 0
        assert [line for line in out.splitlines() if len(line) > 80] == []
        assert NAME in out or command.startswith("dump")

    def test_long_path_is_shown_without_its_middle(self, capsys: pytest.CaptureFixture[str]) -> None:
        path = "/srv/" + "directory/" * 20 + "model.py:41"
        console = Console(width=80)
        tables.print_folded(console, f"at {path} in forward", "  ")
        tables.print_folded(console, "x" * 100)
        first, second, third, name = capsys.readouterr().out.splitlines()
        assert (first, third, name) == ("  at", "    in forward", "x" * 100)
        assert re.fullmatch(r"    /srv/directory/\S+\.\.\.\S+/directory/model\.py:41", second)
        assert len(second) == 80

    def test_cells_that_do_not_fit_get_own_lines(self) -> None:
        names = ("queue", "end", "state", "lag", "command")
        ends: list[list[str | Text]] = [
            ["steps", "writer", Text("stopped", "bold red"), "7", "python a.py b"],
            ["steps", "reader 0", "ok", "12345", "python"],
            ["other", "writer", "ok", "0", "python-with-a-very-long-name"],
        ]
        rows = [dict(zip(names, end, strict=True)) for end in ends]

        def drawn(width: int) -> list[str]:
            console = Console(file=io.StringIO(), width=width)
            for line in tables.table(rows, width, head=True, tail=True):
                console.print(line, soft_wrap=True)
            assert isinstance(console.file, io.StringIO)
            return console.file.getvalue().splitlines()

        assert drawn(80) == [
            "queue  end       state      lag  command",
            "\u2500" * 61,
            "steps  writer    stopped      7  python a.py b",
            "steps  reader 0  ok       12345  python",
            "other  writer    ok           0  python-with-a-very-long-name",
        ]
        assert drawn(31) == [
            "queue  end       state      lag",
            "\u2500" * 31,
            "steps  writer    stopped      7",
            "  python a.py b",
            "steps  reader 0  ok       12345",
            "  python",
            "other  writer    ok           0",
            "  python-with-a-very-long-name",
        ]
        assert drawn(24)[2:6] == ["steps", "writer    stopped      7", "  python a.py b", "reader 0  ok       12345"]
        assert drawn(14)[4:6] == ["  python a.py", "  b"]


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        (tables.count, {0: "0", 9999: "9999", 12_345: "12.3k", 999_700: "1000k", 4_560_000: "4.56M", 3e9: "3G"}),
        (tables.rate, {None: "-", 0.34: "0.3/s"}),
        (tables.size, {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 5 << 30: "5.0 GiB"}),
        (tables.share, {None: "-", 0.123: "12%"}),
        (
            tables.duration,
            {None: "-", 0: "0 ns", 8.7e-7: "870 ns", 12e-6: "12 us", 0.0034: "3.4 ms", 5.6: "5.6 s", 119: "119 s"}
            | {0.9997: "1000 ms", 720: "12 min", 9000: "2.5 h", 86400 * 3: "3 d", 86400 * 1500: "1500 d"},
        ),
    ],
)
def test_figure_is_short(form: Callable[[Any], str], texts: dict[Any, str]) -> None:
    assert {value: form(value) for value in texts} == texts
