"""Arrays whose messages are alike but for their numbers: known by their main parts, the core makes them by itself.

An encoded array is a main part, which says what array it is, and one buffer. Unpickling that part takes longer than all
the rest of a small message. So an array that comes again is looked at once by this module: if nothing but a plain
`numpy.ndarray` can come of its main part, the native core makes those that follow.
"""

from __future__ import annotations

import sys
from typing import Any

from aioshm.codec import Codec
from aioshm.queue.encoded import parts_of

MAX_KNOWN = 64
"""Kinds of arrays that are known."""

MOST_MAIN_BYTES = 1024
"""Longer main parts are not looked at."""


class KnownArrays:
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
        if main in self.by_main:
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
