"""Whose turn it is among the threads that use one end whose calls block."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioshm.errors import AioshmError
    from aioshm.queue.ends.gate import Gate

QUICK_RECHECK_S = 0.001
"""How often a thread looks whether it is its turn while a core passes a message at once, which tells nobody."""

RECHECK_S = 0.1
"""The same while a thread has the turn that tells when it ends, and could be kept from telling by a signal handler."""


class Turns:
    """Lets the threads that use an end do so one at a time; first come, first served, as a rule.

    Whose turn it is stands in the end's core (``user``), because `send` and `receive` take and end theirs without
    coming here. Other threads, and signal handlers, run only where Python makes a call or jumps back: what is written
    here without one, between looking at ``user`` and setting it, cannot be interrupted.

    Args:
        gate: The end's.

    Attributes:
        lasting: Whether a thread has a turn that `give` will end, which may take as long as a call waits.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._waiting: deque[threading.Lock] = deque()
        self.lasting: bool = False

    def take(self, deadline: float | None = None, busy: type[AioshmError] | None = None) -> bool:
        """Wait for this thread's turn, which lasts until `give`; return False if it has it already.

        Args:
            deadline: When to give up, by ``time.monotonic()``.
            busy: What to raise instead of waiting for a turn that may last; None: wait for any.

        Raises:
            TimeoutError: The deadline, has passed.
            AioshmError: The end refuses every call by now.
        """
        me = get_ident()
        while True:
            core = self._gate.core
            if not core.user:
                core.user = me
                self.lasting = True
                return True
            if core.user == me:
                return False
            self._gate.check_refusal()
            if busy is not None and self.lasting:
                raise busy(f"{self._gate!r}: another thread waits here, or is in a block that has a slot")
            self.wait(deadline)

    def take_now(self) -> bool:
        """Begin this thread's turn if it is nobody's."""
        me = get_ident()
        core = self._gate.core
        if core.user:
            return False
        core.user = me
        self.lasting = True
        return True

    def wait(self, deadline: float | None = None) -> None:
        """Wait until whose turn it is has changed, or may have.

        Raises:
            TimeoutError: The deadline has passed.
        """
        recheck = RECHECK_S if self.lasting else QUICK_RECHECK_S
        left = recheck if deadline is None else min(recheck, deadline - monotonic())
        if left <= 0:
            raise TimeoutError(f"{self._gate!r}: another thread's call, or its block, did not end in time")
        bell = threading.Lock()
        bell.acquire()
        self._waiting.append(bell)
        try:
            bell.acquire(timeout=left)
        finally:
            self._waiting.remove(bell)

    @property
    def mine(self) -> bool:
        """Whether this thread has the turn."""
        return self._gate.core.user == get_ident()

    def wake(self) -> None:
        """Let every waiting thread look again."""
        for bell in list(self._waiting):
            with suppress(RuntimeError):  # another thread did it just now
                bell.release()
