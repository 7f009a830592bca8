"""Processes from outside: their state in ``/proc`` (proc(5)), and their Python stacks by py-spy.

py-spy runs with ``--nonblocking``: it reads memory, and neither stops nor signals the process.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from aioshm.errors import AioshmError

PROC = Path("/proc")

STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "I": "sleeping",
    "D": "waiting for a disk",
    "T": "stopped",
    "t": "traced",
    "Z": "zombie",
    "X": "gone",
}
"""The letters of ``/proc/PID/stat``."""

HUNG: Final = frozenset({"stopped", "traced", "zombie", "gone", "waiting for a disk"})
"""States in which a process does not run."""


class NoProc(AioshmError):
    """This system has no ``/proc``: the queues of other processes cannot be found."""

    def __init__(self) -> None:
        super().__init__(
            "there is no /proc on this system: the queues of other processes cannot be found; "
            "in each process, stats() describes its queues"
        )


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A process at one moment."""

    pid: int
    # The pid inside of the container.
    inner_pid: int
    # One of `STATES`.
    state: str
    command: str
    cpu_s: float


GONE: Final = ProcessInfo(pid=0, inner_pid=0, state="gone", command="", cpu_s=0.0)

_TICKS = os.sysconf("SC_CLK_TCK")
_MAX_COMMAND = 200


def parse_stat(text: str) -> tuple[str, float]:
    """Return state and CPU seconds of a process from its ``stat``."""
    fields = text.rpartition(")")[2].split()
    return STATES.get(fields[0], "unknown"), (int(fields[11]) + int(fields[12])) / _TICKS


def parse_inner_pid(status: str, pid: int) -> int:
    """Return a process' id in the innermost of its pid namespaces from its ``status``."""
    for line in status.splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return pid


def parse_command(cmdline: bytes) -> str:
    """Return a command line without the program's directory, in one line of limited length."""
    program, *arguments = cmdline.rstrip(b"\0").decode(errors="replace").split("\0")
    text = _in_one_line(" ".join([program.rpartition("/")[2], *arguments]))
    if len(text) > _MAX_COMMAND:
        text = text[: _MAX_COMMAND - 3] + "..."
    return text


def _in_one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def check_proc() -> None:
    """Raise `NoProc` where there is no ``/proc``."""
    if not (PROC / "self" / "fd").is_dir():
        raise NoProc


def is_own_process(pid: int) -> bool:
    """Return whether a process of this user has this pid."""
    with suppress(OSError):
        return os.stat(PROC / str(pid)).st_uid == os.geteuid()
    return False


def process_info(pid: int) -> ProcessInfo:
    """Return the state of a process; `GONE` with the pid if no process has it."""
    try:
        state, cpu_s = parse_stat(read_file(pid, "stat").decode(errors="replace"))
        inner_pid = parse_inner_pid(read_file(pid, "status").decode(errors="replace"), pid)
        command = _command(pid)
    except (OSError, ValueError, IndexError):
        return msgspec.structs.replace(GONE, pid=pid)
    return ProcessInfo(pid=pid, inner_pid=inner_pid, state=state, command=command, cpu_s=cpu_s)


def parent_of(pid: int) -> int:
    """Return the pid of the parent of a process; raise `OSError` if no process has this pid."""
    return int(read_file(pid, "stat").rpartition(b")")[2].split()[1])


def child_name(pid: int) -> str:
    """Return the name of a child of multiprocessing; empty: none, or the process is not such a child."""
    before, _, name = read_file(pid, "cmdline").partition(b"--multiprocessing-fork")
    if b"from multiprocessing." not in before:
        return ""
    return _in_one_line(name.strip(b"\0").decode(errors="replace"))


def _command(pid: int) -> str:
    """Return the command line of a process; a child of multiprocessing is called by its name and its program."""
    cmdline = read_file(pid, "cmdline")
    if b"from multiprocessing." not in cmdline:
        return parse_command(cmdline)
    with suppress(OSError, ValueError, IndexError):
        parent = parent_of(pid)
        if os.readlink(f"{PROC}/{parent}/exe") == os.readlink(f"{PROC}/{pid}/exe"):  # else the parent has died
            return f"{child_name(pid) or 'child'} of {_command(parent)}"
    return "child of multiprocessing"


def handles_signal(pid: int, number: int) -> bool:
    """Return whether a process has a handler of a signal; True without ``/proc``."""
    if not PROC.is_dir():
        return True
    with suppress(OSError):
        for line in read_file(pid, "status").splitlines():
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def read_file(pid: int, name: str) -> bytes:
    """Return a file of a process; without pathlib, which is slower than the kernel."""
    with open(f"{PROC}/{pid}/{name}", "rb", buffering=0) as file:
        return b"".join(iter(lambda: file.read(65536), b""))


def wait_channel(pid: int) -> str:
    """Return the kernel function in which a process sleeps; empty: running, or not known."""
    with suppress(OSError):
        return (PROC / str(pid) / "wchan").read_text().strip().removeprefix("0")
    return ""


# Stacks

TIMEOUT_S = 5.0
_TRIES = 5
"""Runs of py-spy, which fails if the stack changes meanwhile."""

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


def stacks_of(pid: int) -> tuple[tuple[Stack, ...], str]:
    """Return the stacks of a process, and a hint if they cannot be read."""
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy is None:
        return (), NOT_INSTALLED
    command = [spy, "dump", "--pid", str(pid), "--nonblocking", "--json"]
    hint = ""
    for _ in range(_TRIES):
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


def runs_a_loop(stacks: Iterable[Stack]) -> bool:
    """Return whether the main thread runs an event loop."""
    return any(frame.file.endswith(_LOOPS) for stack in stacks if stack.is_main for frame in stack.frames)


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
