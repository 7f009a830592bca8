"""The layout of a segment: the offset of the header, of each reader's line, of flags and slots.

    offset            what                                                       written by
    0                 magic, version, sizes, queue id                            creator, once
    64                writer line: messages written, closed, pid                 writer
    128               writer parked, slots it waits for beyond the next one      writer (and the reader that wakes it)
    192               readers parked: one byte each, rounded up to 64            that reader (and the writer)
    ...               one 64-byte line per reader: messages read, state, pid     that reader; state and pid: writer
    header_bytes      slots: max_chunks x [64-byte slot header][chunk]           writer
    metadata_offset   flags: max_chunks x [written][read by 0][read by 1]...     writer and readers

The slots fill pages of their own, which readers map read-only: no reader can change what another one reads. The flags,
and the header with the writer's line, stay writable for all: a reader that scribbles on them can hold the queue up or
end it, but the sequence numbers, which are in the slots, let no wrong message pass.

Every part begins on its own 64-byte cache line, and what one end writes for every message (its line) shares no line
with what the other end reads for every message (the parked flags), so a hot stream moves no line that it need not.

The flags of one slot:

    0 ??? ???   not written: cannot be read, can be written
    1 0 0 ... 0 just written: can be read, cannot be written
    1 some 1    written, read by some: readable by the rest, cannot be written
    1 1 1 ... 1 read by all: cannot be read, can be written
"""

from __future__ import annotations

import resource
import struct
from dataclasses import dataclass

MAGIC = b"aioshm\r\n"  # CR LF: a transfer that mangles line ends shows at once, as in PNG's signature
VERSION = 2
LINE = 64
PAGE = resource.getpagesize()  # bytes; protection and mappings are set by the page
SLOT_HEADER_BYTES = 64

QUEUE_ID_BYTES = 16
PREAMBLE = struct.Struct("<8sIIQQ16s")  # magic, version, n_reader, max_chunk_bytes, max_chunks, queue id

WRITER_LINE = LINE
WRITER_PARKED = 2 * LINE
WRITER_WANTS = WRITER_PARKED + 8  # u64
READERS_PARKED = 3 * LINE

# Inside the writer's and each reader's line.
COUNT = 0  # u64: messages written or read
STATE = 8  # u8: writer: 1 once closed; reader: one of the states below
PID = 12  # u32

ABSENT, ATTACHED, LEFT, DIED, EVICTED = range(5)


def round_up(value: int, unit: int) -> int:
    """Return the first multiple of ``unit`` that is not below ``value``."""
    return -(-value // unit) * unit


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets, all in bytes from the start of the segment.

    Attributes:
        n_reader: Readers of the ring.
        max_chunk_bytes: Room for one message in a slot, after the slot's header.
        max_chunks: Slots.
    """

    n_reader: int
    max_chunk_bytes: int
    max_chunks: int

    @property
    def reader_lines(self) -> int:
        return READERS_PARKED + round_up(self.n_reader, LINE)

    @property
    def header_bytes(self) -> int:
        return round_up(self.reader_lines + self.n_reader * LINE, PAGE)

    @property
    def slot_bytes(self) -> int:
        return SLOT_HEADER_BYTES + round_up(self.max_chunk_bytes, LINE)

    @property
    def metadata_offset(self) -> int:
        return round_up(self.header_bytes + self.max_chunks * self.slot_bytes, PAGE)

    @property
    def flag_bytes(self) -> int:
        return 1 + self.n_reader

    @property
    def total_bytes(self) -> int:
        return round_up(self.metadata_offset + self.max_chunks * self.flag_bytes, PAGE)

    def reader_line(self, reader: int) -> int:
        """Return where the line of a reader (0 to n_reader - 1) begins."""
        return self.reader_lines + reader * LINE

    def slot(self, index: int) -> int:
        """Return where a slot begins: its header, then its chunk."""
        return self.header_bytes + index * self.slot_bytes

    def flags(self, index: int) -> int:
        """Return where the flags of a slot begin."""
        return self.metadata_offset + index * self.flag_bytes

    def preamble(self, queue_id: bytes) -> bytes:
        """Return the bytes that open the segment."""
        return PREAMBLE.pack(MAGIC, VERSION, self.n_reader, self.max_chunk_bytes, self.max_chunks, queue_id)
