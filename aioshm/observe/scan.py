"""Reads this user's queues on this host, once (`find_queues`) or repeatedly (`Watch`).

`RingFile` opens ``/proc/PID/fd/N`` read-only and uses pread(2): no page gets memory, and rings of stopped processes
can be read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, monotonic_ns
from typing import Self

from aioshm.errors import AioshmError, HandleError
from aioshm.observe.snapshot import QueueSnapshot, snapshot_of, with_rates
from aioshm.process.proc import PROC, ProcessInfo, check_proc, process_info
from aioshm.ring.header import read_header, read_layout
from aioshm.ring.layout import PID, PREAMBLE, WRITER_LINE, Layout
from aioshm.ring.segment import NAME_PREFIX, OVERFLOW_LABEL

BLOCK = 512
"""Bytes, in st_blocks; see stat(2)."""

LOOKING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags to open a ring with. Memory never blocks: O_NONBLOCK marks a descriptor that belongs to no end."""

_OURS = re.compile(rf"/memfd:aioshm|/dev/shm/{NAME_PREFIX}")
_OVERFLOW = re.compile(rf"/memfd:{OVERFLOW_LABEL}([0-9a-f]{{8}})")
_MIN_PREFIX = 4

RESCAN_S = 2.0
"""Seconds between two searches of a `Watch` for new queues, which cost more than to read known queues."""


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


@dataclass(slots=True)
class Segment:
    """A segment, and a path under ``/proc`` for each process that has it open."""

    link: str
    identity: tuple[int, int]  # device and inode
    blocks: int  # bytes in use
    holders: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def open(self) -> int:
        """Open the segment through a holder that still runs, or raise `FileNotFoundError`."""
        for path in self.paths:
            with suppress(OSError):
                fd = os.open(path, LOOKING)
                status = os.fstat(fd)
                if (status.st_dev, status.st_ino) == self.identity:
                    return fd
                os.close(fd)  # the holder has opened something else meanwhile
        raise FileNotFoundError(f"no process has {self.link} open any more")


def find_segments(links: re.Pattern[str] = _OURS) -> tuple[list[Segment], int]:
    """Return the segments that this user's processes have open, and the number of unreadable processes."""
    check_proc()
    found: dict[tuple[int, int], Segment] = {}
    skipped = 0
    for pid in map(int, filter(str.isdigit, os.listdir(PROC))):
        try:
            if os.stat(f"{PROC}/{pid}").st_uid != os.geteuid():
                skipped += 1
                continue
            for path, link, status in _segments_of(pid, links):
                identity = status.st_dev, status.st_ino
                segment = found.setdefault(identity, Segment(link, identity, status.st_blocks * BLOCK))
                if pid not in segment.holders:
                    segment.holders.append(pid)
                    segment.paths.append(path)
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
    """Return whether a descriptor was opened with `LOOKING`."""
    with open(fdinfo) as info:
        flags = next(line for line in info if line.startswith("flags:"))
    return int(flags.split()[1], 8) & (os.O_ACCMODE | os.O_NONBLOCK) == LOOKING & ~os.O_CLOEXEC


class RingFile:
    """A ring of some process, opened to read only."""

    def __init__(self, segment: Segment, overflow: Mapping[str, tuple[int, int]]) -> None:
        self._fd = -1  # before anything fails, for __del__
        self._fd = segment.open()
        try:
            layout, queue_id = read_layout(os.pread(self._fd, PREAMBLE.size, 0))
        except BaseException:
            self.close()
            raise
        self.layout: Layout = layout
        self.queue_id: str = queue_id.hex()
        if not self.read(WRITER_LINE + PID, 4).strip(b"\0"):
            self.close()
            raise HandleError("this ring has no writer: it is no queue, or not yet one")
        self.holders: tuple[int, ...] = tuple(segment.holders)
        self.overflow: tuple[int, int] = overflow.get(self.queue_id[:8], (0, 0))  # segments, and their bytes

    def snapshot(self, processes: dict[int, ProcessInfo]) -> QueueSnapshot:
        """Read the queue's state; add missing processes to ``processes``."""
        header = read_header(self.read(0, self.layout.header_bytes), taken := monotonic_ns())
        for pid in self.holders:
            if pid not in processes:
                processes[pid] = process_info(pid)
        holders = {pid: processes[pid] for pid in self.holders if processes[pid].state != "gone"}
        return snapshot_of(header, holders, os.fstat(self._fd).st_blocks * BLOCK, self.overflow, taken)

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._fd, length, offset)

    def close(self) -> None:
        """Close it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def find_rings() -> tuple[list[RingFile], int]:
    """Return this user's rings, which the caller closes, and the number of skipped processes."""
    segments, skipped = find_segments()
    overflow: dict[str, tuple[int, int]] = {}
    for segment in segments:
        if found := _OVERFLOW.match(segment.link):
            count, nbytes = overflow.get(found[1], (0, 0))
            overflow[found[1]] = count + 1, nbytes + segment.blocks
    rings = []
    for segment in segments:
        if not _OVERFLOW.match(segment.link):
            with suppress(OSError, HandleError):  # the queue is gone, or another release has made it
                rings.append(RingFile(segment, overflow))
    return rings, skipped


def find_queues() -> tuple[QueueSnapshot, ...]:
    """Return this user's queues on this host, sorted by name, then by id.

    Raises:
        NoProc: There is no ``/proc``.
    """
    with Watch() as watch:
        return watch.look()


def find_queue(key: str) -> QueueSnapshot:
    """Return the queue with this name, id, beginning of an id, or pid of one of its ends.

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
    found = found or [queue for queue in queues if key.isdigit() and int(key) in [end.pid for end in queue.ends]]
    if len(found) == 1:
        return found[0]
    if found:
        labels = [queue.label for queue in found]
        if len({*labels}) < len(labels):  # one name
            labels = [queue.header.queue_id[:12] for queue in found]
        raise QueueNotFound(key, f"{key!r} matches {len(found)} queues, say which", labels)
    problem = f"there is no queue {key!r}; queues of this user on this host"
    raise QueueNotFound(key, problem, (_named(queue) for queue in queues))


def _named(queue: QueueSnapshot) -> str:
    if queue.writer.state == "gone":
        return f"{queue.label} (its writer is gone)"
    return f"{queue.label} (pid {queue.writer.pid})"


class Watch:
    """Reads this user's queues on this host again and again; a context manager.

    Args:
        rescan_s: Seconds after which `look` searches for new queues.

    Attributes:
        skipped: The number of processes that could not be read.
    """

    def __init__(self, rescan_s: float = RESCAN_S) -> None:
        self._rescan_s = rescan_s
        self._rings: list[RingFile] = []
        self._due = 0.0
        self._before: dict[str, QueueSnapshot] = {}
        self.skipped: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def look(self) -> tuple[QueueSnapshot, ...]:
        """Return all queues, sorted by name, then by id, with the rates since the last call.

        Raises:
            NoProc: There is no ``/proc``.
        """
        if monotonic() >= self._due:
            self.close()
            self._rings, self.skipped = find_rings()
            self._due = monotonic() + self._rescan_s
        processes: dict[int, ProcessInfo] = {}
        now: dict[str, QueueSnapshot] = {}
        for ring in self._rings:
            with suppress(OSError, HandleError):
                queue = ring.snapshot(processes)
                if queue.holders:
                    now[ring.queue_id] = queue
        found = []
        for queue in sorted(now.values(), key=lambda queue: (not queue.header.name, queue.label)):
            before = self._before.get(queue.header.queue_id)
            found.append(queue if before is None else with_rates(queue, before))
        self._before = now
        return tuple(found)

    def ring(self, queue: QueueSnapshot) -> RingFile:
        """Return the ring of a queue that the last `look` returned.

        Raises:
            KeyError: The queue was not among them.
        """
        for ring in self._rings:
            if ring.queue_id == queue.header.queue_id:
                return ring
        raise KeyError(queue.label)

    def close(self) -> None:
        """Close all rings; the next `look` finds them again. Idempotent."""
        for ring in self._rings:
            ring.close()
        self._rings = []
        self._due = 0.0
