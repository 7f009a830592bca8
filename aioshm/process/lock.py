"""A lock whose whole state is one attribute, so that an exception from a signal handler cannot leave it half acquired.

A handler may raise right after ``lock.acquire()`` has returned, before the ``try`` that would release the lock. CPython
runs handlers, and other threads, at calls and backward jumps only. So ``lock.owner = lock.owner or me`` is one step,
and so is ``lock.owner = lock.next_owner``. Code that acquires or releases a `ProcessLock` in a thread with handlers
writes these statements out instead of calling a method.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from contextlib import suppress
from threading import get_ident
from time import monotonic


class ProcessLock(ctypes.Structure):
    """A lock for the threads of a process. They acquire it in any order, but `next_owner` is always first.

    Args:
        recheck_s: How late a thread notices a free lock if a handler kept the last owner from waking other threads.

    Attributes:
        owner: The id of the thread that holds the lock; 0: none.
        next_owner: The id of the thread that acquires the lock next; 0: the first that tries. Only the background
            loop's thread uses this: handing the lock over at each release would cost a thread switch.
        waiting: One `threading.Lock` for each waiting thread, on which that thread sleeps.
    """

    # Two words of memory. The native core reads and writes them, too.
    _fields_ = (("owner", ctypes.c_ulong), ("next_owner", ctypes.c_ulong))
    owner: int
    next_owner: int

    def __init__(self, recheck_s: float) -> None:
        super().__init__()
        self._recheck_s = recheck_s
        self.waiting: deque[threading.Lock] = deque()

    def acquire(self, me: int, deadline: float | None = None) -> bool:
        """Acquire the lock; return False if the deadline passes first.

        Args:
            me: The id of the calling thread, which must not hold the lock yet.
            deadline: When to give up, by ``time.monotonic()``.
        """
        self.owner = self.owner or me
        while self.owner != me:
            if not self._wait(me, deadline):
                return False
            self.owner = self.owner or me
        return True

    def _wait(self, me: int, deadline: float | None = None) -> bool:
        """Wait until the lock may be free; return False if the deadline has passed."""
        left = self._recheck_s if deadline is None else min(self._recheck_s, deadline - monotonic())
        if left <= 0:
            return False
        sleeper = threading.Lock()
        sleeper.acquire()
        self.waiting.append(sleeper)
        try:
            if self.owner not in (0, me):
                sleeper.acquire(timeout=left)
        finally:
            with suppress(ValueError):
                self.waiting.remove(sleeper)
        return True

    def wake(self) -> None:
        """Wake every waiting thread, so that each tries to acquire the lock again."""
        for sleeper in list(self.waiting):
            with suppress(RuntimeError):  # another thread has released it just now
                sleeper.release()

    # For the background loop: its thread runs no signal handlers

    def acquire_first(self) -> None:
        """Acquire the lock before all other waiting threads."""
        me = get_ident()
        self.next_owner = me
        while (self.owner or me) != me:
            self._wait(me)
        self.owner = me
        self.next_owner = 0

    def release(self) -> None:
        """Release the lock, to `next_owner` if there is one, and wake waiting threads."""
        self.owner = self.next_owner
        if self.waiting:
            self.wake()
