"""The frames around a payload: of PUB messages, of replay requests and of their answers. No I/O.

    PUB            [topic, seq, payload]
    request        [b"", start]                          (a ROUTER sees the client's identity in front)
    replies        [b"", topic, seq, payload] ...        or without topic ("legacy")
    end of replies [b"", b"", 8 x 0xff, b""]             or without the empty topic

Numbers are 8 bytes, big-endian, unsigned; 8 x 0xff is never the number of a batch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from aioshm.errors import CodecError

Encoding: TypeAlias = Literal["array", "map"]

ReplayFormat: TypeAlias = Literal["topic", "legacy"]

Wire: TypeAlias = Literal["vllm-0.24+", "vllm-0.24", "vllm-0.9"]
DEFAULT_WIRE: Wire = "vllm-0.24+"
WIRES: dict[Wire, tuple[Encoding, ReplayFormat]] = {
    "vllm-0.24+": ("map", "topic"),
    "vllm-0.24": ("map", "legacy"),
    "vllm-0.9": ("array", "legacy"),
}
"""Encoding of events and format of replies, by the releases of vLLM that use them. Live frames are the same in all.

0.9 to 0.23 wrote arrays, 0.24 and newer write maps; 0.24 itself still answered without the topic, 0.33 answers with it.
"""

SEQ_BYTES = 8
MAX_TOPIC_BYTES = 512
"""Publishers disconnect a peer that subscribes to a longer topic; subscribers refuse messages with a longer topic."""
END_SEQ = b"\xff" * SEQ_BYTES
MAX_SEQ = 2**64 - 2


def formats_of(wire: Wire) -> tuple[Encoding, ReplayFormat]:
    """Return the encoding and the format of replies of a release; ValueError: unknown."""
    if wire not in WIRES:
        raise ValueError(f"wire must be one of {tuple(WIRES)}, not {wire!r}")
    return WIRES[wire]


class Frames(NamedTuple):
    """One batch as received, live or replayed; ``topic`` is None in replies of the legacy format."""

    topic: bytes | None
    seq: int
    payload: bytes


pack_seq: Callable[[int], bytes] = struct.Struct(">Q").pack
"""Encodes a number."""


def parse_live(frames: Sequence[bytes]) -> Frames:
    """Parse a PUB message, or raise CodecError."""
    if len(frames) != 3:
        raise CodecError(f"a live message has 3 frames; got {len(frames)}")
    topic, seq, payload = frames
    return Frames(_check_topic(topic), _unpack_seq(seq), payload)


def parse_request(frames: Sequence[bytes]) -> int:
    """Return the start number of a request without the client's identity, or raise CodecError."""
    if len(frames) != 2 or frames[0] != b"":
        raise CodecError(f"a replay request is an empty frame and a number; got {len(frames)} frames")
    if len(frames[1]) != SEQ_BYTES:
        raise CodecError(f"a start number has {SEQ_BYTES} bytes; got {len(frames[1])}")
    return int.from_bytes(frames[1], "big")


def request(start: int) -> list[bytes]:
    """Return the frames that request batch ``start`` and all later batches."""
    return [b"", pack_seq(start)]


def reply(topic: bytes, seq: int, payload: bytes, form: ReplayFormat) -> list[bytes]:
    """Return the frames of one batch in an answer."""
    if form == "topic":
        return [b"", topic, pack_seq(seq), payload]
    return [b"", pack_seq(seq), payload]


def end_reply(form: ReplayFormat) -> list[bytes]:
    """Return the frames that end an answer."""
    return [b"", b"", END_SEQ, b""] if form == "topic" else [b"", END_SEQ, b""]


def parse_reply(frames: Sequence[bytes]) -> Frames | None:
    """Parse one reply of either format, or raise CodecError; None is the end marker."""
    if len(frames) not in (3, 4) or frames[0] != b"":
        raise CodecError(f"a replay reply is an empty frame and 2 or 3 more; got {len(frames)} frames")
    topic = _check_topic(frames[1]) if len(frames) == 4 else None
    seq, payload = frames[-2:]
    if seq == END_SEQ:
        return None
    return Frames(topic, _unpack_seq(seq), payload)


def _check_topic(topic: bytes) -> bytes:
    if len(topic) > MAX_TOPIC_BYTES:
        raise CodecError(f"a topic has at most {MAX_TOPIC_BYTES} bytes; got {len(topic)}")
    return topic


def _unpack_seq(raw: bytes) -> int:
    if len(raw) != SEQ_BYTES:
        raise CodecError(f"a sequence number has {SEQ_BYTES} bytes; got {len(raw)}")
    if raw == END_SEQ:
        raise CodecError("8 x 0xff ends a replay and is not the number of a batch")
    return int.from_bytes(raw, "big")
