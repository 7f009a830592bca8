"""The messages between a group and its workers: pickle, with a head that can be read whatever the rest is."""

from __future__ import annotations

import os
import struct
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from aioshm.codec import Encoded, PickleCodec, cannot_decode
from aioshm.errors import CodecError, RemoteFailure

MAX_TEXT = 1 << 14
"""Characters of an exception's text, and of its traceback's end, that are sent."""

_HEAD = struct.Struct("<BQQ")
_HERE = os.path.dirname(__file__)

# To the worker
CALL, STREAM, CANCEL, CREDIT, LEAVE = range(5)
# From the worker
RESULT, FAILURE, ITEM = range(5, 8)


class Envelope(NamedTuple):
    """A message.

    Attributes:
        kind: One of those above. A call or stream is answered by one result or failure, after any number of items.
        call: The number of the call.
        after: Of a call of one worker: the number of the last call of all workers that was sent before.
        value: A `Request`, a result, an item, a `RemoteFailure`, the number of further items wanted (CREDIT), the ranks
            that are to exit (LEAVE); an `Undecodable` where it could not be decoded.
    """

    kind: int
    call: int
    after: int = 0
    value: Any = None


class Request(NamedTuple):
    """A method to call, with its arguments.

    Attributes:
        method: The name of a method, or a function that is given the worker.
        prefetch: How many items of a stream may be made before any is taken.
        reply_rank: The only worker whose result is wanted; None: all.
        after: Of a call of all workers: how many calls of its own each rank has been sent before.
    """

    method: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    prefetch: int = 0
    reply_rank: int | None = None
    after: Mapping[int, int] = {}


class Undecodable(NamedTuple):
    """Takes the place of a value that could not be decoded."""

    error: CodecError


class EnvelopeCodec(PickleCodec):
    """Pickle, for envelopes: the head of one whose value cannot be decoded is still known."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = _new_encode(self.encode)

    @staticmethod
    def loads(data: bytes) -> Any:  # type: ignore[override]
        """Decode an envelope without buffers."""
        kind, call, after = _HEAD.unpack_from(data)
        try:
            return Envelope(kind, call, after, PickleCodec.loads(memoryview(data)[_HEAD.size :]))
        except Exception as error:
            return Envelope(kind, call, after, Undecodable(cannot_decode(error)))

    def decode(self, main: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
        """Decode an envelope."""
        kind, call, after = _HEAD.unpack_from(main)
        try:
            return Envelope(kind, call, after, super().decode(memoryview(main)[_HEAD.size :], buffers))
        except CodecError as error:
            return Envelope(kind, call, after, Undecodable(error))


def _new_encode(encode: Callable[[Any], Encoded]) -> Callable[[Any], Encoded]:
    pack = _HEAD.pack

    def encode_envelope(envelope: Envelope) -> Encoded:
        kind, call, after, value = envelope
        head = pack(kind, call, after)
        encoded = encode(value)
        if isinstance(encoded, bytes):
            return head + encoded
        parts, buffers = encoded
        return (head, *parts), buffers

    return encode_envelope


def method_name(method: object) -> str:
    """Return the name of a method or function for people; raise `TypeError` if it is neither."""
    if isinstance(method, str) and method:
        return method
    if not callable(method):
        raise TypeError(f"method must be the name of a method, or a function, not {method!r}")
    return str(getattr(method, "__qualname__", repr(method)))


def failure_of(error: BaseException) -> RemoteFailure:
    """Describe an exception, without the frames of this package that lead to the method."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    trace = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == _HERE:
        trace = trace.tb_next
    lines = traceback.format_exception(kind, error, trace or error.__traceback__)
    try:
        text = str(error)
    except Exception as broken:
        text = f"its text cannot be told: {type(broken).__name__}"
    return RemoteFailure(name, text[:MAX_TEXT], "".join(lines)[-MAX_TEXT:])
