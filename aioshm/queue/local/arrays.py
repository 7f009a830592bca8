"""Arrays whose messages are alike but for their numbers: the native core writes and makes them by itself.

An encoded array is a main part, which says what array it is, and one buffer. Pickling and unpickling that part takes
ten times as long as passing a message of some kilobytes. So when an array comes for a second time this module looks at
it once: a writer notes the main part by the array's type and shape, a reader what array the main part makes. From then
on the core does both.
"""

from __future__ import annotations

from typing import Any

from aioshm.codec import Codec
from aioshm.codec.buffers import OUT_OF_BAND_BYTES, is_loaded
from aioshm.codec.frames import body_bytes_of_one
from aioshm.codec.pickle5 import PickleCodec
from aioshm.queue.encoded import parts_of

MAX_KNOWN = 64
"""Kinds of arrays that are known to one end."""

MOST_MAIN_BYTES = 1024
"""Longer main parts are not looked at."""


def writes_arrays_alike(codec: Codec) -> bool:
    """Return whether main parts say all of an array but its numbers; of other people's codecs nobody knows that."""
    return type(codec) is PickleCodec


def array_type() -> type[Any] | None:
    """Return the type of arrays; None: the program has not imported NumPy."""
    if not is_loaded("numpy"):
        return None
    import numpy

    return numpy.ndarray


def is_plain(dtype: Any) -> bool:
    """Return whether an array's memory is all that there is of such elements, and its name all of the type.

    An object's pointer means nothing to another process, and is not to be trusted from one.
    """
    return dtype.isbuiltin == 1 and not dtype.hasobject


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

    def learn(self, obj: Any) -> type[Any] | None:
        """Note what is written of such arrays, if this is one; return their type, as `array_type`."""
        found = array_type()
        if found is None or type(obj) is not found:
            return found
        from aioshm.codec.arrays import main_part

        flags, dtype = obj.flags, obj.dtype
        kind = None
        if flags.c_contiguous and flags.writeable and is_plain(dtype) and obj.nbytes:
            main = main_part(obj)
            nbytes = body_bytes_of_one(len(main), obj.nbytes)
            if nbytes <= self._max_bytes:
                kind = dtype, main, nbytes, obj.nbytes
        if len(self.by_kind) >= MAX_KNOWN:
            self.by_kind.clear()
        self.by_kind[dtype, obj.shape] = kind
        return found


class ReceivedArrays:
    """Finds out what arrays main parts make.

    Args:
        codec: Makes objects of bytes.

    Attributes:
        by_main: The type, shape, dtype and bytes of the array that a message with such a main part and one buffer
            always makes, and what makes a tensor of that, if it is one; None: it makes none, or not always. The core
            reads it.
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
        if main in self.by_main or len(main) > MOST_MAIN_BYTES:
            return
        if len(self.by_main) >= MAX_KNOWN:
            self.by_main.clear()
        self.by_main[main] = self._array(main, obj) or self._tensor(main, obj)

    def _array(self, main: bytes, obj: Any) -> tuple[Any, ...] | None:
        """Return what is noted of this main part if it makes plain arrays, all as this one."""
        if not is_loaded("numpy"):
            return None
        import numpy

        from aioshm.codec.arrays import main_part

        if type(obj) is not numpy.ndarray or not obj.flags.c_contiguous or obj.dtype.hasobject:
            return None
        if writes_arrays_alike(self._codec) and is_plain(obj.dtype):
            alike = main == main_part(obj)  # which takes no memory for another array
        elif obj.nbytes < OUT_OF_BAND_BYTES:
            alike = False
        else:
            parts, buffers = parts_of(self._codec.encode(numpy.empty(obj.shape, obj.dtype)))
            alike = len(buffers) == 1 and b"".join(parts) == main
        return (numpy.ndarray, obj.shape, obj.dtype, obj.nbytes, None) if alike else None

    def _tensor(self, main: bytes, obj: Any) -> tuple[Any, ...] | None:
        """Return the same if it makes plain tensors."""
        if not writes_arrays_alike(self._codec) or not is_loaded("torch") or not is_loaded("aioshm.codec.tensors"):
            return None
        import torch

        from aioshm.codec.tensors import plain_tensor

        known = plain_tensor(obj) if type(obj) is torch.Tensor else None
        return known[1] if known is not None and known[0] == main else None
