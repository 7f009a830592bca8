"""NumPy arrays inside MessagePack. Imports NumPy, so import this only where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np

from aioshm.codec.arrays import PLAIN_DTYPE, Array, Memory, memory_of

Length: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]  # NumPy gives -1 a meaning of its own

# element type, shape, whether column-major
_encode_head = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(tuple[Any, tuple[Length, ...], bool]).decode


def pack_array(array: Array) -> tuple[bytes, Memory]:
    """Return an array's description (dtype, shape, order), and its memory."""
    dtype = array.dtype
    if dtype.hasobject or not dtype.itemsize:
        raise TypeError(f"arrays of dtype {dtype} cannot travel")
    memory, order = memory_of(array)
    return _encode_head((dtype.str if dtype.fields is None else dtype.descr, array.shape, order == "F")), memory


def unpack_array(head: memoryview, memory: Any) -> Array:
    """Return an array over memory, without a copy."""
    element, shape, by_columns = _decode_head(head)
    return np.ndarray(shape, _dtype(element), memory, 0, None, "F" if by_columns else "C")


PACKERS: dict[type, Callable[[Any], tuple[bytes, Memory]]] = {np.ndarray: pack_array}
NUMBERS: tuple[type, ...] = (
    *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
    *(np.float16, np.float32, np.float64),
)


def _dtype(element: Any) -> np.dtype[Any]:
    if isinstance(element, str) and PLAIN_DTYPE.fullmatch(element):
        return np.dtype(element)
    if not isinstance(element, list):
        raise ValueError(f"no dtype: {element!r}")
    names: list[Any] = []
    formats: list[Any] = []
    offsets: list[int] = []
    titles: list[Any] = []
    end = 0
    for name, inner, *shape in element:
        field = np.dtype((_dtype(inner), tuple(shape[0]))) if shape else _dtype(inner)
        title, known_as = name if isinstance(name, list) else (None, name)
        if known_as:  # padding has no name
            names.append(known_as)
            formats.append(field)
            offsets.append(end)
            titles.append(title)
        end += field.itemsize
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "titles": titles, "itemsize": end})
