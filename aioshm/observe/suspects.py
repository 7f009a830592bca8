"""Finds the process that holds a queue up, and its line of code: `who` reads, `suspects` decides without I/O."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Literal, TypeAlias

import msgspec

from aioshm.errors import HandleError
from aioshm.observe.queues import End, QueueSnapshot, Ring, Watch, chosen
from aioshm.process.proc import wait_channel
from aioshm.process.stacks import Frame, Stack, spied_report

Kind = Literal["gone", "stopped", "absent", "blocked", "slow", "writer blocked", "writer idle"]

GRAVE: tuple[Kind, ...] = ("gone", "stopped", "absent", "blocked", "slow", "writer blocked")
"""Kinds that hold a queue up, the worst first. An idle writer does not: it may have nothing to send."""

LONG_LAG = 0.5
"""A share of the ring's slots: a reader with a larger lag that does not shrink is slow."""

WINDOW_S = 0.25
"""Seconds between two snapshots: a reader that takes no message in this time is called blocked."""

_TRIES = 5
"""Reads of the stack of a slow process: its event loop may wait at the moment of one read."""
_STOPPED = {
    "stopped": "its process is stopped (SIGSTOP or Ctrl-Z): kill -CONT continues it",
    "tracing-stop": "its process is stopped by a debugger",
    "frozen": "its process is frozen, with its cgroup",
}


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """An end that holds a queue up.

    Attributes:
        kind: The kind of trouble.
        side: ``"writer"`` or ``"reader"``.
        rank: The reader's, or -1.
        pid: The pid of its process; 0: no process yet.
        state: The state of the process.
        command: Its command line.
        text: The trouble, in words.
        wait_channel: The kernel function in which the process sleeps; empty: it runs, or the function is not known.
        line: The line of the user's code that it executes, if known.
        stacks: The stacks of its threads, if known.
        hint: Why the stacks are unknown, and what to do; empty otherwise.
    """

    kind: Kind
    side: str
    rank: int
    pid: int
    state: str
    command: str
    text: str
    wait_channel: str
    line: Frame | None = None
    stacks: tuple[Stack, ...] = ()
    hint: str = ""

    @property
    def grave(self) -> bool:
        """Whether the queue is held up; an idle writer may have nothing to send."""
        return self.kind in GRAVE


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The ends that hold a queue up.

    Attributes:
        queue: The queue.
        suspects: These ends, the gravest first; empty: the queue moves.
        held_up: Whether an end holds the queue up: the first of the suspects, at least.
    """

    queue: QueueSnapshot
    suspects: tuple[Suspect, ...]
    held_up: bool


_Found: TypeAlias = tuple[Kind, End, str]


def suspects(
    before: QueueSnapshot,
    now: QueueSnapshot,
    keeping: Collection[int],
    awaited: Collection[int],
    channels: Mapping[int, str],
) -> tuple[Suspect, ...]:
    """Return the ends that hold a queue up, the gravest first; none if the queue moves.

    Args:
        before: An earlier snapshot of the same queue.
        now: The snapshot to judge.
        keeping: Indices of readers that a parked writer waits for.
        awaited: Indices of vacant readers that the writer waits for.
        channels: The kernel functions in which processes sleep, by pid.
    """
    found = list(_hung(now))
    found += [("absent", now.readers[place], "no process has attached yet") for place in sorted(awaited)]
    seconds = max((now.taken_ns - before.taken_ns) / 1e9, 1e-9)
    for place, (then, reader) in enumerate(zip(before.readers, now.readers, strict=True)):
        if reader.there and not reader.hangs:
            found += _behind(now, then, reader, place in keeping, seconds, channels.get(reader.pid, ""))
    if not found:
        found += _silent(before, now, channels.get(now.writer.pid, ""))
    order = [*GRAVE, "writer idle"]
    return tuple(
        Suspect(
            kind=kind,
            side=end.side,
            rank=end.rank,
            pid=end.pid,
            state=end.state,
            command=end.command,
            text=text,
            wait_channel=channels.get(end.pid, ""),
        )
        for kind, end, text in sorted(found, key=lambda each: (order.index(each[0]), each[1].rank))
    )


def _hung(now: QueueSnapshot) -> Iterator[_Found]:
    """Find the ends of processes that do not run."""
    for end in now.ends:
        if not end.hangs or not end.pid:
            continue
        if end.state in _STOPPED:
            yield "stopped", end, _STOPPED[end.state]
        elif end.state == "disk-sleep":
            kind: Kind = "writer blocked"
            if end.side == "reader":
                kind = "blocked"
            yield kind, end, "its process waits for a disk"
        else:
            held = ", and its place is held for another one" * (end.membership == "held")
            yield "gone", end, f"its process is gone{held}"


def _behind(now: QueueSnapshot, then: End, reader: End, keeps: bool, seconds: float, channel: str) -> Iterator[_Found]:
    """Find out whether a reader with a lag holds the queue up."""
    taken = reader.messages - then.messages
    if not reader.lag or not (keeps or then.lag):
        return
    behind = f"{reader.lag} message{'s' * (reader.lag != 1)} behind"
    if taken <= 0:
        yield "blocked", reader, f"took nothing in the last {seconds:.1f} s, {behind}: {_why(reader, channel)}"
    elif keeps or (reader.lag >= then.lag and reader.lag > LONG_LAG * now.header.slots):
        yield "slow", reader, f"takes {taken / seconds:,.0f} messages a second, {behind}"


def _silent(before: QueueSnapshot, now: QueueSnapshot, channel: str) -> Iterator[_Found]:
    """Find out why a writer publishes nothing although its readers have read everything."""
    writer = now.writer
    if not writer.there or writer.pid == 0 or writer.messages > before.writer.messages:
        return
    if writer.state != "running" and (not channel or _loop_waits(channel)):  # unknown if it woke up meanwhile
        yield "writer idle", writer, "has nothing to publish" + ": its event loop waits" * bool(channel)
        return
    seconds = (now.taken_ns - before.taken_ns) / 1e9
    yield "writer blocked", writer, f"has published nothing for {seconds:.1f} s: {_why(writer, channel)}"


def _why(end: End, channel: str) -> str:
    if end.state == "running":
        return "its code keeps the CPU"
    if _loop_waits(channel):
        return "its event loop waits for something else"
    return f"it is blocked in {channel}".removesuffix(" in ")


def _loop_waits(channel: str) -> bool:
    """Return whether an idle event loop sleeps in this kernel function."""
    return "poll" in channel or "select" in channel


def who(key: str | None = None, *, window_s: float = WINDOW_S) -> tuple[Report, ...]:
    """Find the ends that hold queues up. No process is stopped or signalled for this.

    Args:
        key: The queue's name, id, beginning of the id, or the pid of an end, which selects all queues of the process;
            None: every queue.
        window_s: Seconds between the two snapshots.

    Raises:
        NoProc: There is no ``/proc``.
        QueueNotFound: No queue matches; the text lists all queues.
    """
    watch = Watch()
    before = {queue.header.queue_id: queue for queue in watch.look()}
    wanted = set(before)
    if key is not None:
        wanted = {name for name, queue in before.items() if key in [str(end.pid) for end in queue.ends if end.there]}
        wanted = wanted or {chosen(key, before.values()).header.queue_id}
    time.sleep(window_s)
    reports = []
    for queue in watch.look():
        if queue.header.queue_id in wanted:
            with suppress(FileNotFoundError, HandleError):  # the queue has ended meanwhile, or its ring is damaged
                reports.append(_report(watch.ring(queue), before[queue.header.queue_id], queue))
    return tuple(reports)


def _report(ring: Ring, before: QueueSnapshot, now: QueueSnapshot) -> Report:
    layout = ring.layout
    writer = now.header.writer
    keeping: list[int] = []
    if writer.parked:
        flags = ring.read(layout.flags(writer.wants % layout.slots), layout.flag_bytes)
        keeping = [place for place, read in enumerate(flags[1:]) if flags[0] and not read]
    # Readers without a process, which the writer does not wait for, have their flags set.
    flags = ring.read(layout.flags(0), layout.flag_bytes)
    awaited = [n for n, end in enumerate(now.readers) if end.membership == "absent" and not flags[1 + n]]
    channels = {end.pid: wait_channel(end.pid) for end in now.ends if end.pid}
    found = suspects(before, now, keeping, awaited, channels)
    held_up = any(suspect.grave for suspect in found)
    return Report(queue=now, suspects=tuple(map(_with_stacks, found)), held_up=held_up)


def _with_stacks(suspect: Suspect) -> Suspect:
    if not suspect.pid or suspect.kind == "gone":
        return suspect
    tries = 1
    if suspect.kind == "slow":
        tries = _TRIES
    seen = spied_report(suspect.pid, tries)
    return msgspec.structs.replace(suspect, stacks=seen.stacks, line=seen.line, hint=seen.hint)
