"""Threads that are waited for only while they live.

``threading.Thread.start`` waits until the new thread says that it has begun. One that cannot have the memory for its
first frame ends before, without a word, and whoever started it, an event loop maybe, would wait for ever.
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
    return thread


class _NeverBegun(Exception):
    pass


class _Thread(threading.Thread):
    # What the new thread runs, named so by CPython, which asks for it once: in `start`, just before the wait.
    @property
    def _bootstrap(self) -> Callable[[], None]:
        run = partial(super()._bootstrap)  # type: ignore[misc]
        self._started = _Beginning(weakref.ref(run))  # only the thread holds it, until it ends, however it does
        return run


class _Beginning(threading.Event):
    """Is set by a thread that has begun; a wait ends, too, when it has ended without: ``thread`` returns None then."""

    def __init__(self, thread: Callable[[], object]) -> None:
        super().__init__()
        self._thread = thread

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        while not super().wait(_LOOK_S):
            if self._thread() is None and not self.is_set():
                raise _NeverBegun
        return True


def _forget(thread: threading.Thread) -> None:
    # CPython lists threads that are about to begin, and would list this one for good.
    getattr(threading, "_limbo", {}).pop(thread, None)
