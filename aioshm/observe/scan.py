"""Find this user's queues on this host, by the descriptors of its processes.

A process that has a ring mapped has its descriptor open, too (``ring/segment.py``), be it a memfd or a named segment
that has lost its name. What ``/proc/PID/fd`` shows of it is opened once more, to read only, and read with pread(2):
nothing is mapped, no page gets memory that its ends have not touched, and what hangs or is stopped is read like
anything else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from time import monotonic_ns

from aioshm.errors import AioshmError, HandleError
from aioshm.observe.proc import ProcessInfo, process_info
from aioshm.observe.segments import BLOCK, Segment, SegmentFinder
from aioshm.observe.snapshot import QueueSnapshot, Scan, snapshot_of
from aioshm.ring.header import read_header, read_layout
from aioshm.ring.layout import PID, PREAMBLE, WRITER_LINE
from aioshm.ring.segment import OVERFLOW_LABEL

_OVERFLOW = re.compile(rf"/memfd:{OVERFLOW_LABEL}([0-9a-f]{{8}})")
_MIN_PREFIX = 4


class QueueNotFound(AioshmError):
    """No queue of this user on this host is called so, or several are.

    Attributes:
        key: What was looked for.
        there_are: What the queues are called that there are.
    """

    def __init__(self, key: str, problem: str, there_are: Iterable[str]) -> None:
        self.key = key
        self.there_are: tuple[str, ...] = tuple(there_are)
        names = ", ".join(self.there_are) or "none"
        super().__init__(f"{problem}; queues of this user on this host: {names}")


class RingFile:
    """A ring of some process, opened to read only.

    Attributes:
        layout: Its layout.
        queue_id: The queue's, in hex.
        holders: Who has it open.
        overflow: How many overflow segments it has, and what they occupy.

    Raises:
        OSError: It cannot be opened any more.
        HandleError: It is no ring, or one of another version.
    """

    def __init__(self, segment: Segment, overflow: Mapping[str, tuple[int, int]]) -> None:
        self._fd = -1  # before anything fails, for __del__
        self._fd = segment.open()
        try:
            self.layout, queue_id = read_layout(os.pread(self._fd, PREAMBLE.size, 0))
        except BaseException:
            self.close()
            raise
        self.queue_id: str = queue_id.hex()
        if not self.read(WRITER_LINE + PID, 4).strip(b"\0"):
            self.close()
            raise HandleError("this ring has no writer: it is no queue, or not yet one")
        self.holders = tuple(segment.holders)
        self.overflow = overflow.get(self.queue_id[:8], (0, 0))

    def snapshot(self, processes: dict[int, ProcessInfo]) -> QueueSnapshot:
        """Return how the queue is now.

        Args:
            processes: What is known of processes; those that this has to look up are added.

        Raises:
            HandleError: It is damaged.
        """
        header = read_header(self.read(0, self.layout.header_bytes), taken := monotonic_ns())
        for pid in self.holders:
            if pid not in processes:
                processes[pid] = process_info(pid)
        holders = {pid: processes[pid] for pid in self.holders if processes[pid].state != "gone"}
        return snapshot_of(header, holders, os.fstat(self._fd).st_blocks * BLOCK, self.overflow, taken)

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the ring."""
        return os.pread(self._fd, length, offset)

    def close(self) -> None:
        """Close it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def find_rings(finder: SegmentFinder | None = None) -> tuple[list[RingFile], int]:
    """Return this user's rings on this host, which the caller closes, and how many processes were skipped.

    Args:
        finder: Remembers what processes have open, for who looks again and again.

    Raises:
        NoProc: There is no ``/proc``.
    """
    segments, skipped = (finder or SegmentFinder()).find()
    overflow: dict[str, tuple[int, int]] = {}
    for segment in segments:
        if found := _OVERFLOW.match(segment.link):
            count, nbytes = overflow.get(found[1], (0, 0))
            overflow[found[1]] = count + 1, nbytes + segment.blocks
    rings = []
    for segment in segments:
        if not _OVERFLOW.match(segment.link):
            with suppress(OSError, HandleError):  # it is gone by now, or no queue that this release reads
                rings.append(RingFile(segment, overflow))
    return rings, skipped


def find_queues() -> Scan:
    """Return this user's queues on this host, and how many processes were not looked at.

    Raises:
        NoProc: There is no ``/proc``.
    """
    rings, skipped = find_rings()
    processes: dict[int, ProcessInfo] = {}
    queues = []
    for ring in rings:
        with suppress(OSError, HandleError):
            queues.append(ring.snapshot(processes))
        ring.close()
    return Scan(tuple(sorted(queues, key=lambda queue: (not queue.header.name, queue.label))), skipped)


def find_queue(key: str) -> QueueSnapshot:
    """Return the queue of this name, id, beginning of an id, or pid of one of its ends.

    Raises:
        NoProc: There is no ``/proc``.
        QueueNotFound: There is no such queue, or several; the text lists what there is.
    """
    return chosen(key, find_queues().queues)


def chosen(key: str, queues: Iterable[QueueSnapshot]) -> QueueSnapshot:
    """Return the queue that a name, an id, the beginning of an id, or the pid of one of its ends stands for.

    Raises:
        QueueNotFound: There is none, or several.
    """
    queues = tuple(queues)
    found = [queue for queue in queues if key and queue.header.name == key]
    found = found or [queue for queue in queues if len(key) >= _MIN_PREFIX and queue.header.queue_id.startswith(key)]
    found = found or [queue for queue in queues if key.isdigit() and int(key) in [end.pid for end in queue.ends]]
    if len(found) == 1:
        return found[0]
    if found:
        labels = [f"{queue.header.queue_id[:12]}" for queue in found]
        raise QueueNotFound(key, f"{key!r} is {len(found)} queues ({', '.join(labels)}): say which by its id", ())
    raise QueueNotFound(key, f"there is no queue {key!r}", (_named(queue) for queue in queues))


def _named(queue: QueueSnapshot) -> str:
    where = f"pid {queue.writer.pid}" if queue.writer.state != "gone" else "its writer is gone"
    return f"{queue.label} ({where})"
