"""Reads the state of processes from ``/proc`` (proc(5))."""

from __future__ import annotations

import os
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
    """This system has no ``/proc``, by which the queues of other processes are found."""

    def __init__(self) -> None:
        super().__init__(
            "there is no /proc on this system, by which the queues of other processes are found; "
            "in their own processes, stats() says what they do"
        )


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A process at one moment."""

    pid: int
    # As the process sees itself, which differs in a container.
    inner_pid: int
    # One of `STATES`; "gone" if there is no process.
    state: str
    command: str
    cpu_s: float


GONE: Final = ProcessInfo(pid=0, inner_pid=0, state="gone", command="", cpu_s=0.0)

_TICKS = os.sysconf("SC_CLK_TCK")
_MOST_COMMAND = 200


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
    words = " ".join([program.rpartition("/")[2], *arguments]).split()
    text = "".join(letter if letter.isprintable() else "?" for letter in " ".join(words))
    return text if len(text) <= _MOST_COMMAND else text[: _MOST_COMMAND - 3] + "..."


def check_proc() -> None:
    """Raise `NoProc` where there is no ``/proc``."""
    if not (PROC / "self" / "fd").is_dir():
        raise NoProc


def is_own_process(pid: int) -> bool:
    """Return whether there is such a process of this user."""
    with suppress(OSError):
        return os.stat(PROC / str(pid)).st_uid == os.geteuid()
    return False


def process_info(pid: int) -> ProcessInfo:
    """Return the state of a process; `GONE` with this pid if there is none."""
    try:
        state, cpu_s = parse_stat(_read(pid, "stat").decode(errors="replace"))
        inner_pid = parse_inner_pid(_read(pid, "status").decode(errors="replace"), pid)
        command = _command(pid)
    except (OSError, ValueError, IndexError):
        return msgspec.structs.replace(GONE, pid=pid)
    return ProcessInfo(pid=pid, inner_pid=inner_pid, state=state, command=command, cpu_s=cpu_s)


def _command(pid: int) -> str:
    """Return the command line of a process; a child of multiprocessing is called by its name and its program."""
    cmdline = _read(pid, "cmdline")
    _, _, name = cmdline.partition(b"--multiprocessing-fork")
    if b"from multiprocessing." not in cmdline:
        return parse_command(cmdline)
    with suppress(OSError, ValueError, IndexError):
        parent = int(_read(pid, "stat").rpartition(b")")[2].split()[1])
        if os.readlink(f"{PROC}/{parent}/exe") == os.readlink(f"{PROC}/{pid}/exe"):  # else the parent has died
            return f"{parse_command(name.lstrip(bytes(1))) or 'child'} of {_command(parent)}"
    return "child of multiprocessing"


def _read(pid: int, name: str) -> bytes:
    """Return a file of a process; without pathlib, which is slower than the kernel."""
    with open(f"{PROC}/{pid}/{name}", "rb", buffering=0) as file:
        return b"".join(iter(lambda: file.read(65536), b""))


def wait_channel(pid: int) -> str:
    """Return the kernel function in which a process sleeps; empty: it runs, or the kernel does not say."""
    with suppress(OSError):
        channel = (PROC / str(pid) / "wchan").read_text().strip()
        return "" if channel == "0" else channel
    return ""


def system_call(pid: int) -> str:
    """Return the system call that a process executes, by name if it is a common one; empty: none, or unknown."""
    with suppress(OSError, IndexError):
        number = (PROC / str(pid) / "syscall").read_text().split()[0]
        if number.isdigit() and os.uname().machine == "x86_64":
            return _CALLS.get(int(number), f"system call {number}")
    return ""


_CALLS: Final = {
    0: "read", 1: "write", 7: "poll", 17: "pread64", 18: "pwrite64", 23: "select", 35: "nanosleep", 42: "connect",
    43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 73: "flock", 74: "fsync",
    202: "futex", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 270: "pselect6", 271: "ppoll",
    281: "epoll_pwait", 288: "accept4", 426: "io_uring_enter", 441: "epoll_pwait2",
}  # fmt: skip
"""System calls of x86-64 in which processes sleep."""
