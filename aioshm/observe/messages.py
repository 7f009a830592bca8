"""The latest messages of a queue: their headers and first bytes, read from the ring; nothing is decoded."""

from __future__ import annotations

import codecs
import struct
from collections.abc import Iterator
from time import monotonic_ns

import msgspec

from aioshm.codec.frames import HEADER, INLINE, MAX_BUFFERS, OVERFLOW, PLACED, RAW
from aioshm.codec.registry import name_of_code
from aioshm.observe.scan import RingFile
from aioshm.ring.header import read_header
from aioshm.ring.layout import (
    CHUNK,
    CHUNK_HEADER_BYTES,
    LINE,
    OVERFLOW_SIZE,
    SIZE,
    SLOT_HEADER_BYTES,
    chunk_at,
    round_up,
)

PREVIEW_BYTES = 64

_KINDS = {INLINE: "inline", OVERFLOW: "overflow", RAW: "raw"}
_SEQ_AT = 8
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_SEGMENT = OVERFLOW_SIZE - 4  # u32: its number; see queue/local/overflow.py


class MessageHeader(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a ring: the last one that was published in its slot.

    Attributes:
        seq: The message's number.
        kind: ``"inline"``: encoded, in the ring; ``"overflow"``: encoded, in an overflow segment; ``"raw"``: bytes of
            `acquire_write`.
        codec: The name of the codec; empty: none.
        bytes: The size that the header has.
        main_bytes: The size without out-of-band buffers.
        buffers: The number of out-of-band buffers (arrays, tensors, large bytes).
        where: ``"slot"``, ``"chunk N"`` or ``"segment N"``.
        age_s: Seconds since the message was published.
        unread_by: The ranks of the readers that have not finished with it.
        preview_hex: The first bytes of the main part in hex, if requested and in the ring.
        preview_text: The same as text, if it is printable UTF-8.
    """

    seq: int
    kind: str
    codec: str
    bytes: int
    main_bytes: int
    buffers: int
    where: str
    age_s: float
    unread_by: tuple[int, ...]
    preview_hex: str | None = None
    preview_text: str | None = None


def _text(preview: bytes, is_whole: bool) -> str | None:
    """Return a preview as text, if it is printable UTF-8; the last letter may be cut off unless it is whole."""
    try:
        text, _ = codecs.utf_8_decode(preview, "strict", is_whole)
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() else None


def last_messages(ring: RingFile, number: int, *, bodies: bool = False) -> list[MessageHeader]:
    """Return the latest messages of a queue, the oldest first, without messages that are being overwritten.

    Args:
        ring: The queue's ring.
        number: How many, at most; the ring holds `Layout.slots`.
        bodies: Whether to show the first bytes of each.
    """
    if number < 1:
        raise ValueError(f"number must be at least 1, not {number}")
    header = read_header(ring.read(0, ring.layout.header_bytes))
    ranks = [row.rank for row in header.readers]
    first = max(0, header.writer.messages - min(number, ring.layout.slots))
    return list(_messages(ring, range(first, header.writer.messages), ranks, bodies))


def _messages(ring: RingFile, numbers: range, ranks: list[int], bodies: bool) -> Iterator[MessageHeader]:
    layout = ring.layout
    for seq in numbers:
        index = seq % layout.slots
        slot = layout.slot(index)
        head = ring.read(slot, SLOT_HEADER_BYTES)
        flags = ring.read(layout.flags(index), layout.flag_bytes)
        if len(head) < SLOT_HEADER_BYTES or not flags[0] or _U64.unpack_from(head, _SEQ_AT)[0] != seq:
            continue
        message = _message(ring, head, slot, seq, bodies)
        if ring.read(slot + _SEQ_AT, 8) != _U64.pack(seq):
            continue  # the writer has overwritten the slot meanwhile
        unread = tuple(rank for rank, read in zip(ranks, flags[1:], strict=True) if not read)
        yield msgspec.structs.replace(message, unread_by=unread)


def _message(ring: RingFile, head: bytes, slot: int, seq: int, bodies: bool) -> MessageHeader:
    kind, code, how, n_buffers, _, at_ns, main_bytes = HEADER.unpack_from(head)
    chunk = _U64.unpack_from(head, CHUNK)[0]  # number of the chunk + 1; 0: none
    place = (slot + SLOT_HEADER_BYTES, ring.layout.inline_bytes)
    where = "slot"
    nbytes = main_bytes
    preview_hex = None
    preview_text = None
    if kind == OVERFLOW:
        nbytes = _U64.unpack_from(head, OVERFLOW_SIZE)[0]
        where = f"segment {_U32.unpack_from(head, _SEGMENT)[0]}"
    elif chunk and (found := chunk_at(ring.layout.pools, chunk - 1)) is None:
        where = "nowhere"
    else:
        nbytes = _U64.unpack_from(head, SIZE)[0] or main_bytes
        if chunk and found is not None:
            where = f"chunk {chunk - 1}"
            place = (found[0] + CHUNK_HEADER_BYTES, found[1])
        begin = place[0] + round_up(8 * n_buffers, LINE)  # after the table of the buffers
        if bodies and how != PLACED and n_buffers <= MAX_BUFFERS and begin + main_bytes <= sum(place):
            preview = ring.read(begin, min(PREVIEW_BYTES, main_bytes))
            preview_hex = preview.hex()
            preview_text = _text(preview, len(preview) == main_bytes)
    codec = ""
    if kind != RAW:
        codec = name_of_code(code)
    return MessageHeader(
        seq=seq,
        kind=_KINDS.get(kind, f"kind {kind}"),
        codec=codec,
        bytes=nbytes,
        main_bytes=main_bytes,
        buffers=n_buffers,
        where=where,
        age_s=max(0, monotonic_ns() - at_ns) / 1e9,
        unread_by=(),
        preview_hex=preview_hex,
        preview_text=preview_text,
    )
