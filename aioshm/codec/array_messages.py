"""Messages that are one array or one tensor: a short head, and the elements in the one out-of-band buffer.

    marker u8 | library u8 | order u8 | dimensions u8 | shape: n x u64 | name of the dtype

No pickle and no MessagePack begins with ``marker``. ``library`` is `NUMPY` or `TORCH`, ``order`` is ``C`` or ``F``. All
numbers are little-endian. Reading a head runs no code that the sender chooses.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

from aioshm.codec.base import Encoded
from aioshm.codec.buffers import is_loaded, own_copy
from aioshm.errors import CodecError

MARKER: Final = 0xC1
NUMPY: Final = 0
TORCH: Final = 1

_FIXED = struct.Struct("<BBcB")
_KEPT_HEADS = 256

Pack: TypeAlias = Callable[[Any], Encoded | None]
"""Encodes an array; returns None where the codec itself has to: for objects, attributes, gradients."""

packers: dict[type, Pack] = {}
"""By exact type; empty until the program has imported NumPy or torch."""


class Kind(NamedTuple):
    """The size of an array in bytes, and the function that lays the array over memory of that size."""

    nbytes: int
    over: Callable[[Any], Any]


def load_packers() -> None:
    """Add the types of NumPy and torch, if the program has imported them."""
    if is_loaded("numpy"):
        from aioshm.codec import arrays

        packers.update(arrays.PACKERS)
    if is_loaded("torch"):
        from aioshm.codec import tensors

        packers.update(tensors.PACKERS)


def pack_head(library: int, order: str, shape: tuple[int, ...], dtype: str) -> bytes:
    """Return the head of an array."""
    fixed = _FIXED.pack(MARKER, library, order.encode(), len(shape))
    return b"".join((fixed, struct.pack(f"<{len(shape)}Q", *shape), dtype.encode()))


def is_array(main: bytes | memoryview) -> bool:
    """Return whether the main part of a message is the head of an array."""
    return len(main) > 0 and main[0] == MARKER


def unpack(main: bytes | memoryview, buffers: Sequence[memoryview], *, show: bool) -> Any:
    """Return the array of a message: a copy, or for ``show`` a read-only view of the buffer.

    Raises:
        CodecError: The head is damaged, or the buffer has another size.
    """
    kind = _parse(bytes(main))
    if len(buffers) != 1 or buffers[0].nbytes != kind.nbytes:
        raise CodecError(f"damaged array: {kind.nbytes} bytes announced, {[each.nbytes for each in buffers]} there")
    return kind.over(buffers[0].toreadonly() if show else own_copy(buffers[0]))


@lru_cache(_KEPT_HEADS)
def _parse(head: bytes) -> Kind:
    try:
        _, library, order, dimensions = _FIXED.unpack_from(head)
        shape = struct.unpack_from(f"<{dimensions}Q", head, _FIXED.size)
        dtype = head[_FIXED.size + 8 * dimensions :].decode("ascii")
    except (struct.error, UnicodeDecodeError) as error:
        raise CodecError(f"damaged array: {error}") from error
    if library not in (NUMPY, TORCH) or order not in (b"C", b"F"):
        raise CodecError(f"damaged array: library {library}, order {order!r}")
    by_columns = order == b"F"
    if library == NUMPY:
        from aioshm.codec import arrays

        return arrays.kind_of(shape, dtype, "F" if by_columns else "C")
    from aioshm.codec import tensors

    return tensors.kind_of(shape, dtype, "F" if by_columns else "C")
