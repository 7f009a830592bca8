"""What queues look like from outside, as figures: with the names and labels from inside, where they mean the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aioshm.observe.families import ATTACHED, LATENCY, QUEUE, READER, READER_UP, Family
from aioshm.observe.figures import Figure
from aioshm.observe.proc import HUNG
from aioshm.observe.snapshot import End, QueueSnapshot

_END = ("queue", "side", "rank")

MEMORY = Family("queue_memory_bytes", "gauge", "By", "Memory that the ring occupies.", ("queue",))
SEGMENTS = Family("queue_overflow_segments", "gauge", "{segment}", "Overflow segments beside the ring.", ("queue",))
SEGMENT_BYTES = Family("queue_overflow_segment_bytes", "gauge", "By", "Memory that these occupy.", ("queue",))
AGE = Family("queue_age_seconds", "gauge", "s", "Time since the queue was made.", ("queue",))
CPU = Family("queue_end_cpu_seconds", "counter", "s", "CPU time that the process of an end has used.", _END)
HUNG_ENDS = Family("queue_end_stopped", "gauge", "1", "Whether the process of an end is stopped, or is gone.", _END)
PARKED = Family("queue_end_parked", "gauge", "1", "Whether an end sleeps until it is woken.", _END)
QUEUES = Family("host_queues", "gauge", "{queue}", "Queues of this user on this host.", ())
SKIPPED = Family("host_skipped_processes", "gauge", "{process}", "Processes that were not looked at: others' own.", ())

HOST_FAMILIES: tuple[Family, ...] = (
    *(QUEUE[field] for field in ("messages", "bytes", "overflows", "backlog", "slots")),
    *(ATTACHED, *READER.values(), READER_UP, LATENCY),
    *(MEMORY, SEGMENTS, SEGMENT_BYTES, AGE, CPU, HUNG_ENDS, PARKED, QUEUES, SKIPPED),
)
"""All that there are."""


def host_figures(queues: Iterable[QueueSnapshot], skipped: int) -> Iterator[Figure]:
    """Return the figures of a host's queues; two of one name, in namespaces of their own, are told apart by their ids.

    Args:
        queues: How each of them is.
        skipped: How many processes were not looked at.
    """
    queues = list(queues)
    yield Figure(QUEUES, (), len(queues))
    yield Figure(SKIPPED, (), skipped)
    taken: set[str] = set()
    for queue in queues:
        label = queue.label if queue.label not in taken else f"{queue.label}#{queue.header.queue_id[:8]}"
        taken.add(label)
        yield from _of_queue(queue, label)


def _of_queue(queue: QueueSnapshot, label: str) -> Iterator[Figure]:
    header, writer = queue.header, (label, "writer", "")
    yield Figure(QUEUE["messages"], writer, header.writer.messages)
    yield Figure(QUEUE["bytes"], writer, header.writer.bytes)
    yield Figure(QUEUE["overflows"], writer, header.writer.overflows)
    yield Figure(QUEUE["backlog"], writer, header.backlog)
    yield Figure(QUEUE["slots"], writer, header.slots)
    yield Figure(ATTACHED, (label,), sum(row.state == "attached" for row in header.readers))
    yield Figure(MEMORY, (label,), queue.memory_bytes)
    yield Figure(SEGMENTS, (label,), queue.overflow_segments)
    yield Figure(SEGMENT_BYTES, (label,), queue.overflow_bytes)
    yield Figure(AGE, (label,), header.writer.age_s)
    for row in header.readers:
        if not row.pid:
            continue  # a place that nobody has had yet
        rank = str(row.rank)
        yield Figure(READER["read"], (label, rank), row.read)
        yield Figure(READER["bytes"], (label, rank), row.bytes)
        yield Figure(READER["lag"], (label, rank), row.lag)
        yield Figure(READER_UP, (label, rank), row.state == "attached")
        yield Figure(LATENCY, (label, rank), row.latency)
    for end in queue.ends:
        if end.there and end.pid:
            yield from _of_end(end, (label, end.side, "" if end.side == "writer" else str(end.rank)))


def _of_end(end: End, labels: tuple[str, ...]) -> Iterator[Figure]:
    yield Figure(CPU, labels, end.cpu_s)
    yield Figure(HUNG_ENDS, labels, end.state in HUNG)
    yield Figure(PARKED, labels, end.waits == "parked")
