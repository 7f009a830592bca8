"""This user's queues on this host, read from outside once (`find_queues`) or again and again (`Watch`).

Segments are opened through ``/proc/PID/fd/N``, read-only and for one read at a time, and read with pread(2): no page
gets memory, no queue is kept alive, and rings of stopped processes can be read.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from aioshm.codec.registry import name_of_code
from aioshm.errors import AioshmError, HandleError
from aioshm.process.proc import HUNG_STATES, PROC, ProcessInfo, check_proc, process_info
from aioshm.ring import layout as at
from aioshm.ring.header import ReaderRow, RingHeader, WriterRow, read_header, read_layout
from aioshm.ring.layout import Layout
from aioshm.ring.segment import NAME_PREFIX, OVERFLOW_LABEL

RESCAN_S = 2.0
"""Seconds between two searches of a `Watch` for new queues, which cost more than to read known queues."""

_BLOCK = 512  # bytes in st_blocks; see stat(2)
_LOOKING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags to open a segment with. Memory never blocks: O_NONBLOCK marks a descriptor that belongs to no end."""
_OURS = re.compile(rf"/memfd:aioshm|/dev/shm/{NAME_PREFIX}")
_OVERFLOW = re.compile(rf"/memfd:{OVERFLOW_LABEL}([0-9a-f]{{8}})")
_MIN_PREFIX = 4


class QueueNotFound(AioshmError):
    """No queue, or more than one, matches.

    Attributes:
        key: The name, id or pid of the search.
        there_are: The queues that match; if none does, all queues of this user on this host.
    """

    def __init__(self, key: str, problem: str, there_are: Iterable[str]) -> None:
        self.key = key
        self.there_are: tuple[str, ...] = tuple(there_are)
        super().__init__(f"{problem}: {', '.join(self.there_are) or 'none'}")


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

    @property
    def hangs(self) -> bool:
        """Whether this end takes part, and its process does not run."""
        return self.there and self.state in HUNG_STATES


class QueueSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A queue at one moment.

    Attributes:
        label: Its name, or the first 8 digits of its id.
        codec: The codec's name; a number if this process has not registered the codec.
        header: The ring's header.
        writer: Its writer.
        readers: Its local readers, by rank, absent ones included.
        holders: Pids of the processes that have the ring open.
        memory_bytes: Memory that the ring occupies, of `Layout.total_bytes` at most.
        overflow_segments: The number of overflow segments.
        overflow_bytes: Memory that the overflow segments occupy.
        taken_ns: The time of the snapshot, by ``time.monotonic_ns()``.
        bytes_per_s: Rate of published bytes, of bodies alone; None: not known. Rates need two snapshots of a `Watch`.
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


class Segment:
    """A file in memory, and a path under ``/proc`` for each process that has the file open."""

    def __init__(self, link: str, status: os.stat_result) -> None:
        self.link: str = link
        self.identity: tuple[int, int] = (status.st_dev, status.st_ino)
        self.blocks: int = status.st_blocks
        self.paths: dict[int, str] = {}  # by pid

    def open(self) -> int:
        """Open the segment through a holder that still runs, or raise `FileNotFoundError`."""
        for path in self.paths.values():
            with suppress(OSError):
                fd = os.open(path, _LOOKING)
                status = os.fstat(fd)
                if (status.st_dev, status.st_ino) == self.identity:
                    return fd
                os.close(fd)  # the holder has opened something else meanwhile
        raise FileNotFoundError(f"no process has {self.link} open any more")

    def read(self, offset: int, length: int) -> bytes:
        """Read bytes; fewer at the end."""
        fd = self.open()
        try:
            return os.pread(fd, length, offset)
        finally:
            os.close(fd)

    def status(self) -> os.stat_result:
        """Return size, blocks and times."""
        fd = self.open()
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)


def find_segments(links: re.Pattern[str] = _OURS) -> tuple[list[Segment], int]:
    """Return the segments that this user's processes have open, and how many processes were not looked at."""
    check_proc()
    found: dict[tuple[int, int], Segment] = {}
    skipped = 0
    for pid in map(int, filter(str.isdigit, os.listdir(PROC))):
        try:
            if os.stat(f"{PROC}/{pid}").st_uid != os.geteuid():
                skipped += 1
                continue
            for path, link, status in _segments_of(pid, links):
                segment = found.setdefault((status.st_dev, status.st_ino), Segment(link, status))
                segment.paths.setdefault(pid, path)
        except (FileNotFoundError, ProcessLookupError):  # the process has ended
            continue
        except OSError:
            skipped += 1
    return list(found.values()), skipped


def _segments_of(pid: int, links: re.Pattern[str]) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yield path, name and status of the segments among the descriptors of a process."""
    folder = f"{PROC}/{pid}/fd"
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        with suppress(OSError):  # closed meanwhile
            link = os.readlink(path)
            if links.match(link) and not _is_looked_at(f"{folder}info/{name}"):
                yield path, link, os.stat(path)


def _is_looked_at(fdinfo: str) -> bool:
    """Return whether a descriptor was opened with `_LOOKING`."""
    with open(fdinfo) as info:
        flags = next(line for line in info if line.startswith("flags:"))
    return int(flags.split()[1], 8) & (os.O_ACCMODE | os.O_NONBLOCK) == _LOOKING & ~os.O_CLOEXEC


class Ring:
    """A queue's ring."""

    def __init__(self, segment: Segment) -> None:
        self.segment: Segment = segment
        self.overflow: tuple[int, int] = (0, 0)  # overflow segments, and their bytes
        layout, queue_id = read_layout(segment.read(0, at.PREAMBLE.size))
        self.layout: Layout = layout
        self.queue_id: str = queue_id.hex()
        if not self.read(at.WRITER_LINE + at.PID, 4).strip(b"\0"):
            raise HandleError("this ring has no writer: it is no queue, or not yet one")

    def read(self, offset: int, length: int) -> bytes:
        """Read bytes of the ring; `HandleError`: the ring is damaged, such as truncated."""
        data = b""
        with suppress(OverflowError):  # an offset that only a damaged header has
            data = self.segment.read(offset, length)
        if len(data) < length:
            raise HandleError(f"the ring in {self.segment.link} is damaged: it ends before byte {offset + length}")
        return data

    def snapshot(self, processes: dict[int, ProcessInfo]) -> QueueSnapshot:
        """Read the queue's state; add missing processes to ``processes``."""
        header = read_header(self.read(0, self.layout.header_bytes), taken := time.monotonic_ns())
        holders = {}
        for pid in self.segment.paths:
            if pid not in processes:
                processes[pid] = process_info(pid)
            if processes[pid].state != "gone":
                holders[pid] = processes[pid]
        memory = self.segment.status().st_blocks * _BLOCK
        return snapshot_of(header, holders, memory, self.overflow, taken)


def find_rings() -> tuple[list[Ring], int]:
    """Return this user's rings, and how many processes were not looked at."""
    segments, skipped = find_segments()
    rings: list[Ring] = []
    for segment in segments:
        if not _OVERFLOW.match(segment.link):
            with suppress(OSError, HandleError):  # the queue is gone, or another release has made it
                rings.append(Ring(segment))
    by_prefix = {ring.queue_id[:8]: ring for ring in rings}
    for segment in segments:
        if (found := _OVERFLOW.match(segment.link)) and (owner := by_prefix.get(found[1])) is not None:
            count, nbytes = owner.overflow
            owner.overflow = (count + 1, nbytes + segment.blocks * _BLOCK)
    return rings, skipped


def snapshot_of(
    header: RingHeader,
    holders: Mapping[int, ProcessInfo],
    memory_bytes: int,
    overflow: tuple[int, int],
    taken_ns: int,
) -> QueueSnapshot:
    """Make a snapshot of the ring's header and its holders; ``overflow``: how many segments, their bytes. No I/O."""
    writer = _end(
        header.writer,
        holders,
        side="writer",
        rank=-1,
        membership="closed" if header.writer.closed else "open",
        messages=header.writer.messages,
        lag=header.backlog,
    )
    readers = []
    for row in header.readers:
        end = _end(
            row,
            holders,
            side="reader",
            rank=row.rank,
            membership=row.state,
            messages=row.read,
            lag=row.lag,
            latency_p50_s=row.latency.quantile(0.5),
            latency_p99_s=row.latency.quantile(0.99),
        )
        readers.append(end)
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


def _end(row: WriterRow | ReaderRow, holders: Mapping[int, ProcessInfo], **fields: Any) -> End:
    # A holder has the row's pid in its own namespace. Processes that are no holders any more are gone.
    known = (holders.get(row.pid), *holders.values())
    process = next((each for each in known if each is not None and each.inner_pid == row.pid), None)
    if process is None:
        process = ProcessInfo(pid=row.pid, inner_pid=row.pid, state="gone" * bool(row.pid))
    waits = ""
    if row.parked:
        waits = "parked"
    elif row.spinning and process.state not in HUNG_STATES:
        waits = "spinning"
    return End(
        pid=process.pid,
        state=process.state,
        command=process.command,
        cpu_s=process.cpu_s,
        waits=waits,
        **fields,
    )


def _with_rates(now: QueueSnapshot, before: QueueSnapshot) -> QueueSnapshot:
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
    return msgspec.structs.replace(now, writer=ends[0], readers=tuple(ends[1:]), bytes_per_s=bytes_per_s)


class Watch:
    """Reads this user's queues on this host again and again; holds no file open in between.

    Args:
        rescan_s: Seconds after which `look` searches for new queues.

    Attributes:
        skipped: The number of processes not looked at: those of other users, and those that cannot be read.
    """

    def __init__(self, rescan_s: float = RESCAN_S) -> None:
        self._rescan_s = rescan_s
        self._rings: dict[str, Ring] = {}
        self._due = 0.0
        self._before: dict[str, QueueSnapshot] = {}
        self.skipped: int = 0

    def look(self) -> tuple[QueueSnapshot, ...]:
        """Return all queues, sorted by name, then by id, with the rates since the last call.

        Raises:
            NoProc: There is no ``/proc``.
        """
        if time.monotonic() >= self._due:
            rings, self.skipped = find_rings()
            self._rings = {ring.queue_id: ring for ring in rings}
            self._due = time.monotonic() + self._rescan_s
        processes: dict[int, ProcessInfo] = {}
        now: dict[str, QueueSnapshot] = {}
        for key, ring in self._rings.items():
            with suppress(OSError, HandleError):
                queue = ring.snapshot(processes)
                if queue.holders:
                    now[key] = queue
        found = []
        for key, queue in now.items():
            if key in self._before:
                queue = _with_rates(queue, self._before[key])
            found.append(queue)
        self._before = now
        return tuple(sorted(found, key=lambda queue: (not queue.header.name, queue.label)))

    def ring(self, queue: QueueSnapshot) -> Ring:
        """Return the ring of a queue that the last `look` returned.

        Raises:
            KeyError: The queue was not among them.
        """
        return self._rings[queue.header.queue_id]


def find_queues() -> tuple[QueueSnapshot, ...]:
    """Return this user's queues on this host, sorted by name, then by id.

    Raises:
        NoProc: There is no ``/proc``.
    """
    return Watch().look()


def find_queue(key: str) -> QueueSnapshot:
    """Return the queue with this name, id, first digits of an id (4 or more), or pid of one of its ends.

    Raises:
        NoProc: There is no ``/proc``.
        QueueNotFound: No queue, or more than one, matches; the text lists the queues to choose from.
    """
    return chosen(key, find_queues())


def chosen(key: str, queues: Iterable[QueueSnapshot]) -> QueueSnapshot:
    """Select a queue as `find_queue` does."""
    queues = tuple(queues)
    found = [queue for queue in queues if key and queue.header.name == key]
    found = found or [queue for queue in queues if len(key) >= _MIN_PREFIX and queue.header.queue_id.startswith(key)]
    found = found or [queue for queue in queues if key in [str(end.pid) for end in queue.ends if end.pid]]
    if len(found) == 1:
        return found[0]
    if found:
        labels = [queue.label for queue in found]
        if len({*labels}) < len(labels):  # one name
            labels = [queue.header.queue_id[:12] for queue in found]
        raise QueueNotFound(key, f"{key!r} matches {len(found)} queues, say which", labels)
    labels = []
    for queue in queues:
        writer = f"pid {queue.writer.pid}"
        if queue.writer.state == "gone":
            writer = "its writer is gone"
        labels.append(f"{queue.label} ({writer})")
    raise QueueNotFound(key, f"there is no queue {key!r}; queues of this user on this host", labels)
