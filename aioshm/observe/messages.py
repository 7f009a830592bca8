"""The latest messages of a queue: their headers and first bytes, read from the ring; nothing is decoded."""

from __future__ import annotations

import codecs
import struct
from contextlib import suppress
from time import monotonic_ns

import msgspec

from aioshm.codec.frames import HEADER, INLINE, MAX_BUFFERS, OVERFLOW, PLACED, RAW
from aioshm.codec.registry import name_of_code
from aioshm.observe.queues import Ring
from aioshm.ring import layout as at
from aioshm.ring.header import read_header

PREVIEW_BYTES = 64

_KINDS = {INLINE: "inline", OVERFLOW: "overflow", RAW: "raw"}
_SEQ_AT = 8
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_SEGMENT_NUMBER = at.OVERFLOW_SIZE - 4  # u32; see queue/local/overflow.py


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


def last_messages(ring: Ring, number: int, *, bodies: bool = False) -> list[MessageHeader]:
    """Return the latest messages of a queue, the oldest first, without messages that are being overwritten.

    Args:
        ring: The queue's ring, see `Watch.ring`.
        number: How many, at most; the ring holds `Layout.slots`.
        bodies: Whether to show the first bytes of each. Nothing is decoded.
    """
    if number < 1:
        raise ValueError(f"number must be at least 1, not {number}")
    layout = ring.layout
    header = read_header(ring.read(0, layout.header_bytes))
    found = []
    for seq in range(max(0, header.writer.messages - min(number, layout.slots)), header.writer.messages):
        slot = layout.slot(seq % layout.slots)
        head = ring.read(slot, at.SLOT_HEADER_BYTES)
        flags = ring.read(layout.flags(seq % layout.slots), layout.flag_bytes)
        if not flags[0] or head[_SEQ_AT : _SEQ_AT + 8] != _U64.pack(seq):
            continue
        unread = tuple(row.rank for row, read in zip(header.readers, flags[1:], strict=True) if not read)
        message = _message(ring, head, slot, unread, bodies)
        if ring.read(slot + _SEQ_AT, 8) == _U64.pack(seq):  # the writer has not overwritten the slot meanwhile
            found.append(message)
    return found


def _message(ring: Ring, head: bytes, slot: int, unread: tuple[int, ...], bodies: bool) -> MessageHeader:
    kind, code, how, n_buffers, seq, at_ns, main_bytes = HEADER.unpack_from(head)
    chunk = _U64.unpack_from(head, at.CHUNK)[0]  # number of the chunk + 1; 0: none
    nbytes = _U64.unpack_from(head, at.SIZE)[0] or main_bytes
    begin = slot + at.SLOT_HEADER_BYTES
    room = ring.layout.inline_bytes
    where = "slot"
    if kind == OVERFLOW:
        nbytes = _U64.unpack_from(head, at.OVERFLOW_SIZE)[0]
        where = f"segment {_U32.unpack_from(head, _SEGMENT_NUMBER)[0]}"
        room = 0
    elif chunk and (found := at.chunk_at(ring.layout.pools, chunk - 1)) is not None:
        where = f"chunk {chunk - 1}"
        begin = found[0] + at.CHUNK_HEADER_BYTES
        room = found[1]
    elif chunk:  # garbage
        where = "nowhere"
        room = 0
    preview_hex = None
    preview_text = None
    table = at.round_up(8 * n_buffers, at.LINE)  # of the buffers, before the main part
    if bodies and room and how != PLACED and n_buffers <= MAX_BUFFERS and table + main_bytes <= room:
        preview = ring.read(begin + table, min(PREVIEW_BYTES, main_bytes))
        preview_hex = preview.hex()
        with suppress(UnicodeDecodeError):  # the last letter may be cut off
            text, _ = codecs.utf_8_decode(preview, "strict", len(preview) == main_bytes)
            if text.isprintable():
                preview_text = text
    return MessageHeader(
        seq=seq,
        kind=_KINDS.get(kind, f"kind {kind}"),
        codec="" if kind == RAW else name_of_code(code),
        bytes=nbytes,
        main_bytes=main_bytes,
        buffers=n_buffers,
        where=where,
        age_s=max(0, monotonic_ns() - at_ns) / 1e9,
        unread_by=unread,
        preview_hex=preview_hex,
        preview_text=preview_text,
    )
