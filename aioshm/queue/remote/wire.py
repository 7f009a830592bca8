"""The wire format between a writer and its remote readers: frames and control messages, without I/O.

Data, in one frame, in two frames for a long body, or in a message of two frames for each part of `PART_BYTES`: the I/O
thread that encrypts a frame answers no heartbeats before the end of the frame.

    0        16      20                  52
    +--------+-------+-------------------+-------------+        +--------+
    | topic  | rank  | header, as in a   | body        |   or   | body   |  in a second frame
    | 16 B   | u32   | slot (frames.py)  |             |        |        |
    +--------+-------+-------------------+-------------+        +--------+

    0        16      20                  52       60      68
    +--------+-------+-------------------+--------+-------+        +------------------------+
    | topic  | rank  | header            | offset | total |        | body[offset:][:length] |
    | 16 B   | u32   |                   | u64    | u64   |        +------------------------+
    +--------+-------+-------------------+--------+-------+

The header's third field has the flags `BODY_APART` and `TRACED` (a trace context of `TRACE_BYTES` follows the header).
The topic is secret and random, one per writer; a reader learns the topic from `Welcome`. The rank is `EVERYONE`, or the
reader that asked for a retransmission. Readers subscribe to both.

Control messages are MessagePack arrays; the first item is the message's name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from aioshm.codec.frames import HEADER, INLINE, MAX_BUFFERS, RAW
from aioshm.lifeline.protocol import ANY_RANK
from aioshm.ring.layout import TRACE_BYTES

SECRET_BYTES = 16
EVERYONE = 2**32 - 1
MAX_RANK = EVERYONE - 1
MAX_SEQ = 2**62  # an upper bound, also of sizes, that leaves room for arithmetic

MARK = 16
"""The kind of a message without a body that opens a subscription; its number is the number of the next message."""

# Bits of the header's third field
BODY_APART = 1
TRACED = 2

ONE_FRAME_BYTES = 16 * 1024
"""Shorter bodies share a frame with the header: a second frame costs more than the copy."""

PART_BYTES = 2 << 20
"""Longer bodies are split into parts of this size: a few milliseconds of encryption."""

_PLACE = struct.Struct("<QQ")  # a part's offset, and the size of the whole body
_ADDRESS = struct.Struct(f"<{SECRET_BYTES}sI")
ADDRESS_BYTES = _ADDRESS.size
HEAD_BYTES = ADDRESS_BYTES + HEADER.size
MAX_FRAME_BYTES = PART_BYTES + 256  # encryption adds a few bytes
MAX_SUBSCRIPTION_BYTES = 1024  # also bounds the frames of ZeroMQ's handshake
MAX_CONTROL_BYTES = 64 * 1024

_Rank: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_RANK)]
_Count: TypeAlias = Annotated[int, Meta(ge=0)]
_Host: TypeAlias = Annotated[str, Meta(max_length=4096)]
_Topic: TypeAlias = Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]


class WireError(Exception):
    """The frames are malformed."""


def address(secret: bytes, rank: int = EVERYONE) -> bytes:
    """Return the first bytes of the data messages for one reader, or for all."""
    return _ADDRESS.pack(secret, rank)


def subscriber(subscription: bytes, secret: bytes) -> int | None:
    """Return the rank in a message of an XPUB socket, if the message is a reader's subscription."""
    if len(subscription) != 1 + ADDRESS_BYTES or subscription[0] != 1:
        return None
    found, rank = _ADDRESS.unpack_from(subscription, 1)
    if found != secret or rank == EVERYONE:
        return None
    return int(rank)


class Data(msgspec.Struct, frozen=True, gc=False):
    """A data message, or a part of one."""

    kind: int  # `INLINE`, `RAW` or `MARK`
    codec: int
    n_buffers: int
    seq: int
    main_bytes: int  # length of the body's main part
    body: memoryview  # laid out as in a chunk, or a part of such a body
    trace: bytes  # the trace context; empty: none
    offset: int  # of the part in the whole body
    total: int  # size of the whole body


def parse_data(head: memoryview, body: memoryview | None) -> Data:
    """Parse a data message of one or two frames, or raise `WireError`. ZeroMQ has checked the topic."""
    if len(head) < HEAD_BYTES:
        raise WireError(f"a frame of {len(head)} bytes instead of {HEAD_BYTES} or more")
    kind, codec, flags, n_buffers, seq, _, main_bytes = HEADER.unpack_from(head, ADDRESS_BYTES)
    end = HEAD_BYTES
    trace = b""
    if flags & TRACED:
        end += TRACE_BYTES
        trace = bytes(head[HEAD_BYTES:end])
        if len(trace) != TRACE_BYTES:
            raise WireError(f"a frame of {len(head)} bytes instead of {end} or more")
    if flags & ~TRACED not in (0, BODY_APART) or bool(flags & BODY_APART) != (body is not None):
        raise WireError("another number of frames than the first one says")
    offset = 0
    if body is None:
        body = head[end:]
        total = len(body)
    elif len(head) == end:
        total = len(body)
    elif len(head) == end + _PLACE.size:
        offset, total = _PLACE.unpack_from(head, end)
        if not 0 < len(body) <= total - offset or total > MAX_SEQ:
            raise WireError(f"a part of {len(body)} bytes at {offset} of {total}")
    else:
        raise WireError(f"a first frame of {len(head)} bytes")
    if kind not in (INLINE, RAW, MARK) or n_buffers > MAX_BUFFERS or main_bytes > total:
        raise WireError(f"kind {kind}, {n_buffers} buffers, {main_bytes} of {total} bytes")
    if not n_buffers and main_bytes != total:
        raise WireError(f"{total} bytes instead of {main_bytes}")
    return Data(kind, codec, n_buffers, seq, main_bytes, body, trace, offset, total)


def parts(head: bytes, body: bytes | memoryview | None) -> Iterator[tuple[bytes, bytes | memoryview | None]]:
    """Yield the messages that transport a data message, each as one or two frames."""
    if body is None or len(body) <= PART_BYTES:
        yield head, body
        return
    whole = memoryview(body)
    for offset in range(0, len(whole), PART_BYTES):
        yield head + _PLACE.pack(offset, len(whole)), whole[offset : offset + PART_BYTES]


class Control(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=True):
    """The base of control messages."""

    def pack(self) -> bytes:
        """Return the message as bytes."""
        return _encoder.encode(self)


# Readers to writer


class Hello(Control, forbid_unknown_fields=False):
    """Introduces a reader: after each new connection, when data arrives first, and to poll the writer.

    Other versions begin with the same fields, up to `proven`.
    """

    version: int  # of the protocol; changes with the segment's layout
    queue_id: bytes
    token: bytes
    rank: Annotated[int, Meta(ge=ANY_RANK, le=MAX_RANK)]  # `ANY_RANK`: the lowest vacant one
    pid: int
    host: _Host  # for log lines
    proven: bool  # data has reached the reader
    slow: str = "block"  # as `Options.slow_reader`
    topic: bytes = b""  # the topic of the writer that admitted the reader; empty: not admitted yet
    history: _Count = 0  # how many of the latest messages the reader asks for


class Acknowledge(Control):
    """The reader has finished with all messages below this number."""

    consumed: _Count


class Resend(Control):
    """The reader lacks this message, and drops later ones: the writer sends everything from there on again."""

    first: _Count


class Finished(Control):
    """The reader knows that the writer is closing, and has received every message."""


class Leave(Control):
    """The reader detaches."""


# Writer to readers


class Welcome(Control):
    """The writer has admitted the reader; the reply to each `Hello` of an admitted reader."""

    pid: int
    host: str  # for log lines
    rank: _Rank
    first: Annotated[int, Meta(ge=0, le=MAX_SEQ)]  # number of the reader's first message
    topic: _Topic
    window: _Count  # the writer's `Options.remote_window`: a handle may have those of an earlier writer
    window_bytes: _Count


class Wait(Control):
    """The writer polls the present reader of the rank; the newcomer repeats its `Hello` soon."""

    reason: str  # for log lines


# Reasons of `Refused`
TOO_SLOW = "too slow: the queue goes on without this reader; a larger remote_window allows longer pauses"
DISMISSED = "the writer has dismissed this reader"


class Refused(Control, forbid_unknown_fields=False):
    """The writer rejects or detaches the reader. Other versions know the first two fields."""

    reason: str  # for log lines
    evicted: bool = False  # the reader had been admitted
    full: bool = False  # all ranks have readers
    closed: bool = False  # the writer is closing the queue


class Go(Control):
    """Every reader is ready."""


class Tick(Control):
    """The writer polls the reader; the reply is an `Acknowledge`."""


class Left(Control):
    """The reply to `Leave` and `Finished`: the writer does not wait for the reader."""


class Closing(Control):
    """The writer closes the queue; the next message would have had this number."""

    end: _Count


FromReader = Hello | Acknowledge | Resend | Finished | Leave
FromWriter = Welcome | Wait | Refused | Go | Tick | Left | Closing

_encoder = msgspec.msgpack.Encoder()
_from_reader: msgspec.msgpack.Decoder[FromReader] = msgspec.msgpack.Decoder(FromReader)
_from_writer: msgspec.msgpack.Decoder[FromWriter] = msgspec.msgpack.Decoder(FromWriter)
_T = TypeVar("_T")


def parse_from_reader(data: bytes) -> FromReader:
    """Parse a reader's control message, or raise `WireError`."""
    return _parse(_from_reader, data)


def parse_from_writer(data: bytes) -> FromWriter:
    """Parse a control message of the writer, or raise `WireError`."""
    return _parse(_from_writer, data)


def _parse(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    if len(data) > MAX_CONTROL_BYTES:
        raise WireError(f"a control message of {len(data)} bytes")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"no control message: {error}") from None
