"""Arrays whose messages are alike but for their numbers: the native core writes and makes them by itself.

An encoded array is a main part, which says what array it is, and one buffer. Pickling and unpickling that part takes
ten times as long as passing a message of some kilobytes. So when an array comes for a second time this module looks at
it once: a writer notes the main part by the array's type and shape, a reader what array the main part makes. From then
on the core does both.
"""

from __future__ import annotations

import sys
from typing import Any

from aioshm.codec import Codec, Encoded
from aioshm.codec.frames import body_bytes_of_one
from aioshm.codec.pickle5 import PickleCodec
from aioshm.queue.encoded import parts_of

MAX_KNOWN = 64
"""Kinds of arrays that are known to one end."""

MOST_MAIN_BYTES = 1024
"""Longer main parts are not looked at."""


def writes_arrays_alike(codec: Codec) -> bool:
    """Return whether the codec's main parts say all of an array but its numbers; of other people's nobody knows that."""
    return type(codec) is PickleCodec


class SentArrays:
    """Notes what is written of arrays beside their numbers.

    Args:
        max_bytes: The size of the largest body that may be sent.

    Attributes:
        by_kind: By the type and shape of an array that is contiguous, and can be written to: its type, its main part,
            how many bytes its body has, and how many itself; None: it is to be encoded. The core reads it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.by_kind: dict[tuple[Any, ...], tuple[Any, bytes, int, int] | None] = {}

    def learn(self, obj: Any, message: Encoded) -> type[Any] | None:
        """Note what is written of such arrays.

        Args:
            obj: What is being sent.
            message: What encoding has made of it.

        Returns:
            The type of arrays; None as long as nobody has imported NumPy.
        """
        numpy = sys.modules.get("numpy")
        array_type: type[Any] | None = getattr(numpy, "ndarray", None)
        if array_type is None or type(obj) is not array_type:
            return array_type
        parts, buffers = parts_of(message)
        flags, dtype, main = obj.flags, obj.dtype, b"".join(parts)
        kind = None
        if flags.c_contiguous and flags.writeable and dtype.isbuiltin == 1 and len(buffers) == 1:
            nbytes = body_bytes_of_one(len(main), obj.nbytes)
            if len(buffers[0]) == obj.nbytes and nbytes <= self._max_bytes:
                kind = dtype, main, nbytes, obj.nbytes
        if len(self.by_kind) >= MAX_KNOWN:
            self.by_kind.clear()
        self.by_kind[dtype, obj.shape] = kind
        return array_type


class ReceivedArrays:
    """Finds out what arrays main parts make.

    Args:
        codec: Makes objects of bytes.

    Attributes:
        by_main: The type, shape, dtype and bytes of the array that a message with such a main part and one buffer
            always makes; None: it makes none, or not always. The core reads it.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.by_main: dict[bytes, tuple[Any, ...] | None] = {}

    def learn(self, main: bytes, obj: Any) -> None:
        """Let the core make what is encoded like this, if it is an array, and no more than that.

        Args:
            main: The main part of a message that has one buffer.
            obj: What was decoded of both.
        """
        numpy = sys.modules.get("numpy")
        if main in self.by_main or len(main) > MOST_MAIN_BYTES:
            return
        array = None
        if numpy is not None and type(obj) is numpy.ndarray and obj.flags.c_contiguous:
            array = obj
            parts, buffers = parts_of(self._codec.encode(numpy.empty(array.shape, array.dtype)))
            if len(buffers) != 1 or b"".join(parts) != main:
                array = None
        if len(self.by_main) >= MAX_KNOWN:
            self.by_main.clear()
        self.by_main[main] = None if array is None else (type(array), array.shape, array.dtype, array.nbytes)
