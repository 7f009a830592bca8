"""The codec of bytes-like objects, for messages that are already encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from aioshm.arguments import shown
from aioshm.codec.base import OUT_OF_BAND_BYTES, Encoded, flat
from aioshm.errors import CodecError


class RawCodec:
    """Carries objects with C-contiguous memory, which arrive as ``bytes``, without type and shape."""

    name = "raw"
    code = 2
    loads = bytes

    def encode(self, obj: Any) -> Encoded:
        """Return a view of a bytes-like object's memory.

        Raises:
            CodecError: The object exposes no C-contiguous memory.
        """
        if type(obj) is bytes:
            return obj
        try:
            contiguous = memoryview(obj).c_contiguous
        except (TypeError, ValueError, BufferError) as error:
            raise CodecError(f"the raw codec carries bytes-like objects, not {type(obj).__qualname__}") from error
        if not contiguous:
            raise CodecError(f"the raw codec cannot carry a {type(obj).__qualname__} that is not C-contiguous")
        memory = flat(obj)
        if len(memory) < OUT_OF_BAND_BYTES:
            return bytes(memory)
        return (memory,), ()

    def decode(self, main: bytes | memoryview, buffers: Sequence[memoryview]) -> bytes:
        """Copy the message.

        Raises:
            CodecError: The message has out-of-band buffers, which this codec never creates.
        """
        _refuse(buffers)
        return bytes(main)

    def of_type(self, type: Any) -> Self:  # noqa: A002  # as everywhere else
        """Return this codec; its messages are ``bytes``.

        Raises:
            ValueError: ``type`` is not ``bytes``.
        """
        if type is not bytes:
            raise ValueError(f"type must be bytes with the codec 'raw', not {shown(type)}")
        return self

    def view(self, main: memoryview, buffers: Sequence[memoryview]) -> memoryview:
        """Return the message itself, read-only.

        Raises:
            CodecError: The message has out-of-band buffers, which this codec never creates.
        """
        _refuse(buffers)
        return main.toreadonly()


def _refuse(buffers: Sequence[memoryview]) -> None:
    if buffers:
        raise CodecError(f"damaged message: {len(buffers)} buffers with a raw message")
