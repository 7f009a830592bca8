"""A lock that an exception of a signal handler cannot leave half taken: its state is one attribute.

A handler may raise right after ``lock.acquire()`` has returned, before the ``try`` that would release the lock. CPython
runs handlers, and other threads, at calls and backward jumps only. So ``turn.user = turn.user or me`` is one step, and
so is ``turn.user = turn.heir``; whoever takes a turn or gives it back in a thread with handlers writes these statements
out instead of calling a method.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from contextlib import suppress
from threading import get_ident
from time import monotonic


class Turn(ctypes.Structure):
    """Lets one thread at a time do something; not fair, but for the heir.

    Args:
        recheck_s: How late a thread notices that the turn is free if a handler kept the last user from waking anybody.

    Attributes:
        user: The thread that has the turn; 0: none.
        heir: The thread that gets it next; 0: whichever is first. Only the background loop becomes the heir: handing
            each turn over would cost a switch of threads.
        waiting: A lock for each thread that waits, which it sleeps on.
    """

    # Two words of memory, which the native core reads and writes, too.
    _fields_ = (("user", ctypes.c_ulong), ("heir", ctypes.c_ulong))
    user: int
    heir: int

    def __init__(self, recheck_s: float) -> None:
        super().__init__()
        self._recheck_s = recheck_s
        self.waiting: deque[threading.Lock] = deque()

    def take(self, me: int, deadline: float | None = None) -> bool:
        """Wait for the turn; return False if it did not come in time.

        Args:
            me: The calling thread, which has not got the turn.
            deadline: When to give up, by ``time.monotonic()``.
        """
        self.user = self.user or me
        while self.user != me:
            if not self._wait(me, deadline):
                return False
            self.user = self.user or me
        return True

    def _wait(self, me: int, deadline: float | None = None) -> bool:
        """Wait until the turn may be free; return False if the deadline has passed."""
        left = self._recheck_s if deadline is None else min(self._recheck_s, deadline - monotonic())
        if left <= 0:
            return False
        bell = threading.Lock()
        bell.acquire()
        self.waiting.append(bell)
        try:
            if self.user not in (0, me):
                bell.acquire(timeout=left)
        finally:
            with suppress(ValueError):
                self.waiting.remove(bell)
        return True

    def wake(self) -> None:
        """Let every thread that waits look again."""
        for bell in list(self.waiting):
            with suppress(RuntimeError):  # another thread did it just now
                bell.release()

    # For the background loop, whose thread runs no handlers

    def inherit(self) -> None:
        """Take the turn as the heir."""
        me = get_ident()
        self.heir = me
        while (self.user or me) != me:
            self._wait(me)
        self.user = me
        self.heir = 0

    def give(self) -> None:
        """Give the turn back."""
        self.user = self.heir
        if self.waiting:
            self.wake()
