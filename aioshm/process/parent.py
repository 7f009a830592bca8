"""Ends this process when the process that started it exits, however that happens.

``child.py`` also runs this file by its path, before the package can be imported, so it needs only the standard library.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

_THREAD_NAME = "aioshm-parent-watch"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CHECK_MS = 250
"""How often to compare the parent's id, without a descriptor that reports its exit."""


def die_with_parent(parent_pid: int | None = None) -> None:
    """End this process as soon as the one that started it has exited, even if that was killed.

    Call this first in a process that must not outlive its parent. Processes of the managers call it before their first
    import; their own children have to call it. Idempotent; a forked child does not inherit it.

    There are two ways, because each has a hole. The kernel's (``PR_SET_PDEATHSIG``, prctl(2)) kills the process even if
    it is stopped, or in C code that holds the GIL; but only on Linux, and already when the *thread* ends that started
    this process. So it is used only if that was the parent's main thread. The other way is a thread that waits for the
    end of the parent, or of a pipe from the parent. No clean-up runs in either case.

    Args:
        parent_pid: The parent's process id from before this process began, to notice a parent that is gone already.
            Children of ``multiprocessing`` notice without it.
    """
    if parent_pid is None:
        parent_pid = os.getppid()
    pipe, exact = _pipe_from(parent_pid), []
    if os.getppid() == parent_pid:
        _ask_the_kernel(parent_pid)
        exact = _end_of(parent_pid)
    if os.getppid() != parent_pid:  # before anything was asked; the number may be another process' by now
        _end()
    if not any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        threading.Thread(
            target=_watch, args=(pipe + exact, bool(exact), parent_pid), name=_THREAD_NAME, daemon=True
        ).start()


def boot(parent_pid: int) -> None:
    """Prepare a new process before its first import; SIGINT is blocked until here.

    A handler that does nothing, not ``SIG_IGN``, which programs that this process runs would inherit.
    """
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with_parent(parent_pid)


def _ask_the_kernel(parent_pid: int) -> None:
    # The setting is the calling thread's own and is lost with it, hence only from the main one.
    on_main_thread = threading.get_native_id() == os.getpid()
    if sys.platform == "linux" and on_main_thread and _started_by_main_thread(parent_pid):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _started_by_main_thread(parent_pid: int) -> bool:
    # Which thread's child this process is; passed on to another of the parent's threads when that one ends. Without
    # this file (proc(5): CONFIG_PROC_CHILDREN) it cannot be told.
    try:
        children = Path(f"/proc/{parent_pid}/task/{parent_pid}/children").read_text()
    except OSError:
        return False
    return str(os.getpid()) in children.split()


def _end_of(pid: int) -> list[int]:
    """Return a descriptor that becomes readable when the process exits, if there is such a thing here."""
    try:
        return [os.pidfd_open(pid)]
    except (AttributeError, OSError):  # not Linux, a kernel before 5.3, or a sandbox
        return []


def _pipe_from(parent_pid: int) -> list[int]:
    """Return the pipe from the process that started this one by means of ``multiprocessing``, if one has."""
    starter = multiprocessing.parent_process()
    if starter is None:
        return []
    # With "forkserver" the parent is another one, which lasts as long as its children. Otherwise the starter has ended
    # already, or a plain fork has passed on what was its own parent's.
    apart = multiprocessing.get_start_method(allow_none=True) == "forkserver"
    return [starter.sentinel] if starter.pid == parent_pid or apart or not starter.is_alive() else []


def _watch(signs: list[int], exact: bool, parent_pid: int) -> None:
    poller = select.poll()
    for sign in signs:
        poller.register(sign, select.POLLIN)
    while True:
        for sign, event in poller.poll(None if exact else _CHECK_MS):
            if not event & select.POLLNVAL:
                _end()
            poller.unregister(sign)  # closed by another part of the program
            exact = False
        if os.getppid() != parent_pid:
            _end()


def _end() -> NoReturn:
    os._exit(1)  # not a signal: those that the first process of a container sends itself do nothing
