"""Queues from one look to the next: how fast they are, and what their processes cost."""

from __future__ import annotations

from contextlib import suppress
from time import monotonic

import msgspec

from aioshm.errors import HandleError
from aioshm.observe.proc import ProcessInfo
from aioshm.observe.scan import RingFile, find_rings
from aioshm.observe.segments import SegmentFinder
from aioshm.observe.snapshot import QueueSnapshot

RESCAN_S = 2.0
"""How often new queues and processes are looked for; that costs more than to look at those that are known. See
`SegmentFinder`, too."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What happened between two looks at a queue.

    Attributes:
        seconds: Between them.
        messages_per_s: Published.
        bytes_per_s: In their bodies.
        read_per_s: Messages that each reader has finished with, in the order of the readers.
        cpu_share: Of one CPU, by the process of each end, in the order of the ends; None: not known.
    """

    seconds: float
    messages_per_s: float
    bytes_per_s: float
    read_per_s: tuple[float, ...]
    cpu_share: tuple[float | None, ...]


class Watched(msgspec.Struct, frozen=True):
    """A queue, and what has happened since the last look.

    Attributes:
        queue: How it is now.
        rates: Since the last look; None: this is the first one.
    """

    queue: QueueSnapshot
    rates: Rates | None


class Watch:
    """Looks at this user's queues on this host again and again; a context manager.

    Args:
        rescan_s: Seconds after which new queues are looked for.

    Attributes:
        skipped: Processes that were not looked at.
    """

    def __init__(self, rescan_s: float = RESCAN_S) -> None:
        self._rescan_s = rescan_s
        self._finder = SegmentFinder()
        self._rings: list[RingFile] = []
        self._due = 0.0
        self._before: dict[str, QueueSnapshot] = {}
        self.skipped: int = 0

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def look(self) -> tuple[Watched, ...]:
        """Return the queues that there are, by name or id.

        Raises:
            NoProc: There is no ``/proc``.
        """
        if monotonic() >= self._due:
            self.close()
            self._rings, self.skipped = find_rings(self._finder)
            self._due = monotonic() + self._rescan_s
        processes: dict[int, ProcessInfo] = {}
        now: dict[str, QueueSnapshot] = {}
        for ring in self._rings:
            with suppress(OSError, HandleError):
                queue = ring.snapshot(processes)
                if queue.holders:
                    now[ring.queue_id] = queue
        before, self._before = self._before, now
        ordered = sorted(now.items(), key=lambda item: (not item[1].header.name, item[1].label))
        return tuple(Watched(queue, rates(before[key], queue) if key in before else None) for key, queue in ordered)

    def ring(self, queue: QueueSnapshot) -> RingFile:
        """Return the ring of a queue that the last look has shown.

        Raises:
            KeyError: It is not among them.
        """
        for ring in self._rings:
            if ring.queue_id == queue.header.queue_id:
                return ring
        raise KeyError(queue.label)

    def close(self) -> None:
        """Let go of the queues; the next look finds them again. Idempotent."""
        for ring in self._rings:
            ring.close()
        self._rings = []
        self._due = 0.0


def rates(before: QueueSnapshot, now: QueueSnapshot) -> Rates:
    """Return what has happened between two looks at a queue."""
    seconds = max((now.taken_ns - before.taken_ns) / 1e9, 1e-9)
    earlier = {end.pid: end.cpu_s for end in before.ends}
    return Rates(
        seconds=seconds,
        messages_per_s=max(0, now.header.writer.messages - before.header.writer.messages) / seconds,
        bytes_per_s=max(0, now.header.writer.bytes - before.header.writer.bytes) / seconds,
        read_per_s=tuple(
            max(0, end.messages - then.messages) / seconds
            for end, then in zip(now.readers, before.readers, strict=True)
        ),
        cpu_share=tuple(
            max(0.0, end.cpu_s - earlier[end.pid]) / seconds if end.pid in earlier and end.cpu_s else None
            for end in now.ends
        ),
    )
