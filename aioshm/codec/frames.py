"""The content of a slot: a fixed header, then the message. Pure arithmetic on memory of the caller.

    0          64                                                     64 + inline_bytes
    +----------+---------------------------------------------------------------+
    |  header  |  the body of the message, if it has no chunk                  |
    +----------+---------------------------------------------------------------+

    header     kind u8 | codec u8 | how u16 | n_buffers u32 | sequence u64 | published u64 | main_bytes u64 |
               chunk u64 | ...

``how`` is 0, or `PLACED`, ``published`` the writer's ``CLOCK_MONOTONIC`` in nanoseconds, ``chunk`` 0, or 1 + the number
of the chunk that has the body (see ``ring/layout.py``), all numbers are little-endian. A body without out-of-band
buffers is the main part alone, so that a message of exactly ``inline_bytes``, or ``max_chunk_bytes``, still fits:

    0                main_bytes
    +----------------+
    |      main      |
    +----------------+

A body with buffers begins with the table of their lengths. Each later part starts on the next 64-byte boundary,
``*`` below, so that numbers in it can be read in place whatever their type:

    0                  *                    *                 *
    +------------------+--------------------+-----------------+-----------------+
    | lengths: n x u64 | main               | buffer 0        | buffer 1 ...    |
    +------------------+--------------------+-----------------+-----------------+

The buffers of a `PLACED` body were written in place, before the main part was known. The body begins with the offset of
a table behind the buffers, which has the offset of each part, the main part first:

    0       *                                table
    +-------+--------------------------------+--------------------+------------------------------+-----------------+
    | table | buffers, with gaps between ... | main's offset, u64 | n x (offset u64, length u64) | main, as a rule |
    +-------+--------------------------------+--------------------+------------------------------+-----------------+
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from aioshm.codec.base import Encoded
from aioshm.errors import CodecError

ALIGNMENT = 64

HEADER = struct.Struct("<BBHIQQQ")
pack_header: Callable[..., None] = HEADER.pack_into
unpack_header: Callable[..., tuple[Any, ...]] = HEADER.unpack_from

INLINE = 1  # the body is in the ring: in the slot, or in its chunk
OVERFLOW = 2  # the body did not fit a chunk and lies in an overflow segment, which the rest of the header names
RAW = 3  # the body was written with acquire_write: no codec

PLACED = 1
"""In the header's third field: the body has a table with the offsets of its parts."""


def plain(code: int, kind: int = INLINE) -> int:
    """Return the first word of the header of a message of this codec that has no out-of-band buffers."""
    return kind | code << 8


MAX_BUFFERS = 65_536
"""Maximum of out-of-band buffers of one message. An empty buffer takes no room in a body, so without this bound a chunk
of zeros could be read as millions of buffers."""

_LENGTH = struct.Struct("<Q")
_LENGTH_BYTES = 8
_ENTRY_BYTES = 2 * _LENGTH_BYTES


def body_bytes(main_bytes: int, buffer_bytes: Sequence[int]) -> int:
    """Return the size of the body that `write_body` writes for a main part and buffers of these sizes."""
    if not buffer_bytes:
        return main_bytes
    end = _aligned(_LENGTH_BYTES * len(buffer_bytes)) + main_bytes
    for size in buffer_bytes:
        end = _aligned(end) + size
    return end


def write_body(
    target: memoryview, parts: Sequence[bytes | memoryview], buffers: Sequence[bytes | bytearray | memoryview]
) -> int:
    """Write an encoded object, in parts, and its buffers into memory; return the size of all parts together."""
    main = 0
    if buffers:
        sizes = [len(buffer) for buffer in buffers]
        struct.pack_into(f"<{len(sizes)}Q", target, 0, *sizes)
        main = _aligned(_LENGTH_BYTES * len(sizes))
    end = main
    for part in parts:
        start = end
        end = start + len(part)
        target[start:end] = part
    main = end - main
    for buffer in buffers:
        start = (end + ALIGNMENT - 1) & -ALIGNMENT
        end = start + len(buffer)
        target[start:end] = buffer
    return main


def split_body(body: memoryview, n_buffers: int, main_bytes: int) -> tuple[memoryview, list[memoryview]]:
    """Return views of the main part and each buffer; check all bounds before allocating."""
    if n_buffers == 0:
        if not 0 <= main_bytes <= len(body):
            raise CodecError(f"damaged message: {main_bytes} bytes announced, {len(body)} there")
        return body[:main_bytes], []
    if not 0 < n_buffers <= MAX_BUFFERS or _LENGTH_BYTES * n_buffers > len(body):
        raise CodecError(f"damaged message: {n_buffers} buffers announced in {len(body)} bytes")
    sizes: tuple[int, ...] = struct.unpack_from(f"<{n_buffers}Q", body)
    total = body_bytes(main_bytes, sizes)
    if main_bytes < 0 or total > len(body):
        raise CodecError(f"damaged message: {total} bytes announced, {len(body)} there")
    start = _aligned(_LENGTH_BYTES * n_buffers)
    end = start + main_bytes
    main = body[start:end]
    buffers = []
    for size in sizes:
        start = _aligned(end)
        end = start + size
        buffers.append(body[start:end])
    return main, buffers


def placed_bytes(n_buffers: int, main_bytes: int) -> int:
    """Return how many bytes of a placed body follow its buffers: the table, and the main part."""
    return _LENGTH_BYTES + _ENTRY_BYTES * n_buffers + main_bytes


def pack_table(main: int, places: Sequence[int]) -> bytes:
    """Return the table of a body whose parts lie apart: bytes of the main part, offset and length of each buffer."""
    return struct.pack(f"<{1 + len(places)}Q", main, *places)


def pack_place(table: int) -> bytes:
    """Return the beginning of a placed body: the offset of its table."""
    return _LENGTH.pack(table)


def placed_end(body: memoryview, n_buffers: int, main_bytes: int) -> int:
    """Return the end of a placed body, after checking that the end lies within the memory."""
    if 0 <= n_buffers <= MAX_BUFFERS and main_bytes >= 0 and len(body) >= _LENGTH_BYTES:
        (table,) = _LENGTH.unpack_from(body)
        end = table + placed_bytes(n_buffers, 0)
        if end <= len(body):
            (main,) = _LENGTH.unpack_from(body, table)
            end = max(end, main + main_bytes)
            if end <= len(body):
                return int(end)
    raise CodecError(f"damaged message: a table of {n_buffers} buffers is not in its {len(body)} bytes")


def split_placed(body: memoryview, n_buffers: int, main_bytes: int) -> tuple[memoryview, list[memoryview]]:
    """Return views of the main part and each buffer of a placed body; check all bounds first."""
    end = placed_end(body, n_buffers, main_bytes)
    (table,) = _LENGTH.unpack_from(body)
    main, *entries = struct.unpack_from(f"<{1 + 2 * n_buffers}Q", body, table)
    buffers = []
    for i in range(0, len(entries), 2):
        start = entries[i]
        stop = start + entries[i + 1]
        if stop > end:
            raise CodecError(f"damaged message: a buffer reaches to byte {stop} of {end}")
        buffers.append(body[start:stop])
    return body[main : main + main_bytes], buffers


def split(body: memoryview, how: int, n_buffers: int, main_bytes: int) -> tuple[memoryview, list[memoryview]]:
    """Call `split_placed` or `split_body`, depending on the header's third field."""
    if how:
        return split_placed(body, n_buffers, main_bytes)
    return split_body(body, n_buffers, main_bytes)


def message_bytes(message: Encoded) -> int:
    """Return the size of an encoded message's body."""
    if isinstance(message, bytes):
        return body_bytes(len(message), [])
    parts, buffers = message
    return body_bytes(sum(map(len, parts)), [len(buffer) for buffer in buffers])


def parts_of(message: Encoded) -> tuple[Sequence[bytes | memoryview], Sequence[memoryview]]:
    """Return an encoded message's main part in pieces, and its out-of-band buffers."""
    if isinstance(message, bytes):
        return (message,), ()
    return message


def body_of(message: Encoded) -> memoryview:
    """Return an encoded message as the bytes that a slot or a socket carries, with its buffers; read-only."""
    if isinstance(message, bytes):
        return memoryview(message)
    body = bytearray(message_bytes(message))
    write_body(memoryview(body), *message)
    return memoryview(body).toreadonly()


def _aligned(offset: int) -> int:
    return (offset + ALIGNMENT - 1) & -ALIGNMENT
