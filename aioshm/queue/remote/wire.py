"""What passes between a writer and its remote readers, read and written. No I/O.

Data goes from the writer's XPUB socket to the readers' SUB sockets, in one frame or, for a long body, in two. A body of
more than `PART_BYTES` goes in parts, each in a message of its own: the thread that encrypts and decrypts a frame also
answers heartbeats, and does not between the frame's beginning and end.

    0        16      20                  52
    +--------+-------+-------------------+-------------+        +--------+
    | secret | whom  | header, as in a   | body        |   or   | body   |  in a frame of its own
    | topic  | u32   | slot (frames.py)  |             |        |        |
    +--------+-------+-------------------+-------------+        +--------+

    0        16      20                  52       60      68
    +--------+-------+-------------------+--------+-------+        +------------------------+
    | secret | whom  | header            | offset | total |        | body[offset:][:length] |
    | topic  | u32   |                   | u64    | u64   |        +------------------------+
    +--------+-------+-------------------+--------+-------+

The third field of the header says whether the body is apart, and whether there is a trace context between header and
body (`TRACE_BYTES`, as in a slot).

``whom`` is `EVERYONE`, or the rank of the one reader that asked for this message again. Both lie in the part of a frame
that a subscription is for, so only subscribers that know the secret get anything at all.

Control messages, readers' DEALER to writer's ROUTER and back, are MessagePack arrays that begin with their name. A
reader subscribes once it was admitted: what it receives is for it, from its first message on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

import msgspec

from aioshm.codec.frames import HEADER, INLINE, MAX_BUFFERS, RAW
from aioshm.lifeline.protocol import ANY_RANK
from aioshm.ring.layout import TRACE_BYTES, VERSION

SECRET_BYTES = 16
EVERYONE = 2**32 - 1
MAX_RANK = EVERYONE - 1
MAX_SEQ = 2**62  # more than there will ever be, and an end that can be counted on from

MARK = 16
"""A kind of data message without a body: its sequence number is that of the message behind it. A reader that has just
subscribed gets one, and thereby knows which messages it will not get by itself."""

BODY_APART, TRACED = 1, 2  # bits of the header's third field
ONE_FRAME_BYTES = 16 * 1024
"""Bodies up to this are joined to their head: one more frame costs more than the copy."""

PART_BYTES = 2 << 20
"""Longer bodies go in parts of this size: some milliseconds of encryption."""

_PLACE = struct.Struct("<QQ")  # of a part: where it begins, and the size of the whole body
_ADDRESS = struct.Struct(f"<{SECRET_BYTES}sI")
ADDRESS_BYTES = _ADDRESS.size
HEAD_BYTES = ADDRESS_BYTES + HEADER.size
MAX_FRAME_BYTES = PART_BYTES + 256  # with what encryption adds
MAX_SUBSCRIPTION_BYTES = 1024  # which ZeroMQ's own handshake must fit, too
MAX_CONTROL_BYTES = 64 * 1024
MAX_RANGES = 64
_MAX_TEXT = 4096


class WireError(Exception):
    """These frames are not what a writer or a reader of this queue sends."""


class VersionError(WireError):
    """This is a greeting in another version of the protocol."""


def address(secret: bytes, rank: int = EVERYONE) -> bytes:
    """Return what the data messages for a reader, or for all of them, begin with: a subscription's topic."""
    return _ADDRESS.pack(secret, rank)


def subscriber(subscription: bytes, secret: bytes) -> int | None:
    """Return the rank of the reader that this message of an XPUB socket says has subscribed, if it is one's."""
    if len(subscription) != 1 + ADDRESS_BYTES or subscription[0] != 1:
        return None
    found, rank = _ADDRESS.unpack_from(subscription, 1)
    return rank if found == secret and rank != EVERYONE else None


class Data(msgspec.Struct, frozen=True, gc=False):
    """A data message, or a part of one."""

    kind: int  # `INLINE`, `RAW` or `MARK`
    codec: int
    n_buffers: int
    seq: int
    main_bytes: int  # length of the body's main part
    body: memoryview  # as it would lie in a chunk; or a part of that
    trace: bytes  # the trace context; empty: there is none
    offset: int  # where the part begins in the whole body
    total: int  # size of the whole body


def parse_data(head: memoryview, body: memoryview | None) -> Data:
    """Read a data message of one or two frames, or raise `WireError`. The subscription has checked the secret."""
    if len(head) < HEAD_BYTES:
        raise WireError(f"a frame of {len(head)} bytes instead of {HEAD_BYTES} or more")
    kind, codec, flags, n_buffers, seq, _, main_bytes = HEADER.unpack_from(head, ADDRESS_BYTES)
    end, trace = HEAD_BYTES, b""
    if flags & TRACED:
        end += TRACE_BYTES
        trace = bytes(head[HEAD_BYTES:end])
        if len(trace) != TRACE_BYTES:
            raise WireError(f"a frame of {len(head)} bytes instead of {end} or more")
    in_parts = body is not None and len(head) == end + _PLACE.size
    if flags & ~TRACED != (BODY_APART if body is not None else 0) or (
        body is not None and len(head) != end and not in_parts
    ):
        raise WireError("another number of frames than the first one says")
    if body is None:
        body = head[end:]
    offset, total = _PLACE.unpack_from(head, end) if in_parts else (0, len(body))
    if in_parts and not 0 < len(body) <= total - offset:
        raise WireError(f"a part of {len(body)} bytes at {offset} of {total}")
    if kind not in (INLINE, RAW, MARK) or n_buffers > MAX_BUFFERS or main_bytes > total:
        raise WireError(f"kind {kind}, {n_buffers} buffers, {main_bytes} of {total} bytes")
    if not n_buffers and main_bytes != total:
        raise WireError(f"{total} bytes instead of {main_bytes}")
    return Data(kind, codec, n_buffers, seq, main_bytes, body, trace, offset, total)


def parts(head: bytes, body: bytes | memoryview | None) -> Iterator[tuple[bytes, bytes | memoryview | None]]:
    """Yield the messages, of one frame or two, that carry a data message."""
    if body is None or len(body) <= PART_BYTES:
        yield head, body
        return
    whole = memoryview(body) if isinstance(body, bytes) else body
    for offset in range(0, len(whole), PART_BYTES):
        yield head + _PLACE.pack(offset, len(whole)), whole[offset : offset + PART_BYTES]


class Control(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=True):
    """The base of control messages."""

    def pack(self) -> bytes:
        """Return the message as bytes."""
        return _encoder.encode(self)


# Readers to writer


class Hello(Control):
    """A reader introduces itself, again after every new connection."""

    version: int  # of the protocol, which changes with the segment's layout
    queue_id: bytes
    token: bytes
    rank: int  # or `ANY_RANK`: the lowest that has no reader
    pid: int
    host: str  # for people
    proven: bool  # data has reached the reader
    slow: str = "block"  # as `Options.slow_reader`
    topic: bytes = b""  # the writer's, whose data messages begin with it
    history: int = 0  # how many of the latest messages the reader wants first
    admitted: bool = False  # before: if the writer does not know the reader any more, the reader has missed something
    leaving: bool = False  # this only says which reader leaves


class Proven(Control):
    """Data has reached the reader."""


class Acknowledge(Control):
    """The reader has finished with all messages below this number."""

    consumed: int


class Resend(Control):
    """The reader is missing these runs of messages, each from a first to a last number."""

    ranges: list[tuple[int, int]]


class Finished(Control):
    """The reader has heard that the writer is closing, and has received everything."""


class Leave(Control):
    """A reader says goodbye."""


# Writer to readers


class Welcome(Control):
    """The writer admits a reader, or has done so before."""

    pid: int
    host: str  # for people
    rank: int
    first: int  # number of the reader's first message


class Wait(Control):
    """The writer will admit or refuse a reader once it knows whether the reader that has the rank is still there."""

    reason: str  # for people


TOO_SLOW = "it was too slow"
"""Why a reader is refused that its ``slow_reader="evict"`` has ended."""

DISMISSED = "the writer has dismissed this reader"
"""Why a reader is refused that `MessageQueue.dismiss` has ended."""


class Refused(Control, forbid_unknown_fields=False):
    """The writer does not admit a reader, or not any more. Other versions know the first two fields."""

    reason: str  # for people
    evicted: bool = False  # the reader had been admitted
    full: bool = False  # all ranks have readers
    closed: bool = False  # the writer is closing the queue


class Renewed(Control):
    """Another writer has taken the place of the reader's: the reader says hello once more, with this topic."""

    topic: bytes


class Go(Control):
    """Every reader is ready."""


class Tick(Control):
    """The writer asks whether the reader is there; the answer is an `Acknowledge`."""


class Lost(Control):
    """Messages that a reader asked for, from a first to a last number, do not exist any more."""

    first: int
    last: int


class Left(Control):
    """The writer knows that a reader leaves, or has received everything, and does not wait for the reader."""


class Closing(Control):
    """The writer says goodbye; the next message would have had this number."""

    end: int


FromReader = Hello | Proven | Acknowledge | Resend | Finished | Leave
FromWriter = Welcome | Wait | Refused | Renewed | Go | Tick | Lost | Left | Closing

_encoder = msgspec.msgpack.Encoder()
_from_reader: msgspec.msgpack.Decoder[FromReader] = msgspec.msgpack.Decoder(FromReader)
_from_writer: msgspec.msgpack.Decoder[FromWriter] = msgspec.msgpack.Decoder(FromWriter)
_T = TypeVar("_T")


class _AnyHello(msgspec.Struct, array_like=True, tag="Hello"):
    """What a greeting begins with in all versions."""

    version: int


_any_hello: msgspec.msgpack.Decoder[_AnyHello] = msgspec.msgpack.Decoder(_AnyHello)


def parse_from_reader(data: bytes) -> FromReader:
    """Read a control message that a reader sent; raise `VersionError` for a greeting of another version."""
    try:
        message = _parse(_from_reader, data)
    except WireError:
        if len(data) <= MAX_CONTROL_BYTES:
            _check_version(data)
        raise
    if isinstance(message, Hello) and (
        not ANY_RANK <= message.rank <= MAX_RANK or len(message.host) > _MAX_TEXT or message.history < 0
    ):
        raise WireError(f"a greeting from rank {message.rank}")
    if isinstance(message, Acknowledge) and message.consumed < 0:
        raise WireError(f"{message.consumed} messages acknowledged")
    if isinstance(message, Resend) and not (
        len(message.ranges) <= MAX_RANGES and all(0 <= first <= last for first, last in message.ranges)
    ):
        raise WireError("a request for no runs of messages")
    return message


def parse_from_writer(data: bytes) -> FromWriter:
    """Read a control message that the writer sent."""
    message = _parse(_from_writer, data)
    if isinstance(message, Welcome) and not (0 <= message.rank <= MAX_RANK and 0 <= message.first <= MAX_SEQ):
        raise WireError(f"a welcome to rank {message.rank} from message {message.first} on")
    if isinstance(message, Lost) and not 0 <= message.first <= message.last:
        raise WireError(f"{message.first} to {message.last} lost")
    if isinstance(message, Renewed) and len(message.topic) != SECRET_BYTES:
        raise WireError(f"a topic of {len(message.topic)} bytes")
    if isinstance(message, Closing) and message.end < 0:
        raise WireError(f"an end at {message.end}")
    return message


def _check_version(data: bytes) -> None:
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        version = _any_hello.decode(data).version
        if version != VERSION:
            raise VersionError(other_version(version))


def other_version(version: int) -> str:
    """Return why a reader is refused that speaks another version."""
    return f"this queue speaks version {VERSION}, not {version}: both ends need the same release of aioshm"


def _parse(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    if len(data) > MAX_CONTROL_BYTES:
        raise WireError(f"a control message of {len(data)} bytes")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"no control message: {error}") from None
