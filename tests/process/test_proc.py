"""Processes as ``/proc`` and py-spy show them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from support import eventually

from aioshm.observe.queues import find_segments
from aioshm.process import proc
from aioshm.process.proc import NoProc, check_proc, is_own_process, one_line, process_info, wait_channel
from aioshm.process.stacks import Frame, Stack, parse_spy, users_line


@pytest.mark.parametrize(
    ("cmdline", "command"),
    [
        (["/usr/bin/python3", "-m", "server"], "python3 -m server"),
        (["python", "-c", "import time\ntime.sleep(1)"], "python -c import time time.sleep(1)"),
        ([], ""),
        (["x", "\x1b[31mred\udcff"], "x ?[31mred?"),
        (["x", "y" * 500], "x " + "y" * 195 + "..."),
    ],
)
def test_command_is_shown_in_one_line(cmdline: list[str], command: str) -> None:
    assert one_line(cmdline) == command


def test_this_process_is_described() -> None:
    info = process_info(os.getpid())
    assert (info.pid, info.state) == (os.getpid(), "running")
    assert info.inner_pid > 0
    assert info.cpu_s > 0
    assert "python" in info.command or "pytest" in info.command
    assert is_own_process(os.getpid())


def test_process_that_is_stopped_and_then_gone_is_described() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        eventually(lambda: process_info(child.pid).state == "sleeping" and "nanosleep" in wait_channel(child.pid))
        child.send_signal(signal.SIGSTOP)
        eventually(lambda: process_info(child.pid).state == "stopped")
    finally:
        child.kill()
        child.wait()
    found = process_info(child.pid)
    assert (found.pid, found.state, found.command, found.cpu_s) == (child.pid, "gone", "", 0)
    assert wait_channel(child.pid) == ""


def test_child_of_multiprocessing_is_named_even_if_its_parent_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(process: psutil.Process) -> str:
        raise psutil.AccessDenied(process.pid)

    program = "if 0: from multiprocessing.spawn import spawn_main\nimport time; time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", program]) as child:
        try:
            eventually(lambda: process_info(child.pid).command.startswith("child of "))
            monkeypatch.setattr(psutil.Process, "exe", forbidden)
            assert process_info(child.pid).command == "child of multiprocessing"
        finally:
            child.kill()


def test_process_of_another_user_is_not_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert not is_own_process(os.getpid())
    assert find_segments()[1] > 0, "counted as skipped"


def test_system_without_proc_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(proc, "PROC", tmp_path)
    with pytest.raises(NoProc, match="no /proc on this system"):
        check_proc()


class TestStacks:
    own = Frame("work", "/srv/app.py", 12, True)
    lib = Frame("select", "/usr/lib/python3.11/selectors.py", 468, False)

    def test_line_is_the_innermost_of_the_users_code_in_the_main_thread_and_below_a_loop(self) -> None:
        main = Stack("MainThread", True, False, (self.lib, self.own))
        outer = msgspec.structs.replace(self.own, line=99)
        other = Stack("other", False, True, (outer,))
        assert users_line([other, main]) == self.own
        assert users_line([other]) == outer
        assert users_line([Stack("MainThread", True, True, (self.lib,))]) is None
        assert users_line([]) is None
        assert str(self.own) == "/srv/app.py:12 in work"
        loop = Frame("Runner.run", "/usr/lib/python3.11/asyncio/runners.py", 118, False)
        working = Stack("MainThread", True, True, (self.lib, self.own, loop, outer))
        assert users_line([working]) == self.own
        waiting = Stack("MainThread", True, False, (self.lib, loop, outer))
        watch = Stack("aioshm-parent-watch", False, True, (self.own,))  # passed over
        assert users_line([watch, waiting]) is None
        assert users_line([watch, waiting], beyond_loops=True) == outer

    def test_output_of_py_spy_is_parsed(self) -> None:
        frame = {"name": "work", "filename": "/srv/app.py", "line": 12, "module": None}
        threads = [
            {"thread_name": None, "os_thread_id": 5, "active": True, "frames": [frame]},
            {"thread_name": "pool", "os_thread_id": 6, "active": False, "frames": []},
            {"thread_name": None, "os_thread_id": 7, "active": False, "frames": []},
        ]
        assert list(parse_spy(msgspec.json.encode(threads), 5)) == [
            Stack("MainThread", True, True, (self.own,)),
            Stack("pool", False, False, ()),
            Stack("7", False, False, ()),
        ]

    @pytest.mark.parametrize("text", [b"", b"[1]", b'[{"frames": 1}]', b"\xff"])
    def test_other_output_of_py_spy_is_refused(self, text: bytes) -> None:
        with pytest.raises(ValueError, match="something unknown"):
            parse_spy(text, 1)

    @pytest.mark.parametrize(
        ("file", "own"),
        [
            ("/srv/app.py", True),
            ("<string>", True),
            ("/x/site-packages/a.py", False),
            ("/usr/lib/python3.12/asyncio/runners.py", False),
            ("<frozen runpy>", False),
            (proc.__file__, False),
            ("/other/checkout/aioshm/process/parent.py", False),
            ("/other/checkout/aioshm/__init__.py", False),
            ("/home/me/aioshm/examples/worker_pool.py", True),
            ("/home/me/aioshm/app.py", True),
        ],
    )
    def test_library_files_are_not_own(self, file: str, own: bool) -> None:
        frames = [{"name": "f", "filename": file, "line": 1}]
        thread = {"thread_name": "x", "os_thread_id": 5, "active": True, "frames": frames}
        assert parse_spy(msgspec.json.encode([thread]), 5)[0].frames[0].own is own
