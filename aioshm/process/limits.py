"""Limits of this process on file descriptors and threads, and objects that a forked child has to detach.

libzmq aborts the process if it gets no descriptor or thread (``src/epoll.cpp``, ``src/thread.cpp``). So a check here
comes before each ZeroMQ context: libzmq then gets both as well, unless another thread of this process takes them first.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from aioshm.errors import OutOfDescriptors, OutOfThreads

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_NO_THREAD = "can't start new thread"  # the text of CPython's only RuntimeError about it
_THREADS_END_S = 1.0
_RECHECK_S = 0.0002

SIGNAL_DESCRIPTORS = 1 if sys.platform == "linux" else 2
"""Descriptors by which libzmq wakes a thread: an eventfd, or a pair of sockets."""


def is_out_of_descriptors(error: BaseException) -> bool:
    """Return whether an error of the system or of ZeroMQ means that no descriptor is left."""
    return getattr(error, "errno", None) in _NO_DESCRIPTOR


def out_of_descriptors(what: str, number: int | None = None, needed: int | None = None) -> OutOfDescriptors:
    """Return the error for ``what``, which needs ``needed`` descriptors; ``number`` is EMFILE (or None) or ENFILE."""
    if number is None:
        number = errno.EMFILE
    more = "another file descriptor" if needed is None else f"{needed} more file descriptors"
    return OutOfDescriptors(number, f"{what} needs {more}, and {why_no_descriptor(number, 'this process')}")


def why_no_descriptor(number: int | None, process: str) -> str:
    """Describe the limit of a process, and the remedy."""
    if number == errno.ENFILE:
        return "the whole system has as many files open as fs.file-max allows: raise fs.file-max, or close some files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"{process} has reached its limit of {soft} open files (RLIMIT_NOFILE): raise the limit with `ulimit -n`, or "
        f"in the program with resource.setrlimit(), up to {hard}; or close unused files"
    )


def out_of_threads(what: str) -> OutOfThreads:
    """Return the error for ``what``, which needs a thread that cannot be started."""
    return OutOfThreads(
        f"{what} needs another thread, and none can be started: raise `ulimit -u` (RLIMIT_NPROC), the container's "
        "pids limit, or the memory limit of this process (`ulimit -v`), or end other threads and processes"
    )


@contextmanager
def naming_limits(what: str) -> Iterator[None]:
    """Translate errors about descriptors and threads in the block to `OutOfDescriptors` and `OutOfThreads`."""
    try:
        yield
    except (OutOfDescriptors, OutOfThreads):
        raise
    except RuntimeError as error:
        if str(error) != _NO_THREAD:
            raise
        raise out_of_threads(what) from error
    except Exception as error:
        if not is_out_of_descriptors(error):
            raise
        raise out_of_descriptors(what, error.errno) from error  # type: ignore[attr-defined]


def check_descriptors(what: str, count: int) -> None:
    """Raise `OutOfDescriptors` unless this many descriptors are free."""
    taken: list[int] = []
    try:
        for _ in range(count):
            taken.append(os.dup(taken[0]) if taken else os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if is_out_of_descriptors(error):  # without /dev/null nothing is known
            raise out_of_descriptors(what, error.errno, count) from None
    finally:
        for fd in taken:
            os.close(fd)


def shortage(what: str) -> OutOfDescriptors | None:
    """Return the error for ``what`` if no descriptor is free."""
    try:
        check_descriptors(what, 1)
    except OutOfDescriptors as error:
        return error
    return None


def check_threads(what: str, count: int) -> None:
    """Raise `OutOfThreads` unless this many threads can be started."""
    end = threading.Event()
    threads: list[threading.Thread] = []
    try:
        while len(threads) < count:
            threads.append(start_thread(end.wait, name="aioshm-check", what=what))
    finally:
        end.set()
        for thread in threads:
            thread.join()
        # The kernel counts a thread a moment longer than Python does.
        deadline = time.monotonic() + _THREADS_END_S
        while any(map(_exists, threads)) and time.monotonic() < deadline:
            time.sleep(_RECHECK_S)


def _exists(thread: threading.Thread) -> bool:
    return Path(f"/proc/self/task/{thread.native_id}").exists()


class Reserve:
    """Descriptors held for code that cannot report their lack. Raises `OutOfDescriptors`."""

    def __init__(self, what: str, count: int) -> None:
        self._held: list[int] = []
        try:
            with naming_limits(what):
                while len(self._held) < count:
                    self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            self.close()
            raise

    def spend(self) -> None:
        """Close one descriptor."""
        if self._held:
            os.close(self._held.pop())

    def close(self) -> None:
        """Close all descriptors. Idempotent."""
        while self._held:
            self.spend()


class Inherited(Protocol):
    """An object whose copy in a forked child is useless."""

    def detach_after_fork(self) -> None:
        """Make the child's copy useless, without a change to the parent's object."""


_owners: weakref.WeakSet[Inherited] = weakref.WeakSet()


def detach_when_forked(owner: Inherited) -> None:
    """Call ``owner.detach_after_fork`` in forked children; holds ``owner`` weakly."""
    _owners.add(owner)


def _detach_all() -> None:
    for owner in list(_owners):
        owner.detach_after_fork()
    _owners.clear()


os.register_at_fork(after_in_child=_detach_all)


def start_thread(
    target: Callable[..., object], *arguments: Any, name: str, what: str, daemon: bool = True
) -> threading.Thread:
    """Run ``target`` in a new thread for ``what``; raise `OutOfThreads` if the thread cannot be started."""
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=daemon)
    with naming_limits(what):
        thread.start()
    return thread
