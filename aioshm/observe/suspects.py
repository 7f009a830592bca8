"""Finds the process that holds a queue up, and its line of code: `who` reads, `suspects` decides without I/O."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import msgspec

from aioshm.observe.proc import HUNG, ProcessInfo, process_info, system_call, wait_channel
from aioshm.observe.scan import RingFile, Watch, Watched, chosen
from aioshm.observe.snapshot import End, QueueSnapshot
from aioshm.observe.stacks import LOOP_WAITS, Frame, Stack, stacks_of, users_line

Kind = Literal["gone", "stopped", "absent", "blocked", "slow", "writer blocked", "writer idle"]

GRAVE: tuple[Kind, ...] = ("gone", "stopped", "absent", "blocked", "slow", "writer blocked")
"""Kinds that hold a queue up, the worst first. An idle writer does not: it may have nothing to send."""

LONG_LAG = 0.5
"""A share of the ring's slots: a reader with a larger lag that does not shrink is slow."""

WINDOW_S = 0.25
"""Seconds between two snapshots: a reader that takes no message in this time is called blocked."""

_TRIES, _PAUSE_S = 5, 0.01
"""How often the stack of a slow process is read: it may be in its loop just then."""

_LOOP_CALLS = ("epoll_wait", "epoll_pwait", "epoll_pwait2", "ep_poll", "poll", "ppoll", "select", "pselect6")
"""System calls and kernel functions in which an idle event loop sleeps."""


class Doing(msgspec.Struct, frozen=True):
    """The kernel function in which a process sleeps, and its system call; empty: not known."""

    wait_channel: str = ""
    system_call: str = ""

    @property
    def loop_waits(self) -> bool:
        """Whether an idle event loop does this."""
        return self.system_call in _LOOP_CALLS or (not self.system_call and "poll" in self.wait_channel)

    def __str__(self) -> str:
        inside = f" ({self.wait_channel})" if self.wait_channel and self.system_call else self.wait_channel
        return f"{self.system_call}{inside}"


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
        doing: The kernel function in which the process sleeps, and its system call.
        line: The line of the user's code that it executes, if known.
        stacks: The stacks of its threads and tasks, if known.
        hint: Why the stacks are unknown, and what to do; empty otherwise.
    """

    kind: Kind
    side: str
    rank: int
    pid: int
    state: str
    command: str
    text: str
    doing: Doing
    line: Frame | None = None
    stacks: tuple[Stack, ...] = ()
    hint: str = ""

    @property
    def grave(self) -> bool:
        """Whether the queue is held up; an idle writer may have nothing to send."""
        return self.kind in GRAVE


def suspects(
    before: QueueSnapshot,
    now: QueueSnapshot,
    keeping: Collection[int],
    awaited: Collection[int],
    doing: Mapping[int, Doing],
) -> tuple[Suspect, ...]:
    """Return the ends that hold a queue up, the gravest first; none if the queue moves."""
    found = [*_hung(now, doing)]
    known = {suspect.pid for suspect in found}
    found += [_suspect("absent", now.readers[place], "nobody has attached yet", doing) for place in sorted(awaited)]
    seconds = max((now.taken_ns - before.taken_ns) / 1e9, 1e-9)
    for place, (then, reader) in enumerate(zip(before.readers, now.readers, strict=True)):
        if reader.there and reader.pid not in known:
            found += _behind(now, then, reader, place in keeping, seconds, doing)
    if not any(suspect.grave for suspect in found):
        found += _silent(before, now, doing)
    order = [*GRAVE, "writer idle"]
    return tuple(sorted(found, key=lambda suspect: (order.index(suspect.kind), suspect.rank)))


def _hung(now: QueueSnapshot, doing: Mapping[int, Doing]) -> Iterator[Suspect]:
    """Find the ends whose processes do not run."""
    for end in now.ends:
        if not end.there or not end.pid or end.state not in HUNG:
            continue
        if end.state in ("gone", "zombie"):
            text = "its process is gone" + (", and its place is held for another one" * (end.membership == "held"))
            yield _suspect("gone", end, text, doing)
        elif end.state == "stopped":
            text = "its process is stopped (SIGSTOP or Ctrl-Z): kill -CONT continues it"
            yield _suspect("stopped", end, text, doing)
        elif end.state == "traced":
            yield _suspect("stopped", end, "its process is stopped by a debugger", doing)
        else:
            yield _suspect("writer blocked" if end.rank < 0 else "blocked", end, "its process waits for a disk", doing)


def _behind(
    now: QueueSnapshot, then: End, reader: End, keeps: bool, seconds: float, doing: Mapping[int, Doing]
) -> Iterator[Suspect]:
    """Find out whether a reader with a lag holds the queue up."""
    taken = reader.messages - then.messages
    if not reader.lag or not (keeps or then.lag):
        return
    behind = f"{reader.lag} message{'s' * (reader.lag != 1)} behind"
    if taken <= 0:
        yield _suspect(
            "blocked", reader, f"took nothing in the last {seconds:.1f} s, {behind}: {_why(reader, doing)}", doing
        )
    elif keeps or (reader.lag >= then.lag and reader.lag > LONG_LAG * now.header.slots):
        yield _suspect("slow", reader, f"takes {taken / seconds:,.0f} messages a second, {behind}", doing)


def _silent(before: QueueSnapshot, now: QueueSnapshot, doing: Mapping[int, Doing]) -> Iterator[Suspect]:
    """Find out why a writer publishes nothing although its readers have read everything."""
    writer = now.writer
    kernel = doing.get(writer.pid, Doing())
    if not writer.there or writer.pid == 0 or writer.messages > before.writer.messages:
        return
    if kernel.loop_waits and writer.state != "running":
        yield _suspect("writer idle", writer, "has nothing to publish: its event loop waits", doing)
        return
    seconds = (now.taken_ns - before.taken_ns) / 1e9
    yield _suspect("writer blocked", writer, f"has published nothing for {seconds:.1f} s: {_why(writer, doing)}", doing)


def _why(end: End, doing: Mapping[int, Doing]) -> str:
    kernel = doing.get(end.pid, Doing())
    if end.state == "running":
        return "its code keeps the CPU"
    if kernel.loop_waits:
        return "its event loop waits for something else"
    return f"it is blocked in {kernel}" if str(kernel) else "it is blocked"


def _suspect(kind: Kind, end: End, text: str, doing: Mapping[int, Doing]) -> Suspect:
    return Suspect(
        kind=kind,
        side=end.side,
        rank=end.rank,
        pid=end.pid,
        state=end.state,
        command=end.command,
        text=text,
        doing=doing.get(end.pid, Doing()),
    )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The ends that hold a queue up.

    Attributes:
        queue: The queue.
        suspects: These ends, the gravest first; empty: the queue moves.
        messages_per_s: Messages published meanwhile.
    """

    queue: QueueSnapshot
    suspects: tuple[Suspect, ...]
    messages_per_s: float


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a process that has no queue; attributes as in `Suspect`."""

    process: ProcessInfo
    doing: Doing
    line: Frame | None
    stacks: tuple[Stack, ...]
    hint: str


def who(key: str | None = None, *, window_s: float = WINDOW_S) -> tuple[Report, ...]:
    """Find the ends that hold queues up. No process is stopped or signalled for this.

    Args:
        key: The queue's name, id, beginning of its id, or the pid of one of its ends, which may have several; None:
            every queue.
        window_s: Seconds between the two snapshots that this takes.

    Raises:
        NoProc: There is no ``/proc``.
        QueueNotFound: There is no such queue; the text lists all queues.
    """
    with Watch() as watch:
        before = {each.queue.header.queue_id: each.queue for each in watch.look()}
        wanted = before.keys() if key is None else _wanted(key, list(before.values()))
        time.sleep(window_s)
        found = [each for each in watch.look() if each.queue.header.queue_id in wanted]
        return tuple(_report(watch.ring(each.queue), before[each.queue.header.queue_id], each) for each in found)


def process_report(pid: int) -> ProcessReport:
    """Describe a process, whether it has a queue or not."""
    line, stacks, hint = _line_of(pid, 1)
    return ProcessReport(process=process_info(pid), doing=_doing(pid), line=line, stacks=stacks, hint=hint)


def _doing(pid: int) -> Doing:
    return Doing(wait_channel(pid), system_call(pid))


def _wanted(key: str, queues: list[QueueSnapshot]) -> set[str]:
    if key.isdigit() and (
        of_pid := {q.header.queue_id for q in queues if int(key) in [end.pid for end in q.ends if end.there]}
    ):
        return of_pid
    return {chosen(key, queues).header.queue_id}


def _report(ring: RingFile, before: QueueSnapshot, now: Watched) -> Report:
    queue = now.queue
    keeping, awaited = _flags(ring, queue)
    found = suspects(before, queue, keeping, awaited, {end.pid: _doing(end.pid) for end in queue.ends if end.pid})
    speed = 0.0 if now.rates is None else now.rates.messages_per_s
    return Report(queue=queue, suspects=tuple(map(_with_stacks, found)), messages_per_s=speed)


def _flags(ring: RingFile, now: QueueSnapshot) -> tuple[list[int], list[int]]:
    """Return the reader slots that a parked writer waits for, and the vacant ones that it waits for."""
    layout, header = ring.layout, now.header
    keeping: list[int] = []
    if header.writer.parked:
        flags = ring.read(layout.flags(header.writer.wants % layout.slots), layout.flag_bytes)
        keeping = [place for place, read in enumerate(flags[1:]) if flags[0] and not read]
    row = ring.read(layout.flags(0), layout.flag_bytes)  # the flags of a slot that nobody waits for are set
    vacant = [end.membership == "absent" and not read for end, read in zip(now.readers, row[1:], strict=True)]
    return keeping, [place for place, is_vacant in enumerate(vacant) if is_vacant]


def _with_stacks(suspect: Suspect) -> Suspect:
    """Add the stacks of its process."""
    if not suspect.pid or suspect.kind == "gone":
        return suspect
    tries = _TRIES if suspect.kind == "slow" else 1
    line, stacks, hint = _line_of(suspect.pid, tries)
    return msgspec.structs.replace(suspect, stacks=stacks, line=line, hint=hint)


def _line_of(pid: int, tries: int) -> tuple[Frame | None, tuple[Stack, ...], str]:
    """Return the line of the user's code that a process executes, its stacks, and a hint."""
    for _ in range(tries):
        stacks, hint = stacks_of(pid)
        line = users_line(stacks)
        if line is not None or not stacks:
            return line, stacks, hint
        time.sleep(_PAUSE_S)
    line = users_line(stacks, beyond_loops=True)
    return line, stacks, LOOP_WAITS if line is not None else hint
