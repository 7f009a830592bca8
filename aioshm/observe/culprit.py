"""Who holds a queue up, and in which line of code."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from aioshm.errors import HandleError
from aioshm.observe.proc import ProcessInfo, process_info, system_call, wait_channel
from aioshm.observe.scan import QueueNotFound, RingFile, chosen, find_rings
from aioshm.observe.snapshot import QueueSnapshot
from aioshm.observe.stacks import LOOP_WAITS, Frame, Stack, stacks_of, users_line
from aioshm.observe.verdict import Doing, Suspect, suspects

_TRIES, _PAUSE_S = 5, 0.01
"""How often the stack of what is slow is looked at: it may be in its loop just then."""

WINDOW_S = 0.25
"""Between two looks: a reader that takes nothing for so long is called blocked."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a queue up.

    Attributes:
        queue: The queue.
        suspects: Who does, the gravest first; empty: it moves.
        messages_per_s: Published meanwhile.
    """

    queue: QueueSnapshot
    suspects: tuple[Suspect, ...]
    messages_per_s: float


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a process does that has no queue.

    Attributes:
        process: The process.
        doing: What the kernel says of it.
        line: The line of code of its user that it is in, if that is known.
        stacks: Its stacks, if they are known.
        hint: Why they are not.
    """

    process: ProcessInfo
    doing: Doing
    line: Frame | None
    stacks: tuple[Stack, ...]
    hint: str


def who(key: str | None = None, *, window_s: float = WINDOW_S) -> tuple[Report, ...]:
    """Find out who holds a queue up; nothing is stopped or signalled for it.

    Args:
        key: The queue's name, id, beginning of its id, or the pid of one of its ends, which may have several; None:
            every queue.
        window_s: Seconds between the two looks that this takes.

    Raises:
        NoProc: There is no ``/proc``.
        QueueNotFound: There is no such queue; the text lists what there is.
    """
    rings, _ = find_rings()
    try:
        looks = list(_look(rings))
        if key is not None:
            wanted = _wanted(key, [queue for _, queue in looks])
            looks = [(ring, queue) for ring, queue in looks if queue.header.queue_id in wanted]
        time.sleep(window_s)
        processes: dict[int, ProcessInfo] = {}
        reports = []
        for ring, before in looks:
            with suppress(OSError, HandleError):
                reports.append(_report(ring, before, ring.snapshot(processes)))
        return tuple(reports)
    finally:
        for ring in rings:
            ring.close()


def process_report(pid: int) -> ProcessReport:
    """Return what a process does, whether it has a queue or not."""
    line, stacks, hint = _line_of(pid, 1)
    return ProcessReport(process=process_info(pid), doing=doing(pid), line=line, stacks=stacks, hint=hint)


def doing(pid: int) -> Doing:
    """Return what the kernel says of a process."""
    return Doing(wait_channel(pid), system_call(pid))


def _look(rings: list[RingFile]) -> Iterator[tuple[RingFile, QueueSnapshot]]:
    processes: dict[int, ProcessInfo] = {}
    for ring in rings:
        with suppress(OSError, HandleError):
            yield ring, ring.snapshot(processes)


def _wanted(key: str, queues: list[QueueSnapshot]) -> set[str]:
    if key.isdigit() and (
        of_pid := {q.header.queue_id for q in queues if int(key) in [end.pid for end in q.ends if end.there]}
    ):
        return of_pid
    return {chosen(key, queues).header.queue_id}


def _report(ring: RingFile, before: QueueSnapshot, now: QueueSnapshot) -> Report:
    keeping, awaited = _flags(ring, now)
    found = suspects(before, now, keeping, awaited, {end.pid: doing(end.pid) for end in now.ends if end.pid})
    seconds = max((now.taken_ns - before.taken_ns) / 1e9, 1e-9)
    published = now.writer.messages - before.writer.messages
    return Report(queue=now, suspects=tuple(map(_seen, found)), messages_per_s=max(0, published) / seconds)


def _flags(ring: RingFile, now: QueueSnapshot) -> tuple[list[int], list[int]]:
    """Return the places whose readers keep a parked writer waiting, and the vacant ones that are waited for."""
    layout, header = ring.layout, now.header
    keeping: list[int] = []
    if header.writer.parked:
        flags = ring.read(layout.flags(header.writer.wants % layout.slots), layout.flag_bytes)
        keeping = [place for place, read in enumerate(flags[1:]) if flags[0] and not read]
    row = ring.read(layout.flags(0), layout.flag_bytes)  # of a place that nobody waits for, the flags are up
    vacant = [end.membership == "absent" and not read for end, read in zip(now.readers, row[1:], strict=True)]
    return keeping, [place for place, is_vacant in enumerate(vacant) if is_vacant]


def _seen(suspect: Suspect) -> Suspect:
    """Add the stacks of its process."""
    if not suspect.pid or suspect.kind == "gone":
        return suspect
    tries = _TRIES if suspect.kind == "slow" else 1
    line, stacks, hint = _line_of(suspect.pid, tries)
    return msgspec.structs.replace(suspect, stacks=stacks, line=line, hint=hint)


def _line_of(pid: int, tries: int) -> tuple[Frame | None, tuple[Stack, ...], str]:
    """Return the line of its user's code that a process is in, its stacks, and what is to be said of them."""
    for _ in range(tries):
        stacks, hint = stacks_of(pid)
        line = users_line(stacks)
        if line is not None or not stacks:
            return line, stacks, hint
        time.sleep(_PAUSE_S)
    line = users_line(stacks, beyond_loops=True)
    return line, stacks, LOOP_WAITS if line is not None else hint


__all__ = ["ProcessReport", "QueueNotFound", "Report", "doing", "process_report", "who"]
