"""A lock whose whole state is one attribute, so that an exception from a signal handler cannot leave it half acquired.

A handler may raise right after ``lock.acquire()`` has returned, before the ``try`` that would release the lock. CPython
runs handlers, and other threads, at calls and backward jumps only. So ``turn.user = turn.user or me`` is one step, and
so is ``turn.user = turn.heir``. Code that acquires or releases a `Turn` in a thread with handlers writes these
statements out instead of calling a method.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from contextlib import suppress
from threading import get_ident
from time import monotonic


class Turn(ctypes.Structure):
    """A lock for threads. Waiting threads acquire it in any order, except that the heir is always next.

    Args:
        recheck_s: How late a thread notices a free lock if a handler kept the last user from waking other threads.

    Attributes:
        user: The id of the thread that holds the lock; 0: none.
        heir: The id of the thread that acquires the lock next; 0: the first that tries. Only the background loop's
            thread becomes the heir: handing the lock over at each release would cost a thread switch.
        waiting: One `threading.Lock` for each waiting thread, on which that thread sleeps.
    """

    # Two words of memory. The native core reads and writes them, too.
    _fields_ = (("user", ctypes.c_ulong), ("heir", ctypes.c_ulong))
    user: int
    heir: int

    def __init__(self, recheck_s: float) -> None:
        super().__init__()
        self._recheck_s = recheck_s
        self.waiting: deque[threading.Lock] = deque()

    def take(self, me: int, deadline: float | None = None) -> bool:
        """Acquire the lock; return False if the deadline passes first.

        Args:
            me: The id of the calling thread, which must not hold the lock yet.
            deadline: When to give up, by ``time.monotonic()``.
        """
        self.user = self.user or me
        while self.user != me:
            if not self._wait(me, deadline):
                return False
            self.user = self.user or me
        return True

    def _wait(self, me: int, deadline: float | None = None) -> bool:
        """Wait until the lock may be free; return False if the deadline has passed."""
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
        """Wake every waiting thread, so that each tries to acquire the lock again."""
        for bell in list(self.waiting):
            with suppress(RuntimeError):  # another thread has released it just now
                bell.release()

    # For the background loop: its thread runs no signal handlers

    def inherit(self) -> None:
        """Acquire the lock before all other waiting threads."""
        me = get_ident()
        self.heir = me
        while (self.user or me) != me:
            self._wait(me)
        self.user = me
        self.heir = 0

    def give(self) -> None:
        """Release the lock, to the heir if there is one, and wake waiting threads."""
        self.user = self.heir
        if self.waiting:
            self.wake()
