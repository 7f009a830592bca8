"""Deadlines, and the poller that an end waits with."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from time import monotonic

from aioshm.config import Options, check_bool, check_timeout, shown
from aioshm.lifeline.bell import Bell
from aioshm.ring import RingReader, RingWriter
from aioshm.wait.cpus import usable_cpus
from aioshm.wait.poller import Poller
from aioshm.wait.predictor import Predictor
from aioshm.wait.threads import ThreadPoller


def new_poller(
    loop: asyncio.AbstractEventLoop,
    options: Options,
    cursor: RingWriter | RingReader,
    others: Sequence[int],
    spin: Callable[[int], bool],
    bell: Bell | None,
    wake_peers: Callable[[], object] | None,
) -> Poller:
    """Make the poller of an end; ``others``: the peers' pids, 0 where unknown."""
    told = cursor.costs if isinstance(cursor, RingReader) else None
    tell = cursor.set_costs if isinstance(cursor, RingWriter) else None
    if wake_peers is None:
        predictor = predictor_among(others, options)
        return Poller(loop, cursor.parked, predictor, options.wait, spin, told, tell, crowded=predictor.crowded)
    predictor, bells = predictor_among(others, options, yields=True), () if bell is None else (bell,)
    if bell is not None:
        loop.remove_reader(bell.fd)  # the thread that waits polls it
    return ThreadPoller(loop, cursor.parked, predictor, options.wait, spin, bells, wake_peers, told, tell)


def predictor_among(others: Sequence[int], options: Options, *, yields: bool = False) -> Predictor:
    """Return the predictor of an end that may yield, as threads do; ``others``: the peers' pids, 0 where unknown."""
    # Ends of one process hand over to each other through its event loop, or its GIL: spinning would keep both.
    apart = _apart(others)
    own = os.getpid() if yields else 0  # it is the threads of the program that wait, and not this one, the loop's
    cpus = usable_cpus(own=own, pids=[pid for pid in others if pid > 0])
    return Predictor(
        may_spin=apart and cpus > 1,
        crowded=apart and 1 + len(others) > cpus,
        yields=yields,
        crowd=0 if yields else 1 + len(others),
        max_spin_cpu=options.max_spin_cpu,
    )


def deadline_after(
    timeout: float | None, cancel: asyncio.Event | None = None, indefinite: bool = False
) -> float | None:
    """Return the deadline, by ``time.monotonic()``, of a wait with checked arguments."""
    if timeout is None and cancel is None and indefinite is False:
        return None
    seconds = check_timeout("timeout", timeout)
    if cancel is not None and not isinstance(cancel, asyncio.Event):
        raise TypeError(f"cancel must be an asyncio.Event or None, not {shown(cancel)}")
    check_bool("indefinite", indefinite)
    return None if seconds is None else monotonic() + seconds


def _apart(others: Sequence[int]) -> bool:
    return os.getpid() not in others
