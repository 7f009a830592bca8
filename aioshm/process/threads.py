"""Starts threads without waiting for ever for one that has no memory to begin.

``threading.Thread.start`` waits until the new thread has begun. A thread without memory for its first frame ends before
that, silently, and the caller, maybe an event loop, would wait for ever.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from aioshm.process.limits import naming_limits, out_of_threads

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
