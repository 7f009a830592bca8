"""Ends this process when its parent exits, for whatever reason; and places a new process on CPUs and a NUMA node.

``child.py`` also runs this file by its path, before the package can be imported: only the standard library is here.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

_THREAD_NAME = "aioshm-parent-watch"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CHECK_MS = 250
"""How often to compare the parent's id, without a descriptor that reports the exit."""
_MPOL_PREFERRED = 1  # linux/mempolicy.h
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237}
"""The numbers of the system call, for which glibc has no function; 64-bit programs only."""


def die_with_parent(parent_pid: int | None = None) -> None:
    """End this process as soon as its parent has exited, even if the parent was killed.

    Call this first in a process that must not outlive its parent. Processes of the managers call it before their first
    import; their own children have to call it. Idempotent; a forked child does not inherit it.

    There are two ways, because each has a gap. The kernel (``PR_SET_PDEATHSIG``, prctl(2)) kills the process even if
    it is stopped, or in C code that holds the GIL; but only on Linux, and already when the *thread* ends that started
    this process. So this way is used only if that thread was the parent's main thread. The other way is a thread that
    waits for the exit of the parent, or for the end of a pipe from the parent. No clean-up runs in either case.

    Args:
        parent_pid: The parent's process id from before this process began, to notice a parent that is gone already.
            Children of ``multiprocessing`` need no id.
    """
    if parent_pid is None:
        parent_pid = os.getppid()
    pipe = _pipe_from(parent_pid)
    exact: list[int] = []
    if os.getppid() == parent_pid:
        _ask_the_kernel(parent_pid)
        exact = _pidfd_of(parent_pid)
    if (
        os.getppid() != parent_pid or _starter_is_gone()
    ):  # the parent has exited before these calls; its pid may be reused
        _end()
    if not any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        threading.Thread(
            target=_watch, args=(pipe + exact, bool(exact), parent_pid), name=_THREAD_NAME, daemon=True
        ).start()


def boot(parent_pid: int, cpus: Sequence[int] = (), numa_node: int | None = None) -> None:
    """Prepare a new process before its first import; SIGINT is blocked until here.

    The handler does nothing. ``SIG_IGN`` would be inherited by programs that this process runs. Affinity and memory
    policy belong to the calling thread, and to all threads that start later.
    """
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:  # the CPUs were taken away after the parent's check
            sys.exit(f"cannot run on the CPUs {[*cpus]} of the placement: {error}")
    if numa_node is not None:
        prefer_memory_of(numa_node)
    die_with_parent(parent_pid)


def prefer_memory_of(node: int) -> None:
    """Prefer the memory of a NUMA node, if the system allows that."""
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if sys.platform != "linux" or sys.maxsize < 1 << 32 or number is None:
        return
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    # The kernel reads one bit less than the last number (get_mempolicy(2), "BUGS").
    ctypes.CDLL(None).syscall(ctypes.c_long(number), _MPOL_PREFERRED, mask, ctypes.c_ulong(bits * len(mask) + 1))


def _ask_the_kernel(parent_pid: int) -> None:
    # The setting belongs to the calling thread, and ends with that thread.
    on_main_thread = threading.get_native_id() == os.getpid()
    if sys.platform == "linux" and on_main_thread and _started_by_main_thread(parent_pid):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _started_by_main_thread(parent_pid: int) -> bool:
    # Each thread lists its own children; those of an ended thread move to another thread. The file exists with
    # CONFIG_PROC_CHILDREN (proc(5)).
    try:
        children = Path(f"/proc/{parent_pid}/task/{parent_pid}/children").read_text()
    except OSError:
        return False
    return str(os.getpid()) in children.split()


def _pidfd_of(pid: int) -> list[int]:
    """Return a descriptor that becomes readable when the process exits, if the system has such descriptors."""
    try:
        return [os.pidfd_open(pid)]
    except (AttributeError, OSError):  # not Linux, a kernel before 5.3, or a sandbox
        return []


def _pipe_from(parent_pid: int) -> list[int]:
    """Return the pipe from the process that started this process by ``multiprocessing``, if any."""
    starter = multiprocessing.parent_process()
    if starter is None:
        return []
    # With "forkserver" the parent is the server, which lasts as long as its children. Another starter that is not the
    # parent has exited, or this process inherited the pipe by a plain fork.
    by_server = multiprocessing.get_start_method(allow_none=True) == "forkserver"
    if starter.pid == parent_pid or by_server or not starter.is_alive():
        return [starter.sentinel]
    return []


def _starter_is_gone() -> bool:
    """Return whether the process that started this process by ``multiprocessing`` has exited.

    The pipe from that process does not always show it: siblings that were forked later have the other end, too.
    """
    starter = multiprocessing.parent_process()
    if starter is None or starter.pid is None:
        return False
    try:
        pidfd = os.pidfd_open(starter.pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # see `_pidfd_of`
        return False
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    try:
        return bool(poller.poll(0))
    finally:
        os.close(pidfd)


def _watch(signs: list[int], exact: bool, parent_pid: int) -> None:
    poller = select.poll()
    for sign in signs:
        poller.register(sign, select.POLLIN)
    while True:
        timeout = None if exact else _CHECK_MS
        for sign, event in poller.poll(timeout):
            if not event & select.POLLNVAL:
                _end()
            poller.unregister(sign)  # another part of the program has closed the descriptor
            exact = False
        if os.getppid() != parent_pid:
            _end()


def _end() -> NoReturn:
    os._exit(1)  # not a signal: the first process of a container ignores its own signals
