"""An encoded message."""

from __future__ import annotations

from collections.abc import Sequence

from aioshm.codec import Encoded
from aioshm.codec.frames import body_bytes, write_body


def message_bytes(message: Encoded) -> int:
    """Return how large the body of an encoded message is, as it lies in a chunk or beside it."""
    if isinstance(message, bytes):
        return body_bytes(len(message), [])
    parts, buffers = message
    return body_bytes(sum(map(len, parts)), [len(buffer) for buffer in buffers])


def parts_of(message: Encoded) -> tuple[Sequence[bytes | memoryview], Sequence[memoryview]]:
    """Return an encoded message's main part in pieces, and its out-of-band buffers."""
    return ((message,), ()) if isinstance(message, bytes) else message


def body_of(message: Encoded) -> memoryview:
    """Return the body of an encoded message, read-only, as it would lie in a chunk."""
    if isinstance(message, bytes):
        return memoryview(message)
    body = bytearray(message_bytes(message))
    write_body(memoryview(body), *message)
    return memoryview(body).toreadonly()
