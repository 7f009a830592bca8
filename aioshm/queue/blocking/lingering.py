"""Waiting a moment for a message outside of the loop, which takes its time to begin and to end."""

from __future__ import annotations

import os
from time import monotonic_ns
from typing import cast

from aioshm.queue.ends.reading import ReadingEnd
from aioshm.ring.reader_core import ReaderCore
from aioshm.wait.blocking import NEVER_NS, BlockingPoller


def linger(reader: ReadingEnd, left: float | None) -> bool:
    """Wait for a message that comes soon, handing the CPU on after each look; return whether one did.

    Args:
        reader: Reads a ring.
        left: For so many seconds at most; not checked so far.
    """
    core = cast(ReaderCore, reader.gate.core)
    if not core.passes():  # as it does now and then, so that the loop has its turn
        return False
    waker = reader.source.waker
    if waker is not None and waker.pending:  # which the loop was to do
        waker.wake()
    began = now = monotonic_ns()
    until_ns: float = now + reader.linger_ns
    if isinstance(left, (int, float)):
        until_ns = min(until_ns, now + left * 1e9)
    while core.open and now < until_ns:
        os.sched_yield()
        if core.ready() or (core.spin_ns > 0 and core.spin(core.spin_ns)):
            return True
        now = monotonic_ns()
    poller = reader.gate.poller
    if isinstance(poller, BlockingPoller):
        poller.lingered(began)
    return False


def watch(reader: ReadingEnd, left: float | None) -> None:
    """Wait, outside of the loop, for the message that `WindowBegins` told of, for so many seconds at most."""
    poller, core = reader.gate.poller, cast(ReaderCore, reader.gate.core)
    assert isinstance(poller, BlockingPoller)
    until_ns = NEVER_NS if left is None else monotonic_ns() + int(left * 1e9)
    poller.watch(lambda: core.ready() or not core.open, until_ns)
