"""What the tests of processes share."""

from __future__ import annotations

import threading
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
from loops import open_fds
from support import eventually

from aioshm.engine import ProcessManager


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_line(manager: ProcessManager, name: str, beginning: str) -> str:
    """Wait until a process has said such a line; return the rest of it."""
    found: list[str] = []

    def look() -> bool:
        found[:] = [line for line in manager.last_lines(name) if line.startswith(beginning)]
        return bool(found)

    eventually(look, f"a line {beginning!r} of {name}")
    return found[-1].removeprefix(beginning).strip()


def wait_for_all(manager: ProcessManager, beginning: str = "up") -> None:
    for process in manager.processes:
        wait_for_line(manager, process.name, beginning)


def open_things() -> set[str]:
    """Return the descriptors and the threads of this process, with what `multiprocessing` keeps once it was used."""
    resource_tracker.ensure_running()
    things = {thread.name for thread in threading.enumerate() if thread.ident and thread.name.startswith("aioshm")}
    return things | {f"{fd} {what}" for fd, what in open_fds().items()}


def marked(mark: str) -> list[str]:
    """Return the living processes that have inherited a mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"={mark}\0".encode() in (entry / "environ").read_bytes():
                    found.append(f"{entry.name}: {(entry / 'cmdline').read_bytes()!r}")
            except OSError:
                continue
    return found
