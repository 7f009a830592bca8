"""Limits of this process: file descriptors and threads; and both in a forked child.

libzmq aborts the process if it gets no descriptor or thread (``src/epoll.cpp``, ``src/thread.cpp``). So a context is
made after a check here: libzmq then gets them as well, unless another thread of this process is faster.
"""

from __future__ import annotations

import _thread
import errno
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from aioshm.errors import OutOfDescriptors, OutOfThreads

try:
    import resource
except ImportError:  # not on every platform that can import this package
    resource = None  # type: ignore[assignment]

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_NO_THREAD = "can't start new thread"  # the text of CPython's only RuntimeError about it
_THREADS_END_S = 1.0
_LOOK_S = 0.0002

SIGNAL_DESCRIPTORS = 1 if sys.platform == "linux" else 2
"""Descriptors by which libzmq wakes a thread: an eventfd, or a pair of sockets."""


def is_out_of_descriptors(error: BaseException) -> bool:
    """Return whether an error of the system or of ZeroMQ means that no descriptor is left."""
    return getattr(error, "errno", None) in _NO_DESCRIPTOR


def out_of_descriptors(what: str, number: int | None = None, needed: int | None = None) -> OutOfDescriptors:
    """Return the error: ``what`` needs ``needed`` of them; ``number`` is EMFILE (or None), or ENFILE."""
    number = errno.EMFILE if number is None else number
    more = "another file descriptor" if needed is None else f"{needed} more file descriptors"
    return OutOfDescriptors(number, f"{what} needs {more}, and {why_no_descriptor(number, 'this process')}")


def why_no_descriptor(number: int | None, whose: str) -> str:
    """Describe the limit of a process, and the remedy."""
    if number == errno.ENFILE:
        return "the whole system has as many files open as it may (fs.file-max): raise that, or close some elsewhere"
    soft, hard = (0, 0) if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"{whose} has too many open for its limit of {soft} (RLIMIT_NOFILE): raise that with `ulimit -n`, or from "
        f"inside with resource.setrlimit(), up to {hard}; or close what is not needed"
    )


def out_of_threads(what: str) -> OutOfThreads:
    """Return the error: ``what`` needs a thread, and none can be started."""
    return OutOfThreads(
        f"{what} needs another thread, and none can be started: raise `ulimit -u` (RLIMIT_NPROC), the container's "
        "pids limit, or the memory that this process may have (`ulimit -v`), or end other threads and processes"
    )


@contextmanager
def naming_limits(what: str) -> Iterator[None]:
    """Raise `OutOfDescriptors` or `OutOfThreads`, which ``what`` needs, from less clear errors of the block."""
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
        if is_out_of_descriptors(error):  # else there is no /dev/null, and nothing can be told
            raise out_of_descriptors(what, error.errno, count) from None
    finally:
        for each in taken:
            os.close(each)


class Reserve:
    """Descriptors for a part that cannot report that there are none. Raises `OutOfDescriptors`."""

    def __init__(self, what: str, count: int) -> None:
        self._kept: list[int] = []
        try:
            with naming_limits(what):
                while len(self._kept) < count:
                    self._kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            self.close()
            raise

    def spend(self) -> None:
        """Close one of them."""
        if self._kept:
            os.close(self._kept.pop())

    def close(self) -> None:
        """Close all. Idempotent."""
        while self._kept:
            self.spend()


def shortage(what: str) -> OutOfDescriptors | None:
    """Return the error if no descriptor is free, which ``what`` needs."""
    try:
        check_descriptors(what, 1)
    except OutOfDescriptors as error:
        return error
    return None


def check_threads(what: str, count: int) -> None:
    """Raise `OutOfThreads` unless this many threads can be started."""
    ended, started = _thread.allocate_lock(), []
    ended.acquire()

    def wait() -> None:
        started.append(_thread.get_native_id())
        with ended:
            pass

    begun = 0
    try:
        for _ in range(count):
            _thread.start_new_thread(wait, ())
            begun += 1
    except RuntimeError:
        raise out_of_threads(what) from None
    finally:
        ended.release()
        # The system counts them until they are really gone, which is a moment after Python has forgotten them.
        deadline = time.monotonic() + _THREADS_END_S
        while (len(started) < begun or any(map(_exists, started))) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)


def _exists(thread: int) -> bool:
    return Path(f"/proc/self/task/{thread}").exists()


class Inherited(Protocol):
    """An object of which a forked child has a useless copy."""

    def detach_after_fork(self) -> None:
        """Become useless in the child, without changing anything of the parent."""


_owners: weakref.WeakSet[Inherited] = weakref.WeakSet()


def detach_when_forked(owner: Inherited) -> None:
    """Call ``owner.detach_after_fork`` in forked children; holds ``owner`` weakly."""
    _owners.add(owner)


def _detach_all() -> None:
    for owner in list(_owners):
        owner.detach_after_fork()
    _owners.clear()


os.register_at_fork(after_in_child=_detach_all)


_LOOK_S = 0.05
"""How late it is noticed that a thread has ended before it began."""


def start_thread(
    target: Callable[..., object], *arguments: Any, name: str, what: str, daemon: bool = True
) -> threading.Thread:
    """Run ``target`` in a new thread, which ``what`` needs; raise `OutOfThreads` if it does not begin."""
    thread = _Thread(target=target, args=arguments, name=name, daemon=daemon)
    with naming_limits(what):
        try:
            thread.start()
        except _NeverBegun:
            _forget(thread)
            raise out_of_threads(what) from None
        except BaseException:  # of a signal handler
            if not thread.begins:
                _forget(thread)
            raise
    return thread


class _NeverBegun(Exception):
    pass


class _Thread(threading.Thread):
    @property
    def begins(self) -> bool:
        """Whether the thread has begun, or is about to."""
        return isinstance(self._started, _Beginning)

    # What the new thread runs, named so by CPython, which asks for it once: in `start`, just before the wait.
    @property
    def _bootstrap(self) -> Callable[[], None]:
        run = partial(super()._bootstrap)  # type: ignore[misc]
        self._started = _Beginning(weakref.ref(run))  # only the thread holds it, until it ends, however it does
        return run


class _Beginning(threading.Event):
    """Is set by a thread that has begun; a wait ends, too, when it has ended without: ``thread`` returns None then.

    An exception of a signal handler in `threading.Event.wait` would leave a lock there that `set` waits for.
    """

    def __init__(self, thread: Callable[[], object]) -> None:
        super().__init__()
        self._thread = thread
        self._begun = False
        self._beginning = threading.Lock()
        self._beginning.acquire()

    def is_set(self) -> bool:
        return self._begun

    def set(self) -> None:
        self._begun = True
        self._beginning.release()

    def wait(self, timeout: float | None = None) -> bool:
        while not self._begun and not self._beginning.acquire(timeout=_LOOK_S if timeout is None else timeout):
            if timeout is not None:
                break
            if self._thread() is None and not self._begun:
                raise _NeverBegun
        return self._begun


def _forget(thread: threading.Thread) -> None:
    # CPython lists threads that are about to begin, and would list this one for good.
    getattr(threading, "_limbo", {}).pop(thread, None)
