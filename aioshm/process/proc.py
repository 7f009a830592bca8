"""The state of processes, from outside: by psutil, and from ``/proc`` (proc(5)) for what psutil does not have."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from aioshm.errors import AioshmError

if TYPE_CHECKING:
    import psutil

PROC = Path("/proc")

STOPPED_STATES: Final = frozenset({"stopped", "tracing-stop", "frozen"})
"""States of processes that somebody has stopped: by SIGSTOP, with a debugger, or with the freezer of a cgroup."""
HUNG_STATES: Final = STOPPED_STATES | {"zombie", "dead", "gone", "disk-sleep"}
"""States in which a process does not run."""
NOT_VISIBLE = "not visible from here"
"""The state of a process that the system does not show; also if no descriptor is left to read it."""

_PF_EXITING = 0x4  # linux/sched.h
_MAX_COMMAND = 200


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
    # As of `process_state`.
    state: str
    command: str = ""
    cpu_s: float = 0.0


def process_state(pid: int) -> str:
    """Return "running", "sleeping", "stopped", "frozen", "gone"...; a pid of 0 is in another pid namespace."""
    if pid <= 0:
        return NOT_VISIBLE
    if is_frozen(pid):
        return "frozen"
    try:
        import psutil  # takes 12 ms, and only a report of a delay needs it
    except (ImportError, OSError):  # OSError: no descriptor to read it
        return NOT_VISIBLE
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"
    except (psutil.Error, OSError):  # OSError: no /proc, or no descriptor to read it
        return NOT_VISIBLE


def is_frozen(pid: int, root: Path = Path("/")) -> bool:
    """Return whether the freezer of a cgroup, of either version, has stopped a process (cgroups(7))."""
    groups = root / "sys/fs/cgroup"
    try:
        for line in (root / f"proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers and "frozen 1" in _read_if_there(groups / path.lstrip("/") / "cgroup.events"):
                return True
            if controllers == "freezer":
                v1_state = groups / "freezer" / path.lstrip("/") / "freezer.state"
                if "FROZEN" in _read_if_there(v1_state):
                    return True
    except (OSError, ValueError):
        pass
    return False


def _read_if_there(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""


def is_dying(pid: int) -> bool:
    """Return whether a process is being ended, but has not closed all of its files yet (Linux; see proc(5))."""
    if pid <= 0:
        return False
    status = _status(pid)
    try:
        flags = int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[6])
        if status["State"][0] in "ZX" and int(status["Threads"]) <= 1:
            return False  # the process has closed its files: other processes hold those that are still open
        killed = any(_has_signal(status[name], signal.SIGKILL) for name in ("SigPnd", "ShdPnd"))
    except (OSError, KeyError):
        return False
    return killed or bool(flags & _PF_EXITING)


def handles_signal(pid: int, number: int) -> bool:
    """Return whether a process has a handler of a signal; True without ``/proc``."""
    return not PROC.is_dir() or _has_signal(_status(pid).get("SigCgt", "0"), number)


def handles_child_exits(pid: int) -> bool | None:
    """Return whether a process handles, blocks or ignores SIGCHLD, as those that reap orphans do; None: not visible."""
    status = _status(pid)
    if not status:
        return None
    return any(_has_signal(status.get(name, "0"), signal.SIGCHLD) for name in ("SigBlk", "SigIgn", "SigCgt"))


def _has_signal(mask: str, number: int) -> bool:
    return bool(int(mask, 16) >> (number - 1) & 1)


def zombies_of(parent: int) -> list[int]:
    """Return the zombies among the children of a process."""
    import psutil

    zombie = {"ppid": parent, "status": psutil.STATUS_ZOMBIE}
    return [process.pid for process in psutil.process_iter([*zombie]) if process.info == zombie]


def _status(pid: int) -> dict[str, str]:
    """Return the fields of a process's ``status``; none if the process is gone."""
    with suppress(OSError):
        text = (PROC / str(pid) / "status").read_text(errors="replace")
        return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    return {}


def wait_channel(pid: int) -> str:
    """Return the kernel function in which a process sleeps; empty: running, or not known."""
    with suppress(OSError):
        return (PROC / str(pid) / "wchan").read_text().strip().removeprefix("0")
    return ""


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
    """Return the state of a process, its command line and its CPU time."""
    inner_pid = int(_status(pid).get("NSpid", str(pid)).split()[-1])
    info = ProcessInfo(pid=pid, inner_pid=inner_pid, state=process_state(pid))
    if info.state == NOT_VISIBLE:  # perhaps no descriptor is left to import psutil
        return info
    import psutil

    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            info = msgspec.structs.replace(info, cpu_s=times.user + times.system)
            info = msgspec.structs.replace(info, command=_command(process))
    return info


def parent_of(pid: int) -> int:
    """Return the pid of the parent of a process that runs another command line, else 0."""
    import psutil

    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        parent = process.parent()
        if parent is not None and parent.cmdline() != process.cmdline():
            return parent.pid
    return 0


def child_name(pid: int) -> str:
    """Return the name of a child of multiprocessing; empty: none, or the process is not such a child."""
    import psutil

    with suppress(psutil.Error, OSError):
        return _child_name(psutil.Process(pid).cmdline())
    return ""


def _child_name(command: list[str]) -> str:
    if not _is_child(command) or "--multiprocessing-fork" not in command:
        return ""
    return _in_one_line(" ".join(command[command.index("--multiprocessing-fork") + 1 :]))


def _is_child(command: list[str]) -> bool:
    return any("from multiprocessing." in argument for argument in command)


def _command(process: psutil.Process) -> str:
    """Return the command line of a process; a child of multiprocessing is called by its name and its program."""
    import psutil

    command = process.cmdline()
    if not _is_child(command):
        return one_line(command)
    with suppress(psutil.Error, OSError):  # the parent belongs to another user
        parent = process.parent()
        if parent is not None and parent.exe() == process.exe():  # else the parent has died
            return f"{_child_name(command) or 'child'} of {_command(parent)}"
    return "child of multiprocessing"


def one_line(command: list[str]) -> str:
    """Return a command line without the program's directory, in one line of limited length."""
    text = _in_one_line(" ".join([os.path.basename(each) for each in command[:1]] + command[1:]))
    if len(text) > _MAX_COMMAND:
        text = text[: _MAX_COMMAND - 3] + "..."
    return text


def _in_one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
