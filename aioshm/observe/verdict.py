"""Who holds a queue up, from two looks at it: decided without I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import msgspec

from aioshm.observe.proc import HUNG
from aioshm.observe.snapshot import End, QueueSnapshot
from aioshm.observe.stacks import Frame, Stack

Kind = Literal["gone", "stopped", "absent", "blocked", "slow", "writer blocked", "writer idle"]

GRAVE: tuple[Kind, ...] = ("gone", "stopped", "absent", "blocked", "slow", "writer blocked")
"""What holds a queue up, the worst first. An idle writer does not: it may have nothing to say."""

LONG_LAG = 0.5
"""Of the ring's slots: a reader that is further behind, and does not catch up, is slow."""

_LOOP_WAITS = ("epoll_wait", "epoll_pwait", "epoll_pwait2", "ep_poll", "poll", "ppoll", "select", "pselect6")
"""System calls, and kernel functions, that an event loop without work sleeps in."""


class Doing(msgspec.Struct, frozen=True):
    """What the kernel says of a process: the function that it sleeps in, and the system call; empty: not known."""

    wait_channel: str = ""
    system_call: str = ""

    @property
    def loop_waits(self) -> bool:
        """Whether that is what an event loop without work does."""
        return self.system_call in _LOOP_WAITS or (not self.system_call and "poll" in self.wait_channel)

    def __str__(self) -> str:
        inside = f" ({self.wait_channel})" if self.wait_channel and self.system_call else self.wait_channel
        return f"{self.system_call}{inside}"


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """An end that holds a queue up.

    Attributes:
        kind: How.
        side: ``"writer"`` or ``"reader"``.
        rank: The reader's, or -1.
        pid: Its process; 0: none yet.
        state: Of the process.
        command: Its command line.
        text: What is wrong, in words.
        doing: What the kernel says of the process.
        line: The line of code of its user that it is in, if that is known.
        stacks: The stacks of its threads and tasks, if they are known.
        hint: Why they are not, and what to do; empty if they are.
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
        """Whether the queue is held up; an idle writer may have nothing to say."""
        return self.kind in GRAVE


def suspects(
    before: QueueSnapshot,
    now: QueueSnapshot,
    keeping: Collection[int],
    awaited: Collection[int],
    doing: Mapping[int, Doing],
) -> tuple[Suspect, ...]:
    """Return who holds a queue up, the gravest first; nobody: it moves, or its writer has closed it and all is read.

    Args:
        before: How the queue was a moment ago.
        now: How it is.
        keeping: The places whose readers still have the message that a parked writer waits for.
        awaited: The places that nobody has taken yet, and that are waited for.
        doing: What the kernel says of the processes.
    """
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
    """Find the ends whose processes do nothing."""
    for end in now.ends:
        if not end.there or not end.pid or end.state not in HUNG:
            continue
        if end.state in ("gone", "zombie"):
            text = "its process is gone" + (", and its place is held for another one" * (end.membership == "held"))
            yield _suspect("gone", end, text, doing)
        elif end.state == "stopped":
            yield _suspect(
                "stopped", end, "its process is stopped (SIGSTOP or Ctrl-Z): kill -CONT lets it go on", doing
            )
        elif end.state == "traced":
            yield _suspect("stopped", end, "its process is stopped by a debugger", doing)
        else:
            yield _suspect("writer blocked" if end.rank < 0 else "blocked", end, "its process waits for a disk", doing)


def _behind(
    now: QueueSnapshot, then: End, reader: End, keeps: bool, seconds: float, doing: Mapping[int, Doing]
) -> Iterator[Suspect]:
    """Find out whether a reader holds the queue up that has not finished with some messages."""
    taken = reader.messages - then.messages
    if not reader.lag or not (keeps or then.lag):
        return
    behind = f"{reader.lag} message{'s' * (reader.lag != 1)} behind"
    if taken <= 0:
        yield _suspect(
            "blocked", reader, f"has taken nothing for {seconds:.1f} s, {behind}: {_why(reader, doing)}", doing
        )
    elif keeps or (reader.lag >= then.lag and reader.lag > LONG_LAG * now.header.slots):
        yield _suspect("slow", reader, f"takes {taken / seconds:,.0f} messages a second, {behind}", doing)


def _silent(before: QueueSnapshot, now: QueueSnapshot, doing: Mapping[int, Doing]) -> Iterator[Suspect]:
    """Find out why a writer publishes nothing whose readers have read everything."""
    writer, what = now.writer, doing.get(now.writer.pid, Doing())
    if not writer.there or writer.pid == 0 or writer.messages > before.writer.messages:
        return
    if what.loop_waits and writer.state != "running":
        yield _suspect("writer idle", writer, "has nothing to publish: its event loop waits", doing)
        return
    seconds = (now.taken_ns - before.taken_ns) / 1e9
    yield _suspect("writer blocked", writer, f"has published nothing for {seconds:.1f} s: {_why(writer, doing)}", doing)


def _why(end: End, doing: Mapping[int, Doing]) -> str:
    what = doing.get(end.pid, Doing())
    if end.state == "running":
        return "its code keeps the CPU"
    if what.loop_waits:
        return "its event loop waits for something else"
    return f"it is blocked in {what}" if str(what) else "it is blocked"


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
