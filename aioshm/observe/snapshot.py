"""A queue at one moment, from outside: the ring's header, and the processes of the queue. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from aioshm.codec.registry import name_of_code
from aioshm.process.proc import HUNG_STATES, ProcessInfo
from aioshm.ring.header import ReaderRow, RingHeader, WriterRow


class End(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a queue.

    Attributes:
        side: ``"writer"`` or ``"reader"``.
        rank: The reader's rank; -1: the writer.
        membership: Its state in the queue: ``"attached"``, ``"absent"``, ``"left"``, ``"died"``, ``"held"``,
            ``"evicted"``, ``"dismissed"``; of a writer ``"open"`` or ``"closed"``.
        pid: The pid of its process in this namespace; in its own, if it is gone; 0: no process yet.
        state: The state of its process: ``"running"``, ``"stopped"``, ``"gone"``...; empty: no process yet.
        command: The command line of its process.
        waits: ``"parked"`` (it sleeps until it is woken), ``"spinning"``, or empty.
        messages: Messages published by a writer, or finished with by a reader.
        lag: Messages that a reader has not finished with; of a writer, the lag of the slowest reader.
        latency_p50_s: Median time from publishing until the reader took a message; None: not known.
        latency_p99_s: The 99th percentile of the same.
        cpu_s: CPU time of its process, in seconds.
        cpu_share: The share of one CPU that its process uses; None: not known.
        messages_per_s: Rate of ``messages``; None: not known.
    """

    side: str
    rank: int
    membership: str
    pid: int
    state: str
    command: str
    waits: str
    messages: int
    lag: int
    latency_p50_s: float | None = None
    latency_p99_s: float | None = None
    cpu_s: float
    cpu_share: float | None = None
    messages_per_s: float | None = None

    @property
    def there(self) -> bool:
        """Whether this end takes part: it is open, attached, or its rank is held for a replacement."""
        return self.membership in ("open", "attached", "held")


class QueueSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A queue at one moment.

    Attributes:
        label: Its name, or the first 8 digits of its id.
        codec: The codec's name; a number if this process has not registered the codec.
        header: The ring's header.
        writer: Its writer.
        readers: Its local readers, by rank, absent ones included.
        holders: Processes that have the ring open.
        memory_bytes: Memory that the ring occupies, of `Layout.total_bytes` at most.
        overflow_segments: The number of overflow segments.
        overflow_bytes: Memory that the overflow segments occupy.
        taken_ns: The time of the snapshot, by ``time.monotonic_ns()``.
        bytes_per_s: Bytes in the bodies of published messages; None: not known. Rates need two snapshots of a `Watch`.
    """

    label: str
    codec: str
    header: RingHeader
    writer: End
    readers: tuple[End, ...]
    holders: tuple[int, ...]
    memory_bytes: int
    overflow_segments: int
    overflow_bytes: int
    taken_ns: int
    bytes_per_s: float | None = None

    @property
    def ends(self) -> tuple[End, ...]:
        """Its ends, the writer first."""
        return (self.writer, *self.readers)


def snapshot_of(
    header: RingHeader,
    holders: Mapping[int, ProcessInfo],
    memory_bytes: int,
    overflow: tuple[int, int],
    taken_ns: int,
) -> QueueSnapshot:
    """Make a snapshot of the ring's header and its holders; ``overflow`` has the segments and their bytes."""
    membership = "open"
    if header.writer.closed:
        membership = "closed"
    writer = _end(header.writer, holders, "writer", -1, membership, header.writer.messages, header.backlog)
    readers = []
    for row in header.readers:
        end = _end(row, holders, "reader", row.rank, row.state, row.read, row.lag)
        p50_s = row.latency.quantile(0.5)
        readers.append(msgspec.structs.replace(end, latency_p50_s=p50_s, latency_p99_s=row.latency.quantile(0.99)))
    return QueueSnapshot(
        label=header.label,
        codec=name_of_code(header.codec),
        header=header,
        writer=writer,
        readers=tuple(readers),
        holders=tuple(sorted(holders)),
        memory_bytes=memory_bytes,
        overflow_segments=overflow[0],
        overflow_bytes=overflow[1],
        taken_ns=taken_ns,
    )


def _end(
    row: WriterRow | ReaderRow,
    holders: Mapping[int, ProcessInfo],
    side: str,
    rank: int,
    membership: str,
    messages: int,
    lag: int,
) -> End:
    process = _process(row.pid, holders)
    waits = ""
    if row.parked:
        waits = "parked"
    elif row.spinning and process.state not in HUNG_STATES:
        waits = "spinning"
    return End(
        side=side,
        rank=rank,
        membership=membership,
        pid=process.pid,
        state=process.state,
        command=process.command,
        waits=waits,
        messages=messages,
        lag=lag,
        cpu_s=process.cpu_s,
    )


def _process(pid: int, holders: Mapping[int, ProcessInfo]) -> ProcessInfo:
    """Return the holder with this pid in its own namespace; other processes are gone."""
    if not pid:
        return ProcessInfo(pid=0, inner_pid=0, state="")
    for each in (holders.get(pid), *holders.values()):
        if each is not None and each.inner_pid == pid:
            return each
    return ProcessInfo(pid=pid, inner_pid=pid, state="gone")


def with_rates(now: QueueSnapshot, before: QueueSnapshot) -> QueueSnapshot:
    """Return a snapshot with the rates since an earlier one of the same queue."""
    seconds = max((now.taken_ns - before.taken_ns) / 1e9, 1e-9)
    cpu_s = {end.pid: end.cpu_s for end in before.ends}
    ends = []
    for end, then in zip(now.ends, before.ends, strict=True):
        share = None
        if end.pid in cpu_s and end.cpu_s:
            share = max(0.0, end.cpu_s - cpu_s[end.pid]) / seconds
        messages_per_s = max(0, end.messages - then.messages) / seconds
        ends.append(msgspec.structs.replace(end, cpu_share=share, messages_per_s=messages_per_s))
    bytes_per_s = max(0, now.header.writer.bytes - before.header.writer.bytes) / seconds
    writer, *readers = ends
    return msgspec.structs.replace(now, writer=writer, readers=tuple(readers), bytes_per_s=bytes_per_s)
