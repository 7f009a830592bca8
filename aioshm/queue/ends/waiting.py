"""Deadlines, and the poller that an end waits with."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

from aioshm.config import Options, check_bool, check_timeout, shown
from aioshm.lifeline.bell import Bell
from aioshm.ring import RingReader, RingWriter
from aioshm.wait.blocking import BlockingLoop, BlockingPoller
from aioshm.wait.cpus import usable_cpus
from aioshm.wait.poller import Poller
from aioshm.wait.predictor import Predictor


class _Owner(Protocol):
    """What a poller waits for: anything that is hashed by identity, and lives as long as its poller is needed."""


_others: weakref.WeakKeyDictionary[_Owner, set[int]] = weakref.WeakKeyDictionary()
"""The processes at the other ends of this process' queues, of those whose calls block."""


def new_poller(
    owner: _Owner,
    loop: asyncio.AbstractEventLoop,
    options: Options,
    cursor: RingWriter | RingReader,
    others: Sequence[int],
    spin: Callable[[int], bool],
    bell: Bell | None,
) -> Poller:
    """Make what an end of a ring waits with, now that the other ends are known.

    Args:
        owner: Lives as long as the end.
        loop: The end's.
        options: The end's.
        cursor: Its cursor.
        others: The process of each other end that it has to do with, 0 where that is not known.
        spin: As for `Poller`.
        bell: What they wake it by, if it is that.
    """
    told = cursor.costs if isinstance(cursor, RingReader) else None
    tell = cursor.set_costs if isinstance(cursor, RingWriter) else None
    if not isinstance(loop, BlockingLoop):
        predictor, bells = predictor_among(others, options), () if bell is None else (bell,)
        return Poller(loop, cursor.parked, predictor, options.wait, spin, told, tell, bells, crowded=predictor.crowded)
    # Its spins are for an answer, whichever end that comes to: every other end that is under way needs a CPU too.
    _others[owner] = {pid for pid in others if pid > 0}
    # By references: other threads add ends meanwhile, which would end an iteration over the values with an error.
    owners = [owner for reference in _others.keyrefs() if (owner := reference()) is not None]
    processes = {*others}.union(*(_others.get(owner, ()) for owner in owners))
    predictor = predictor_among(others, options, ends=1 + len(processes), yields=True)
    return BlockingPoller(
        loop, cursor.parked, predictor, options.wait, spin, bell, crowded=predictor.crowded, told=told, tell=tell
    )


def predictor_among(
    others: Sequence[int], options: Options, *, ends: int | None = None, yields: bool = False
) -> Predictor:
    """Return what decides how an end waits for others.

    Args:
        others: The process of each, 0 where that is not known.
        options: The end's.
        ends: How many want a CPU, this end included; None: this end and the others.
        yields: Whether it hands its CPU on while it spins.
    """
    # Ends of one process hand over to each other through its event loop, or its GIL: spinning would keep both.
    apart, cpus = _apart(others), _cpus_of(others)
    return Predictor(
        may_spin=apart and cpus > 1,
        crowded=apart and (1 + len(others) if ends is None else ends) > cpus,
        yields=yields,
        crowd=0 if yields else 1 + len(others),
        max_spin_cpu=options.max_spin_cpu,
    )


def deadline_after(
    timeout: float | None, cancel: asyncio.Event | None = None, indefinite: bool = False
) -> float | None:
    """Return the deadline, by ``time.monotonic()``, of a wait of ``timeout`` seconds, whose arguments are checked.

    Raises:
        TypeError, ValueError: One of them is not what it has to be; the text names it.
    """
    if timeout is None and cancel is None and indefinite is False:
        return None
    seconds = check_timeout("timeout", timeout)
    if cancel is not None and not isinstance(cancel, asyncio.Event):
        raise TypeError(f"cancel must be an asyncio.Event or None, not {shown(cancel)}")
    check_bool("indefinite", indefinite)
    return None if seconds is None else monotonic() + seconds


def _apart(others: Sequence[int]) -> bool:
    return os.getpid() not in others


def _cpus_of(others: Sequence[int]) -> int:
    return usable_cpus(pids=[pid for pid in others if pid > 0])
