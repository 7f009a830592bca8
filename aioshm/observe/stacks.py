"""The Python stacks of another process: threads from py-spy, tasks from Python 3.14.

py-spy runs with ``--nonblocking``: it reads memory, and neither stops nor signals the process.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

TIMEOUT_S = 5.0
_TRIES = 5
"""A stack that changes while it is read cannot be read: py-spy is run again."""

_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3.", "<frozen ", str(Path(__file__).parents[1]) + "/")
"""Parts of file names of libraries."""

_LOOPS = ("asyncio/base_events.py", "asyncio/runners.py")
"""Files whose functions run an event loop."""

LOOP_WAITS = (
    "its event loop waits: the line is the one that runs the loop, since coroutines that wait are on no stack "
    "(tasks are seen where both processes run the same CPython, 3.14 or newer)"
)
NOT_INSTALLED = "its stack can be seen with py-spy: pip install py-spy"
FORBIDDEN = (
    "its stack cannot be seen: this user may not read its memory; "
    "run this as root, allow ptrace (sysctl kernel.yama.ptrace_scope=0), or in a container --cap-add SYS_PTRACE"
)


class Frame(msgspec.Struct, frozen=True):
    """One call on a stack."""

    function: str
    file: str
    line: int
    own: bool  # the user's code, and no library's

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Stack(msgspec.Struct, frozen=True):
    """The stack of a thread or task."""

    name: str
    is_main: bool
    is_running: bool
    frames: tuple[Frame, ...]  # the innermost call first


def stacks_of(pid: int) -> tuple[tuple[Stack, ...], str]:
    """Return the stacks of a process, and a hint if they cannot be read."""
    spy = _find_spy()
    if spy is not None:
        stacks, hint = _spied(spy, pid)
    else:
        stacks, hint = (), NOT_INSTALLED
    return stacks + _tasks(pid), hint


def users_line(stacks: Iterable[Stack], *, beyond_loops: bool = False) -> Frame | None:
    """Return the innermost call of the user's code; a loop's caller only with ``beyond_loops``."""
    ordered = sorted(stacks, key=lambda stack: (not stack.is_main, not stack.is_running))
    for stack in ordered:
        for frame in stack.frames:
            if frame.own:
                return frame
            if not beyond_loops and frame.file.endswith(_LOOPS):
                break
    return None


def parse_spy(text: bytes, pid: int) -> tuple[Stack, ...]:
    """Parse the output of ``py-spy dump --json``; raise `ValueError` for any other."""
    try:
        return tuple(
            Stack(
                thread["thread_name"]
                or ("MainThread" if thread["os_thread_id"] == pid else f"{thread['os_thread_id']}"),
                thread["thread_name"] == "MainThread" or thread["os_thread_id"] == pid,
                bool(thread["active"]),
                tuple(_frame(frame["name"], frame["filename"], frame["line"]) for frame in thread["frames"]),
            )
            for thread in msgspec.json.decode(text)
        )
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise ValueError(f"py-spy has printed something unknown: {error!r}") from None


def _frame(function: str, file: str, line: int) -> Frame:
    return Frame(function, file, line, not any(part in file for part in _LIBRARIES))


def _find_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if beside.exists() else None)


def _spied(spy: str, pid: int) -> tuple[tuple[Stack, ...], str]:
    hint = ""
    for _ in range(_TRIES):
        try:
            command = [spy, "dump", "--pid", str(pid), "--nonblocking", "--json"]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return (), f"its stack cannot be seen: {error}"
        if done.returncode == 0:
            try:
                return parse_spy(done.stdout, pid), ""
            except ValueError as error:
                hint = str(error)
                continue
        said = done.stderr.decode(errors="replace").strip()
        if "ermission" in said or "not permitted" in said:
            return (), FORBIDDEN
        hint = f"its stack cannot be seen: {said.splitlines()[0] if said else 'py-spy fails'}"
    return (), hint


def _tasks(pid: int) -> tuple[Stack, ...]:
    """Return the stacks of asyncio tasks, if both processes run the same CPython, 3.14 or newer."""
    if sys.version_info < (3, 14):
        return ()
    try:
        unwinder: Any = import_module("_remote_debugging").RemoteUnwinder(pid)  # what `python -m asyncio pstree` uses
        found: list[Any] = unwinder.get_all_awaited_by()
        return tuple(parse_tasks(found))
    except Exception:  # another version of Python, no permission, or a stack that has changed meanwhile
        return ()


def parse_tasks(found: Iterable[Any]) -> Iterable[Stack]:
    """Parse the result of ``RemoteUnwinder.get_all_awaited_by``."""
    for thread in found:
        for task in thread.awaited_by:
            frames = [call for coroutine in task.coroutine_stack for call in coroutine.call_stack]
            places = tuple(_frame(call.funcname, call.filename, call.lineno) for call in frames)
            yield Stack(f"task {task.task_name}", False, False, places)
