"""SIGTERM as the end of a task, with its clean-up."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE
from types import FrameType

from aioshm.process.limits import detach_when_forked

TERMINATED = 128 + signal.SIGTERM
"""The code of the SystemExit that SIGTERM raises, as shells name the signal."""


class Termination:
    """Lets SIGTERM end the task that makes this, with its clean-up, instead of the process.

    Only in the main thread, and if SIGTERM would end the process otherwise.

    Attributes:
        interrupts: Whether SIGTERM raises SystemExit in a task of the user's that holds up the loop.
        ignored: Whether the task ends by itself: the first SIGTERM does nothing then, the second ends the process.
    """

    def __init__(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._armed = self._signalled = self._came = self._raised = False
        self.interrupts: bool = False
        self.ignored: bool = False
        detach_when_forked(self)

    def arm(self) -> None:
        """Begin. Idempotent."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the loop's own handler drops it
            try:
                # The loop wakes up for a signal that comes just before it sleeps: Python alone would not notice.
                self._loop.add_signal_handler(signal.SIGTERM, self._come)
                signal.signal(signal.SIGTERM, self._interrupt)
                signal.siginterrupt(signal.SIGTERM, False)
                self._armed = True
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def disarm(self) -> None:
        """End. Idempotent."""
        if self._armed:
            self._armed = False
            self._loop.remove_signal_handler(signal.SIGTERM)

    @property
    def came(self) -> bool:
        """Whether SIGTERM has ended the task, or is about to."""
        return self._came

    def take_back(self) -> bool:
        """Tell whether SIGTERM has ended the task, and nothing else; take a cancellation back then. Ask once."""
        assert self._task is not None
        return self._came and (self._raised or self._task.uncancel() == 0)

    def detach_after_fork(self) -> None:
        """Let SIGTERM end a forked child, as its parent expects that."""
        if self._armed:
            self._armed = False
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _interrupt(self, _number: int, frame: FrameType | None) -> None:
        self._signalled = True
        if not self.interrupts or self._came or self.ignored or _returns_to_loop(frame):
            return
        if asyncio.current_task(self._loop) is not None:
            self._came = self._raised = True
            raise SystemExit(TERMINATED)

    def _come(self) -> None:
        if not self._signalled:  # a forked child got it, which shares the descriptor that wakes this loop
            return
        assert self._task is not None
        if self.ignored:
            self.disarm()
        elif not self._came:
            self._came = True
            self._task.cancel("SIGTERM")
        elif self._raised and self.interrupts:
            # The task goes on: Python ignored the SystemExit, as it does in destructors and in some callbacks.
            self._raised = False
            self._task.cancel("SIGTERM")


def _returns_to_loop(frame: FrameType | None) -> bool:
    """Tell whether asyncio, or a coroutine of aioshm, runs, and not a function of the user's.

    Both return to the loop soon. An exception there would tear them: a task whose `call_soon` raises never runs again.
    """
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == "asyncio":
            return True
        if package == "aioshm":
            if frame.f_code.co_flags & (CO_COROUTINE | CO_ASYNC_GENERATOR):
                return True
        elif package not in sys.stdlib_module_names:
            return False
        frame = frame.f_back
    return False
