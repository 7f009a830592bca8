"""A process that no other process of its host watches watches itself, in a thread."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from contextlib import suppress
from typing import Self

from aioshm.process.limits import start_thread
from aioshm.process.progress import ENDING, own
from aioshm.process.stacks import process_report, stacks_of_thread
from aioshm.process.stalls import LOOK_S, Judge

logger: logging.Logger = logging.getLogger("aioshm.engine")

_ENDS_WITHIN_S = 1.0


class SelfWatch:
    """Logs, while the block runs, that this process makes no progress, with the line of the calling thread.

    A hang that holds the GIL stops the watching thread, too: then ``faulthandler`` writes all stacks to the standard
    error. A stop of the process that is longer than the limit has the same effect.
    """

    def __init__(self, name: str, warning_s: float) -> None:
        self._name = name
        self._warning_s = warning_s
        self._interval_s = min(LOOK_S, warning_s / 4)
        self._armed_until = 0.0  # until then `faulthandler` waits, by the monotonic clock
        self._ends = threading.Event()

    def __enter__(self) -> Self:
        self._watched = threading.get_ident()
        self._thread = start_thread(self._run, name="aioshm-watches-itself", what=f"the watch over {self._name}")
        own().on_expect.add(self.arm)
        _running.add(self)
        self.arm()
        return self

    def __exit__(self, *_: object) -> None:
        _running.discard(self)
        own().on_expect.discard(self.arm)
        self._ends.set()
        self._thread.join(_ENDS_WITHIN_S)
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        judge = Judge(self._warning_s)
        stalled = False
        last = time.monotonic()
        while not self._ends.wait(self._interval_s):
            now = time.monotonic()
            # As in `ProgressWatch`: time counts only while this thread runs.
            late = judge.look(min(now - last, 2 * self._interval_s), own().read())
            last = now
            if self._armed_until - now < self._warning_s:
                self.arm()
            if stalled and not late:
                logger.info("%s (pid %d) makes progress again", self._name, os.getpid())
            stalled = late
            if late and judge.report_is_due():
                self._report(judge.without_progress_s)

    def arm(self) -> None:
        """Let `faulthandler` write the stacks in a while, unless this is called again before."""
        sample = own().read()
        if sample.phase == ENDING:
            return
        within_s = max(1.5 * self._warning_s, sample.expected_s + self._warning_s)
        self._armed_until = time.monotonic() + within_s
        # The standard error may have no descriptor.
        with _forking, suppress(OSError, ValueError, RuntimeError, AttributeError):
            faulthandler.dump_traceback_later(within_s)

    def _report(self, seconds: float) -> None:
        pid = os.getpid()
        where = process_report(pid, stacks_of_thread(self._watched), "").describe()
        logger.warning("%s (pid %d) is stalled: no progress for %.0f s: %s", self._name, pid, seconds, where)


_running: set[SelfWatch] = set()
_forking = threading.Lock()  # nothing is armed meanwhile


def _before_fork() -> None:
    # A forked child has no thread of `faulthandler`, and would wait for it when Python ends.
    _forking.acquire()
    if _running:
        faulthandler.cancel_dump_traceback_later()


def _in_child() -> None:
    _running.clear()
    _forking.release()


def _in_parent() -> None:
    _forking.release()
    for each in tuple(_running):
        each.arm()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
