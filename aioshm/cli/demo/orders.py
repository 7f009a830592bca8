"""What the demo's processes tell each other: JSON, one message a line, over their standard streams."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Arrays = Literal["torch", "numpy", "bytes"]

FailureKind = Literal["mismatch", "setup", "crash", "error", "peer"]
"""Why a process gave up, the more telling ones first: "peer" only says that another one has."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to do; every process gets the same.

    Attributes:
        input: The absolute path of the text file; bytes, because a path need not be text.
        repeat: How often its lines are sent.
        readers: How many read the ring.
        remote: How many more read over TCP; they have the ranks behind.
        arrays: What the large messages are made of.
    """

    input: bytes
    repeat: int
    readers: int
    remote: int = 0
    arrays: Arrays


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The writer has made the queue; this is its handle."""

    handle: str


class Progress(msgspec.Struct, frozen=True, tag=True):
    """So many messages have been read by every reader."""

    done: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one process measured in one phase.

    Attributes:
        phase: Its name.
        messages: How many there were.
        bytes: Their payloads.
        seconds: A reader: from the first message to the last; the writer: until every reader had read the last.
        messages_per_s: None where a single message leaves nothing to measure.
        gb_per_s: In 10^9 bytes.
        p50_us: Median of the time from just before ``enqueue`` to just after ``dequeue``, where it was measured.
        p99_us: Its 99th percentile.
        cpu_share: CPU time of the process per second, making and checking the messages included.
    """

    phase: str
    messages: int
    bytes: int
    seconds: float
    messages_per_s: float | None
    gb_per_s: float | None
    p50_us: float | None
    p99_us: float | None
    cpu_share: float | None


class Result(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A process has done its part.

    Attributes:
        messages: Sent; or received and found right.
        overflows: How many of them did not fit the ring.
        phases: One after the other.
    """

    messages: int
    overflows: int
    phases: list[Figures]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A process gives up."""

    kind: FailureKind
    text: str


Report: TypeAlias = Opened | Progress | Result | Failed
