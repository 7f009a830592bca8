"""The layout of a segment: the offset of the header, of each reader's line, of slots, chunks and flags.

    offset            what                                                       written by
    0                 magic, version, sizes, queue id                            creator, once
    64                writer line: messages written, closed, pid, ...            writer
    128               writer parked, the message that it waits for               writer (and the reader that wakes it)
    192               readers parked: one byte each, rounded up to 64            that reader (and the writer)
    ...               one 64-byte line per reader: messages read, state, pid     that reader; state, pid, rank: writer
    ...               one histogram per reader: how long messages took           that reader
    ...               the queue's name, how many remote readers it has           writer
    header_bytes      slots x [64-byte slot header][inline_bytes of room],       writer
                      and, if asked for, one more line: the trace context
    ...               the pool: for each size of chunk,                          writer
                      count x [64-byte line: 1 + message number][room]
    metadata_offset   flags: slots x [written][read by 0][read by 1]...          writer and readers

Message number n goes through slot n modulo ``slots``. A message that fits the slot's room lies
there; a larger one has a chunk from the pool, which the slot's header names (`CHUNK`). Only the
writer knows which chunks are free, outside of the segment; of each size (`SMALL_CHUNKS`) it takes
the chunk that became free last, whose pages are warm. A message larger than ``max_chunk_bytes``
lies in an overflow segment, and takes a chunk all the same, so that at most ``max_chunks`` of these
messages are in flight.

Readers map the slots and the pool read-only. A reader that scribbles on the flags or the header can
block or end the queue, but the message numbers in slots and chunks let no wrong message pass. What
one end writes for every message shares no cache line with what the peer reads for every message.

The flags of one slot:

    0 ??? ???   not written: cannot be read, can be written
    1 0 0 ... 0 just written: can be read, cannot be written
    1 some 1    written, read by some: readable by all others, cannot be written
    1 1 1 ... 1 read by all: cannot be read, can be written
"""

from __future__ import annotations

import functools
import resource
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAGIC = b"aioshm\r\n"  # CR LF: a transfer that mangles line ends shows at once, as in PNG's signature
VERSION = 15  # of this, and of what passes over lifelines and between a writer and its remote readers
LINE = 64
PAGE = resource.getpagesize()  # bytes; protection and mappings are set by the page
SLOT_HEADER_BYTES = 64
CHUNK = 32  # u64 in a slot's header: 0, or 1 + the number of the chunk that has the body
SIZE = 40  # u64 in a slot's header: bytes of the body, if it is in the ring
OVERFLOW_KIND = 2  # the first byte of an overflow message's header: OVERFLOW of codec/frames.py
OVERFLOW_SIZE = 52  # u64 in an overflow message's header: bytes of the body; see ``queue/local/overflow.py``
CHUNK_HEADER_BYTES = 64
TRACE = struct.Struct("<BB16s8s")  # 1, or 0: there is none; W3C's flags, trace id, span id
TRACE_BYTES = TRACE.size
TRAIL = 1024  # latest messages whose trace contexts a reader keeps; more than a batch has
MAX_INLINE_BYTES = 2**32 - 1

QUEUE_ID_BYTES = 16
PREAMBLE = struct.Struct("<8sIIQQQII16s")
"""Magic, version, n_reader, chunk bytes, chunks, slots, inline bytes, whether slots have trace contexts, queue id."""

WRITER_LINE = LINE
WRITER_PARKED = 2 * LINE
WRITER_WANTS = WRITER_PARKED + 8  # u64
READERS_PARKED = 3 * LINE

# Inside the writer's and each reader's line.
COUNT = 0  # u64: messages written or read
STATE = 8  # u8: writer: 1 once closed; reader: one of the states below
SPINNING = 9  # u8: 1 while this end spins
CODEC = 10  # u8, of the writer: the codec's code
PID = 12  # u32
BYTES = 40  # u64: in the bodies of all messages written or read
OVERFLOWS = 48  # u64, of the writer: messages that were larger than a chunk
CREATED = 56  # u64, of the writer: when the queue was made, by the same clock as the times of publishing
RANK = 16  # u32, of a reader
LATENCY_NS = 24  # u64, of a reader: the sum of what its histogram counts

LATENCY_BUCKETS = 32
"""Words of a reader's histogram: the first counts latencies below 2**8 ns, each further one doubles the bound, the last
counts all above 2**38 ns."""

LATENCY_FIRST_BIT = 8
LATENCY_EVERY = 8

NAME_BYTES = 2 * LINE  # u8: bytes of the name; u32 at REMOTE_READERS; the name at NAME
REMOTE_READERS = 4
NAME = 8

ABSENT, ATTACHED, LEFT, DIED, EVICTED, DISMISSED, HELD = range(7)

# Measured with 1 to 4 readers on 2 CPUs. More slots mean fewer switches of a CPU, until the slots, less than 5 MiB, do
# not fit a cache.
SLOTS = 4096
INLINE_BYTES = 1024

SMALL_CHUNKS = ((72 * 1024, 16), (4608, 256))
"""Sizes and numbers of smaller chunks: room for 64 KiB and for 4 KiB of numbers, with a codec's overhead. About 1 MiB
of each size: a fast writer fills all of them, and copies are several times as fast within a core's own cache."""


def round_up(value: int, unit: int) -> int:
    """Return the first multiple of ``unit`` that is not below ``value``."""
    return -(-value // unit) * unit


class Pool(NamedTuple):
    """The chunks of one size."""

    # Offset of the first chunk in the segment.
    start: int
    # Bytes for a message, behind the 64-byte header.
    room: int
    # Bytes from one chunk to the next.
    stride: int
    chunks: int
    # Numbers run on from pool to pool.
    first: int

    @property
    def end(self) -> int:
        """The offset behind the last chunk."""
        return self.start + self.chunks * self.stride


class Sizes(NamedTuple):
    """The numbers of a layout that a core works with, in the order in which the C code reads them."""

    n_reader: int
    max_chunk_bytes: int
    slots: int
    inline_bytes: int
    slot_bytes: int
    header_bytes: int
    metadata_offset: int
    trace_at: int
    total_bytes: int


@dataclass(frozen=True)
class Layout:
    """Offsets, all in bytes from the start of the segment; each is computed once."""

    n_reader: int
    max_chunk_bytes: int
    max_chunks: int
    slots: int
    inline_bytes: int
    traced: bool = False

    @classmethod
    def of(
        cls,
        n_reader: int,
        max_chunk_bytes: int,
        max_chunks: int,
        slots: int | None = None,
        inline_bytes: int | None = None,
        traced: bool = False,
    ) -> Layout:
        """Return the layout of a ring; None: as many slots, and as much room in each, as are good for most."""
        if slots is None:
            slots = max(SLOTS, max_chunks)
        if inline_bytes is None:
            inline_bytes = INLINE_BYTES
        return cls(n_reader, max_chunk_bytes, max_chunks, slots, min(inline_bytes, max_chunk_bytes), traced)

    @functools.cached_property
    def reader_lines(self) -> int:
        return READERS_PARKED + round_up(self.n_reader, LINE)

    @functools.cached_property
    def header_bytes(self) -> int:
        return round_up(self.name_at + NAME_BYTES, PAGE)

    @property
    def name_at(self) -> int:
        """The offset of the queue's name."""
        return self.histogram(self.n_reader)

    @functools.cached_property
    def slot_bytes(self) -> int:
        return SLOT_HEADER_BYTES + round_up(self.inline_bytes, LINE) + LINE * self.traced

    @property
    def trace_at(self) -> int:
        """The offset of the trace context in a slot; 0: there is none."""
        if not self.traced:
            return 0
        return self.slot_bytes - LINE

    @property
    def slots_end(self) -> int:
        return self.header_bytes + self.slots * self.slot_bytes

    @functools.cached_property
    def pools(self) -> tuple[Pool, ...]:
        """The chunks by size, the largest first."""
        pools = [_pool(self.slots_end, self.max_chunk_bytes, self.max_chunks, 0)]
        for room, count in SMALL_CHUNKS:
            if self.inline_bytes < room <= self.max_chunk_bytes // 2:
                last = pools[-1]
                pools.append(_pool(last.end, room, min(count, self.slots), last.first + last.chunks))
        return tuple(pools)

    @functools.cached_property
    def metadata_offset(self) -> int:
        return round_up(self.pools[-1].end, PAGE)

    @property
    def flag_bytes(self) -> int:
        return 1 + self.n_reader

    @functools.cached_property
    def total_bytes(self) -> int:
        return round_up(self.metadata_offset + self.slots * self.flag_bytes, PAGE)

    @functools.cached_property
    def sizes(self) -> Sizes:
        return Sizes(*[getattr(self, name) for name in Sizes._fields])

    def holds(self, messages: int, large: Sequence[int]) -> bool:
        """Return whether the empty ring has room for so many messages; messages that take a chunk have these sizes."""
        if messages > self.slots:
            return False
        pools = self.pools
        wanted = Counter(pool_for(pools, nbytes) for nbytes in large)
        return all(amount <= pool.chunks for pool, amount in wanted.items())

    def reader_line(self, reader: int) -> int:
        """Return the offset of a reader's line (0 to n_reader - 1)."""
        return self.reader_lines + reader * LINE

    def histogram(self, reader: int) -> int:
        """Return where the histogram of a reader begins."""
        return self.reader_lines + self.n_reader * LINE + reader * LATENCY_BUCKETS * 8

    def slot(self, index: int) -> int:
        """Return where a slot begins: its header, then its room."""
        return self.header_bytes + index * self.slot_bytes

    def flags(self, index: int) -> int:
        """Return where the flags of a slot begin."""
        return self.metadata_offset + index * self.flag_bytes

    def preamble(self, queue_id: bytes) -> bytes:
        """Return the bytes that open the segment."""
        sizes = (self.n_reader, self.max_chunk_bytes, self.max_chunks, self.slots, self.inline_bytes, self.traced)
        return PREAMBLE.pack(MAGIC, VERSION, *sizes, queue_id)


def _pool(behind: int, room: int, count: int, first: int) -> Pool:
    return Pool(round_up(behind, PAGE), room, CHUNK_HEADER_BYTES + round_up(room, LINE), count, first)


def pool_for(pools: tuple[Pool, ...], nbytes: int) -> Pool:
    """Return the smallest chunks that have room for so many bytes; the largest, if none have."""
    for pool in reversed(pools):
        if nbytes <= pool.room:
            return pool
    return pools[0]


def chunk_at(pools: tuple[Pool, ...], number: int) -> tuple[int, int] | None:
    """Return where a chunk's header begins and how much room is behind it, or None if there is no such chunk."""
    for start, room, stride, chunks, first in pools:
        if 0 <= number - first < chunks:
            return start + (number - first) * stride, room
    return None
