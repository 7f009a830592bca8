"""The untrusted header of a ring, for inspection: bytes to structs, no I/O."""

from __future__ import annotations

from time import monotonic_ns
from typing import ClassVar, Literal

import msgspec

from aioshm.errors import HandleError
from aioshm.ring import layout as at
from aioshm.ring.layout import Layout

State = Literal["absent", "attached", "left", "died", "evicted", "dismissed", "held", "unknown"]
STATES: tuple[State, ...] = ("absent", "attached", "left", "died", "evicted", "dismissed", "held")

MAX_HEADER_BYTES = 64 * 1024 * 1024
"""A larger header would mean more readers than a queue may have."""


class Latency(msgspec.Struct, frozen=True):
    """How long messages took from publishing until a reader had taken them.

    A histogram over a sample: every message that came alone, one in eight of those taken in batches or less than 20 us
    after one another.

    Attributes:
        counts: Messages of each bucket, see `BOUNDS_NS`.
        sum_ns: The sum of all counted latencies, in nanoseconds.
    """

    BOUNDS_NS: ClassVar[tuple[int, ...]] = tuple(1 << at.LATENCY_FIRST_BIT + n for n in range(at.LATENCY_BUCKETS - 1))
    """The upper bound of each bucket but the last."""

    counts: tuple[int, ...] = (0,) * at.LATENCY_BUCKETS
    sum_ns: int = 0

    @property
    def samples(self) -> int:
        """How many messages were counted."""
        return sum(self.counts)

    @property
    def sum_s(self) -> float:
        """The sum of all counted latencies, in seconds."""
        return self.sum_ns / 1e9

    def quantile(self, q: float) -> float | None:
        """Return the latency in seconds that the share ``q`` of the messages stayed below; None: no messages.

        The bounds of a bucket are a factor of two apart; messages count as spread evenly within it.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"q must be 0 to 1, not {q!r}")
        bounds = (0, *self.BOUNDS_NS)
        wanted = q * self.samples
        below = 0
        for bucket, count in enumerate(self.counts):
            if count and below + count >= wanted:
                low = bounds[bucket]
                high = 2 * low
                if bucket == 0:
                    high = bounds[1]
                return (low + (high - low) * max(0.0, wanted - below) / count) / 1e9
            below += count
        return None

    def since(self, before: Latency) -> Latency:
        """Return the latencies counted since ``before``; all, if another reader has attached since."""
        if any(now < then for now, then in zip(self.counts, before.counts, strict=True)):
            return self
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return Latency(counts, max(0, self.sum_ns - before.sum_ns))


class WriterRow(msgspec.Struct, frozen=True, kw_only=True):
    """The writer of a ring.

    Attributes:
        pid: The writer's process id as it sees itself; 0: none yet.
        closed: Whether the writer has closed the queue.
        messages: Messages published.
        bytes: Bytes in the bodies of these messages, overflow segments included.
        overflows: Messages that did not fit a chunk.
        parked: Whether the writer sleeps until there is room.
        spinning: Whether the writer busy-waits now.
        wants: The message that all must read before a parked writer continues.
        remote_readers: Readers on other hosts; only the writer's process knows their state.
        age_s: Seconds since the queue was made.
    """

    pid: int
    closed: bool
    messages: int
    bytes: int
    overflows: int
    parked: bool
    spinning: bool
    wants: int
    remote_readers: int
    age_s: float


class ReaderRow(msgspec.Struct, frozen=True, kw_only=True):
    """A slot for a reader of a ring, and its present or last reader.

    Attributes:
        place: The number of the slot, in the order of the flags.
        rank: The reader's rank.
        pid: The reader's process id as it sees itself; 0: none yet.
        state: The reader's state; ``"held"``: it died, and its unread messages are kept for a replacement.
        read: The number of the reader's next message.
        bytes: Bytes in the bodies of the messages that the reader has finished with.
        lag: Published messages that the reader has not finished with; 0 if the writer does not wait for it.
        parked: Whether the reader sleeps until there is a message.
        spinning: Whether the reader busy-waits now.
        latency: How long messages took from publishing to this reader.
    """

    place: int
    rank: int
    pid: int
    state: State
    read: int
    bytes: int
    lag: int
    parked: bool
    spinning: bool
    latency: Latency


class RingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a ring.

    Attributes:
        layout_version: Version of the layout.
        queue_id: The queue's id, in hex.
        name: The queue's name, or an empty string.
        codec: The code of the queue's codec.
        n_reader: Slots for readers in the ring.
        max_chunk_bytes: Room for one message in a chunk, in bytes.
        max_chunks: Chunks of that size.
        slots: Messages that the ring holds.
        inline_bytes: Room for a message in a slot, in bytes.
        traced: Whether messages carry trace contexts.
        writer: The writer.
        readers: The readers.
    """

    layout_version: int
    queue_id: str
    name: str
    codec: int
    n_reader: int
    max_chunk_bytes: int
    max_chunks: int
    slots: int
    inline_bytes: int
    traced: bool
    writer: WriterRow
    readers: tuple[ReaderRow, ...]

    @property
    def layout(self) -> Layout:
        """The layout of the segment."""
        return Layout(self.n_reader, self.max_chunk_bytes, self.max_chunks, self.slots, self.inline_bytes, self.traced)

    @property
    def label(self) -> str:
        """The queue's name, or the first 8 digits of its id."""
        return self.name or self.queue_id[:8]

    @property
    def backlog(self) -> int:
        """Messages that the slowest reader has not finished with."""
        return max((row.lag for row in self.readers), default=0)


def read_layout(preamble: bytes | memoryview) -> tuple[Layout, bytes]:
    """Return the layout of a ring and the queue's id from the segment's first bytes."""
    if len(preamble) < at.PREAMBLE.size or bytes(preamble[: len(at.MAGIC)]) != at.MAGIC:
        raise HandleError("the memory is not a ring of aioshm")
    _, version, n_reader, chunk_bytes, chunks, slots, inline, traced, queue_id = at.PREAMBLE.unpack_from(preamble)
    if version != at.VERSION:
        raise HandleError(f"the ring has layout version {version}, this aioshm reads {at.VERSION}")
    layout = Layout(n_reader, chunk_bytes, chunks, slots, inline, bool(traced))
    if not (chunk_bytes and chunks and slots and inline <= chunk_bytes and layout.header_bytes <= MAX_HEADER_BYTES):
        raise HandleError(f"the sizes of the ring are impossible: {layout}")
    return layout, queue_id


def read_header(header: bytes | bytearray | memoryview, now_ns: int | None = None) -> RingHeader:
    """Decode a ring's header, read at ``now_ns`` by the host's ``time.monotonic_ns()``."""
    view = memoryview(header)
    layout, queue_id = read_layout(view)
    if len(view) < layout.header_bytes:
        raise HandleError(f"the header of this ring has {layout.header_bytes} bytes, but only {len(view)} were read")
    view = memoryview(bytes(view[: layout.header_bytes]))  # nearly a snapshot
    if now_ns is None:
        now_ns = monotonic_ns()
    name_at = layout.name_at
    written = _u64(view, at.WRITER_LINE + at.COUNT)
    return RingHeader(
        layout_version=at.VERSION,
        queue_id=queue_id.hex(),
        name=bytes(view[name_at + at.NAME :][: view[name_at]]).decode(errors="replace"),
        codec=view[at.WRITER_LINE + at.CODEC],
        n_reader=layout.n_reader,
        max_chunk_bytes=layout.max_chunk_bytes,
        max_chunks=layout.max_chunks,
        slots=layout.slots,
        inline_bytes=layout.inline_bytes,
        traced=layout.traced,
        writer=_writer(view, layout, now_ns),
        readers=tuple(read_reader(view, layout, place, written) for place in range(layout.n_reader)),
    )


def _writer(view: memoryview, layout: Layout, now_ns: int) -> WriterRow:
    line = at.WRITER_LINE
    created = _u64(view, line + at.CREATED)
    age_s = 0.0
    if created:
        age_s = max(0, now_ns - created) / 1e9
    return WriterRow(
        pid=_u32(view, line + at.PID),
        closed=view[line + at.STATE] != 0,
        messages=_u64(view, line + at.COUNT),
        bytes=_u64(view, line + at.BYTES),
        overflows=_u64(view, line + at.OVERFLOWS),
        parked=view[at.WRITER_PARKED] != 0,
        spinning=view[line + at.SPINNING] != 0,
        wants=_u64(view, at.WRITER_WANTS),
        remote_readers=_u32(view, layout.name_at + at.REMOTE_READERS),
        age_s=age_s,
    )


def read_reader(view: memoryview, layout: Layout, place: int, written: int) -> ReaderRow:
    """Decode one reader's place in a ring's header, after ``written`` messages."""
    line = layout.reader_line(place)
    histogram = layout.histogram(place)
    code = view[line + at.STATE]
    read = _u64(view, line + at.COUNT)
    counts = view[histogram : histogram + 8 * at.LATENCY_BUCKETS].cast("Q").tolist()
    state: State = "unknown"
    if code < len(STATES):
        state = STATES[code]
    lag = 0
    if state in ("attached", "held"):
        lag = max(0, written - read)
    return ReaderRow(
        place=place,
        rank=_u32(view, line + at.RANK),
        pid=_u32(view, line + at.PID),
        state=state,
        read=read,
        bytes=_u64(view, line + at.BYTES),
        lag=lag,
        parked=view[at.READERS_PARKED + place] != 0,
        spinning=view[line + at.SPINNING] != 0,
        latency=Latency(tuple(counts), _u64(view, line + at.LATENCY_NS)),
    )


def _u64(view: memoryview, begin: int) -> int:
    return int.from_bytes(view[begin : begin + 8], "little")


def _u32(view: memoryview, begin: int) -> int:
    return int.from_bytes(view[begin : begin + 4], "little")
