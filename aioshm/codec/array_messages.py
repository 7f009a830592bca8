"""Messages of one array or tensor: a head (see frames.py), and the elements as the only buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from aioshm.codec.base import Encoded
from aioshm.codec.buffers import is_loaded, own_copy
from aioshm.codec.frames import ARRAY_MARKER, NUMPY, ArrayKind, split_array_head
from aioshm.errors import CodecError

_KEPT_HEADS = 256

packers: dict[type, Callable[[Any], Encoded | None]] = {}
"""By exact type; empty until the program has imported NumPy or torch. A packer returns None for an array that
the codec itself has to encode: with objects, attributes, gradients."""


def load_packers() -> None:
    """Add the types of NumPy and torch, if the program has imported them."""
    if is_loaded("numpy"):
        from aioshm.codec import arrays

        packers.update(arrays.PACKERS)
    if is_loaded("torch"):
        with suppress(ImportError):  # torch without NumPy
            from aioshm.codec import tensors

            packers.update(tensors.PACKERS)


def is_array(main: bytes | memoryview) -> bool:
    """Return whether the main part of a message is the head of an array."""
    return len(main) > 0 and main[0] == ARRAY_MARKER


def unpack(main: bytes | memoryview, buffers: Sequence[memoryview], *, show: bool) -> Any:
    """Return the array of a message: a copy, or for ``show`` a read-only view of the buffer."""
    kind = _parse(bytes(main))
    if len(buffers) != 1 or buffers[0].nbytes != kind.nbytes:
        raise CodecError(f"damaged array: {kind.nbytes} bytes announced, {[each.nbytes for each in buffers]} there")
    return kind.over(buffers[0].toreadonly() if show else own_copy(buffers[0]))


@lru_cache(_KEPT_HEADS)
def _parse(head: bytes) -> ArrayKind:
    library, order, shape, dtype = split_array_head(head)
    if library == NUMPY:
        from aioshm.codec import arrays

        return arrays.kind_of(shape, dtype, order)
    from aioshm.codec import tensors

    return tensors.kind_of(shape, dtype, order)
