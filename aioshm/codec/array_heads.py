"""Arrays as bytes: a head that describes the elements, and the elements. Reading runs no code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from aioshm.codec.base import Encoded, is_loaded, own_copy
from aioshm.errors import CodecError

ARRAY_MARKER: Final = b"\xc1"
"""The first byte of a message that is one array; no pickle and no MessagePack begins with this byte."""

NUMPY: Final = 0
TORCH: Final = 1

Order: TypeAlias = Literal["C", "F"]
Length: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]  # NumPy would infer a length of -1


class ArrayHead(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """The description of an array (`NUMPY`) or a tensor (`TORCH`), encoded as a MessagePack array."""

    library: int
    dtype: str
    shape: tuple[Length, ...]
    order: Order
    requires_grad: bool = False
    is_parameter: bool = False
    device: str = ""  # empty: the CPU


encode_head: Callable[[ArrayHead], bytes] = msgspec.msgpack.Encoder().encode
decode_head: Callable[[bytes | memoryview], ArrayHead] = msgspec.msgpack.Decoder(ArrayHead).decode

# Tables by exact type; empty until the program has imported NumPy or torch.
packers: dict[type, Callable[[Any], Encoded | None]] = {}
"""Encode an array as a message of its own; None if the codec must encode the array: objects, gradients."""
describers: dict[type, Callable[[Any], tuple[ArrayHead, memoryview]]] = {}
"""Return head and elements of an array, for MessagePack."""
reducers: dict[type, Callable[[Any], Any]] = {}
"""Reduce an array for pickle."""
numbers: set[type] = set()
"""NumPy's scalar types."""


def load_libraries() -> None:
    """Fill the tables above for NumPy and torch, if the program has imported them."""
    if is_loaded("numpy"):
        from aioshm.codec import arrays

        assert arrays
    if is_loaded("torch"):
        with suppress(ImportError):  # torch without NumPy
            from aioshm.codec import tensors

            assert tensors


def rebuild(head: ArrayHead, memory: Any) -> Any:
    """Return an array or a tensor over memory, without a copy."""
    if head.library == NUMPY:
        from aioshm.codec import arrays

        array: Any = arrays.rebuild(head, memory)
    elif head.library == TORCH:
        from aioshm.codec import tensors

        array = tensors.rebuild(head, memory)
    else:
        raise CodecError(f"damaged array: library {head.library}")
    if array.nbytes != len(memory):
        raise CodecError(f"damaged array: {array.nbytes} bytes announced, {len(memory)} there")
    return array


def is_array(main: bytes | memoryview) -> bool:
    """Return whether the main part of a message is the head of an array."""
    return main[:1] == ARRAY_MARKER


def message_head(head: ArrayHead) -> bytes:
    """Return the main part of a message that is one array."""
    return ARRAY_MARKER + encode_head(head)


def unpack_message(main: bytes | memoryview, buffers: Sequence[memoryview], *, in_place: bool) -> Any:
    """Return the array of a message: a copy, or a read-only view of the buffer."""
    [elements] = buffers
    return rebuild(_parse(bytes(main)), elements.toreadonly() if in_place else own_copy(elements))


@lru_cache(256)
def _parse(main: bytes) -> ArrayHead:
    return decode_head(main[1:])
