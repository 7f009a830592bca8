"""Objects to buffers and back: no event loop, no sockets, no files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aioshm.codec.pickle5 import PickleCodec
from aioshm.codec.raw import RawCodec

__all__ = ["Codec", "get_codec"]


class Codec(Protocol):
    """One way to turn objects into bytes.

    An instance belongs to one end of one queue and is used by one thread at a time. It may be entered again while it
    is encoding: user code that runs then can encode something of its own.

    Attributes:
        name: What a handle and ``MessageQueue(codec=...)`` call it.
        code: The same in one byte, for the slot header.
    """

    name: str
    code: int

    def encode(self, obj: Any) -> tuple[bytes | memoryview, Sequence[memoryview]]:
        """Turn an object into a main part and out-of-band buffers.

        The buffers are one-dimensional, C-contiguous and of format ``B``. They, and a main part that is a view, show
        the caller's own memory and keep it alive: copy them before that memory may change.

        Raises:
            CodecError: The object cannot be encoded; the text names its type.
        """

    def decode(self, main: memoryview, buffers: Sequence[memoryview]) -> Any:
        """Turn what `encode` returned into an object.

        The result shares no memory with the arguments, and no error that this raises holds on to them: the memory may
        be reused or unmapped as soon as the call is over.

        Raises:
            CodecError: These bytes cannot be decoded.
        """


_CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (PickleCodec, RawCodec)}


def get_codec(name: str) -> Codec:
    """Return a new instance of the codec of this name.

    Raises:
        ValueError: There is no codec of this name.
    """
    try:
        make = _CODECS[name]
    except (KeyError, TypeError):
        raise ValueError(f"codec is {name!r}, known are {', '.join(sorted(_CODECS))}") from None
    return make()
