"""What the threads of a process do: their Python stacks by py-spy, or as ``faulthandler`` writes them.

py-spy runs with ``--nonblocking``: it reads memory, and neither stops nor signals the process.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

import msgspec

from aioshm.process.proc import ProcessInfo, process_info, wait_channel

TIMEOUT_S = 5.0
_SPY_TRIES = 5
"""Runs of py-spy, which fails if the stack changes meanwhile."""
_PAUSE_S = 0.01

_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3.", "<frozen ", str(Path(__file__).parents[1]) + "/")
"""Parts of file names of libraries."""

_OWN_THREADS = "aioshm-"
"""The beginning of the names of aioshm's threads."""

_LOOPS = ("asyncio/base_events.py", "asyncio/runners.py")
"""Files with functions that run an event loop."""

LOOP_WAITS = (
    "its event loop waits: the line is the one that runs the loop, since coroutines that wait are on no stack "
    "(Python 3.14 and newer show them: python -m asyncio pstree PID)"
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
    """The stack of a thread."""

    name: str
    is_main: bool
    is_running: bool
    frames: tuple[Frame, ...]  # the innermost call first


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a process does.

    Attributes:
        process: The process.
        wait_channel: The kernel function in which it sleeps; empty: it runs, or the function is not known.
        line: The line of the user's code that it executes, if known.
        stacks: The stacks of its threads, if known.
        hint: Why the stacks are unknown, and what to do; empty otherwise.
    """

    process: ProcessInfo
    wait_channel: str
    line: Frame | None
    stacks: tuple[Stack, ...]
    hint: str

    def describe(self) -> str:
        """Return a text such as ``sleeping in futex_wait_queue, at model.py:41 in forward``."""
        text = self.process.state
        if self.wait_channel:
            text += f" in {self.wait_channel}"
        if self.line is not None:
            text += f", at {self.line}"
        if self.hint:
            text += f"; {self.hint}"
        return text


def process_report(pid: int, stacks: tuple[Stack, ...], hint: str, waits: tuple[Stack, ...] = ()) -> ProcessReport:
    """Describe a process with these stacks, or with this hint; ``waits``: where the coroutine of its step waits."""
    line = users_line(stacks) or users_line(waits)
    if stacks and line is None:
        line = users_line(stacks, beyond_loops=True)
        if line is not None:
            hint = LOOP_WAITS
    if line is not None and line.file == "<string>":  # the command that starts a process of multiprocessing
        line = None
    process = process_info(pid)
    return ProcessReport(process=process, wait_channel=wait_channel(pid), line=line, stacks=stacks, hint=hint)


def spied_report(pid: int, tries: int = 1) -> ProcessReport:
    """Describe a process by py-spy; several ``tries``, where its event loop may wait at the moment of one read."""
    stacks, hint = stacks_of(pid)
    for _ in range(tries - 1):
        if users_line(stacks) or not stacks:
            break
        time.sleep(_PAUSE_S)
        stacks, hint = stacks_of(pid)
    return process_report(pid, stacks, hint)


def stacks_of(pid: int) -> tuple[tuple[Stack, ...], str]:
    """Return the stacks of a process, and a hint if they cannot be read."""
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy is None:
        return (), NOT_INSTALLED
    command = [spy, "dump", "--pid", str(pid), "--nonblocking", "--json"]
    hint = ""
    for _ in range(_SPY_TRIES):
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False
            )
            if done.returncode == 0:
                return parse_spy(done.stdout, pid), ""
        except ValueError as error:
            hint = str(error)
            continue
        except (OSError, subprocess.TimeoutExpired) as error:
            return (), f"its stack cannot be seen: {error}"
        errors = done.stderr.decode(errors="replace").strip() or "py-spy fails"
        if "ermission" in errors or "not permitted" in errors:
            return (), FORBIDDEN
        hint = f"its stack cannot be seen: {errors.splitlines()[0]}"
    return (), hint


def parse_spy(text: bytes, pid: int) -> tuple[Stack, ...]:
    """Parse the output of ``py-spy dump --json``; raise `ValueError` for any other."""
    stacks = []
    try:
        for thread in msgspec.json.decode(text):
            is_main = thread["os_thread_id"] == pid or thread["thread_name"] == "MainThread"
            name = thread["thread_name"] or ("MainThread" * is_main) or str(thread["os_thread_id"])
            frames = tuple(_frame(each["name"], each["filename"], each["line"]) for each in thread["frames"])
            stacks.append(Stack(name, is_main, bool(thread["active"]), frames))
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise ValueError(f"py-spy has printed something unknown: {error!r}") from None
    return tuple(stacks)


def stacks_of_thread(thread: int) -> tuple[Stack, ...]:
    """Return the stack of a thread of this process, named by `threading.get_ident`; none if the thread has ended."""
    innermost = sys._current_frames().get(thread)
    if innermost is None:
        return ()
    frames = [
        _frame(each.f_code.co_name, each.f_code.co_filename, line) for each, line in traceback.walk_stack(innermost)
    ]
    return (Stack("MainThread", True, True, tuple(frames)),)


_WRITTEN_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def parse_faulthandler(text: str) -> tuple[Stack, ...]:
    """Parse what `faulthandler` writes, the thread first that has got the signal: in general the main thread."""
    stacks = []
    for part in re.split(r"^(?=Current thread |Thread )", text, flags=re.MULTILINE):
        frames = [_frame(function, file, int(line)) for file, line, function in _WRITTEN_FRAME.findall(part)]
        if frames:
            is_current = part.startswith("Current")
            stacks.append(Stack("MainThread" if is_current else "Thread", is_current, is_current, tuple(frames)))
    return tuple(sorted(stacks, key=lambda stack: not stack.is_main))


def _frame(function: str, file: str, line: int) -> Frame:
    own = not any(part in file for part in _LIBRARIES) and not _is_of_aioshm(file)
    return Frame(function, file, line, own)


def _is_of_aioshm(file: str) -> bool:
    """Return whether a file is of this package, which may lie elsewhere for the other process."""
    _, found, inside = file.rpartition("/aioshm/")
    return bool(found) and os.path.exists(Path(__file__).parents[1] / inside.partition("/")[0])


def users_line(stacks: Iterable[Stack], *, beyond_loops: bool = False) -> Frame | None:
    """Return the innermost call of the user's code, if any in the main thread.

    A loop's caller counts only with ``beyond_loops``, and aioshm's own threads never.
    """
    others = [stack for stack in stacks if not stack.name.startswith(_OWN_THREADS)]
    for stack in sorted(others, key=lambda stack: (not stack.is_main, not stack.is_running)):
        for frame in stack.frames:
            if frame.own:
                return frame
            if not beyond_loops and frame.file.endswith(_LOOPS):
                break
    return None
