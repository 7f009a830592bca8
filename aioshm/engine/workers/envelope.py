"""What goes between a group and one of its workers: pickle, with a head that can be read whatever the rest is."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from aioshm.codec import Encoded, PickleCodec, cannot_decode
from aioshm.errors import CodecError

_HEAD = struct.Struct("<BQQ")

# To the worker
CALL, STREAM, CANCEL, CREDIT = range(4)
# From the worker
RESULT, FAILURE, ITEM = range(4, 7)


class Envelope(NamedTuple):
    """A message.

    Attributes:
        kind: One of those above. A call, or a stream, is answered by one result or failure, after any number of items.
        call: The number of the call.
        steps: To the worker: how many steps it has been sent before.
        value: A `Request`, a result, an item, a `RemoteFailure`, or how many items more are wanted; `Undecodable` where
            it could not be decoded.
    """

    kind: int
    call: int
    steps: int = 0
    value: Any = None


class Request(NamedTuple):
    """What is to be called.

    Attributes:
        what: The name of a method, or a function that is given the worker.
        args: Its arguments.
        kwargs: The same by name.
        items: How many items of a stream may be made before any is taken.
    """

    what: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    items: int = 0


class Undecodable(NamedTuple):
    """Takes the place of what could not be decoded.

    Attributes:
        error: Why.
    """

    error: CodecError


class EnvelopeCodec(PickleCodec):
    """Pickle, for envelopes: one whose value cannot be decoded says still which call it is about."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = _new_encode(self.encode)

    @staticmethod
    def loads(data: bytes) -> Any:  # type: ignore[override]
        """Decode an envelope without buffers."""
        kind, call, steps = _HEAD.unpack_from(data)
        try:
            return Envelope(kind, call, steps, PickleCodec.loads(memoryview(data)[_HEAD.size :]))
        except Exception as error:
            return Envelope(kind, call, steps, Undecodable(cannot_decode(error)))

    def decode(self, main: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
        """Decode an envelope."""
        kind, call, steps = _HEAD.unpack_from(main)
        try:
            return Envelope(kind, call, steps, super().decode(memoryview(main)[_HEAD.size :], buffers))
        except CodecError as error:
            return Envelope(kind, call, steps, Undecodable(error))


def _new_encode(encode: Callable[[Any], Encoded]) -> Callable[[Any], Encoded]:
    pack = _HEAD.pack

    def encode_envelope(envelope: Envelope) -> Encoded:
        kind, call, steps, value = envelope
        head, encoded = pack(kind, call, steps), encode(value)
        if isinstance(encoded, bytes):
            return head + encoded
        parts, buffers = encoded
        return (head, *parts), buffers

    return encode_envelope
